"""What the speed benchmarks share: timing, counting, where a result is written."""

import contextlib
import datetime
import importlib.metadata
import json
import runpy
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
BUSY_CYCLES = 4_000_000  # two milliseconds at 2 GHz
Call = Callable[[], object]


def register() -> None:
    """Make this checkout importable as `sixbit_diffusion`, installed or not."""
    runpy.run_path(str(ROOT / "reference" / "launch.py"))["register_root"](ROOT)


def device_of(name: str) -> torch.device:
    """The device, or an end in one line where it is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU; --config tiny --device cpu only shows that it runs")
    return torch.device(name)


def median_ms(
    calls: Mapping[str, Call], device: torch.device, repeats: int, warmup: int = 2, ahead: bool = False
) -> dict[str, float]:
    """Median milliseconds of each call. The calls take turns, so that a drifting clock meets all alike."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(elapsed_ms(call, device, ahead))
    return {name: statistics.median(found) for name, found in times.items()}


def elapsed_ms(call: Call, device: torch.device, ahead: bool = False) -> float:
    """Milliseconds of one call: by CUDA events, on a CPU by the clock.

    With `ahead` the GPU is kept busy for a moment first, so that a call of few short kernels is timed without
    the gaps in which it would wait for Python.
    """
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if ahead:
        torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def peak_bytes(call: Call, device: torch.device) -> int:
    """Most bytes that a call held on the GPU beyond what was held before it; 0 on a CPU."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def per_call(call: Call, device: torch.device) -> dict[str, float]:
    """Waits of the host, kernel launches and PyTorch ops of one call, by the profiler.

    Three calls are counted and one: the difference leaves out what the profiler itself does.
    """
    counts = [_counts(call, device, times) for times in (1, 3)]
    return {name: (counts[1][name] - counts[0][name]) / 2 for name in counts[0]}


def _counts(call: Call, device: torch.device, times: int) -> dict[str, int]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(times):
            call()
    names = [event.name for event in profile.events()]
    return {
        "waits": sum(name in WAITS for name in names),
        "launches": sum(name in LAUNCHES for name in names),
        "ops": sum(name.startswith("aten::") for name in names),
    }


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||, in float32."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Card, versions, command and date, as every result has them."""
    from sixbit_diffusion.engine.machine import find_machine, versions

    machine = find_machine(device.type)
    found = {**versions(), "cuda": torch.version.cuda}
    with contextlib.suppress(ImportError):
        import comfy_kitchen

        backends = [name for name, its in comfy_kitchen.list_backends().items() if its["available"]]
        found["comfy-kitchen"] = f"{importlib.metadata.version('comfy-kitchen')} ({', '.join(backends)})"
    return {
        "machine": f"{machine.device.type}: {machine.name}",
        "versions": found,
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
    }


def write_result(
    out: Path, device: torch.device, bars: Mapping[str, float], rows: Sequence[Mapping[str, Any]]
) -> None:
    """Put bars and rows in place of those of the same id or name of an earlier run, and print them."""
    from sixbit_diffusion.engine.files import write_json

    old = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"bars": [], "rows": []}
    facts = machine_facts(device)
    names = {row["name"] for row in rows}
    marked = [{**row, "command": facts["command"], "machine": facts["machine"]} for row in rows]
    result = {
        **facts,
        "bars": sorted(
            [
                *(bar for bar in old["bars"] if bar["id"] not in bars),
                *({"id": name, "value": value} for name, value in bars.items()),
            ],
            key=lambda bar: bar["id"],
        ),
        "rows": [*(row for row in old["rows"] if row["name"] not in names), *marked],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, result)
    for row in rows:
        print("  ".join(f"{key} {_short(value)}" for key, value in row.items()))
    print(json.dumps(dict(bars), indent=1))


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
