"""Speed of a whole transformer: `python benchmarks/model.py --config 5b --baseline diffusers compiled`.

Random weights of the true sizes, made on the GPU; one forward of a CFG batch of two, or with --loop a
sampling loop of 50 evaluations. Baselines and ours run in one process, by turns, on the same inputs and
weights; medians of CUDA events. Ours: NVFP4 weights, INT8 activations. Results:
benchmarks/results/model-CONFIG.json.

    --baseline   diffusers: bf16 eager; compiled: the same, torch.compile per block; comfyui: the native model
                 of the ComfyUI on PYTHONPATH; comfyui-compiled: that, torch.compile per block; comfy-kitchen:
                 that model with comfy-kitchen's int8_linear
    --skip       a share of block evaluations to skip in a fixed pattern, or a report.json whose skips are
                 stretched to this model's blocks and to 50 evaluations
"""

import argparse
import importlib.util
import itertools
from pathlib import Path

import torch
from measure import RESULTS, device_of, median_ms, peak_bytes, per_call, register, write_result

BASELINES = ("diffusers", "compiled", "comfyui", "comfyui-compiled", "comfy-kitchen")


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="2b, 5b or 1.5-5b")
    parser.add_argument("--baseline", nargs="*", choices=BASELINES, default=["diffusers"])
    parser.add_argument("--skip", help="share or report.json")
    parser.add_argument("--loop", action="store_true", help="the whole loop, not one forward")
    parser.add_argument("--evaluations", type=int, help="of a loop: 50; with --skip alone: 12")
    parser.add_argument("--baseline-evaluations", type=int, default=6, help="of a loop; the rest is scaled")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--checked-blocks", type=int, default=4, help="held against the float32 reference")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    register()
    from model_parts import CONFIGS, Bench

    if given.config not in CONFIGS:
        parser.error(f"--config must be one of 2b, 5b, 1.5-5b, got {given.config}")
    if any(name.startswith("comfy") for name in given.baseline) and importlib.util.find_spec("comfy") is None:
        parser.error(
            "these baselines need a ComfyUI checkout: PYTHONPATH=CHECKOUT python benchmarks/model.py ..."
        )
    if given.loop and given.skip is None:
        parser.error("--loop needs --skip SHARE or REPORT")
    given.evaluations = given.evaluations or (50 if given.loop else 12)
    torch.manual_seed(0)
    with torch.no_grad():
        bench = Bench(CONFIGS[given.config], device_of(given.device))
        baselines = {name: bench.baseline(name) for name in given.baseline}
        bars, rows = {}, []
        if given.loop:
            loop(given, bench, baselines, bars, rows)
        elif given.skip is not None:
            skipping(given, bench, bars, rows)
        else:
            forward(given, bench, baselines, bars, rows)
    out = given.out or RESULTS / f"model-{given.config}.json"
    write_result(out, bench.device, bars, rows)


def forward(given, bench, baselines, bars, rows) -> None:
    """One forward, nothing skipped: time, memory, waits, and the error of blocks."""
    run = bench.run()
    steps = itertools.count()
    with bench.deciding(run, evaluations=10_000) as call:
        calls = {**baselines, "ours": lambda: call(next(steps))}
        ms = median_ms(calls, bench.device, given.repeats)
        for name, value in ms.items():
            held = bench.weight_bytes(name) + peak_bytes(calls[name], bench.device)
            counts = per_call(calls[name], bench.device) if name in ("ours", "diffusers") else {}
            rows.append({"name": f"forward.{name}", "ms": value, "peak_bytes": held, **counts})
        bars[f"model.{given.config}.syncs_per_step"] = rows[-1]["waits"]
    for name in baselines:
        bars[f"model.{given.config}.vs_{_short(name)}"] = ms[name] / ms["ours"]
    errors = bench.block_errors(given.checked_blocks)
    bars[f"model.{given.config}.block_error"] = max(error for _, error, _ in errors)
    rows += [
        {"name": f"block.{block}", "error": error, "error_of_residual": residual}
        for block, error, residual in errors
    ]
    run.close()


def skipping(given, bench, bars, rows) -> None:
    """Evaluations with a share of blocks skipped, against as many without."""
    plain, _ = bench.timed_loop(None, given.evaluations)
    skipped, report = bench.timed_loop(given.skip, given.evaluations)
    share = report.skipped_fraction
    overhead = skipped / ((1 - share) * plain)
    rows.append(
        {"name": f"skip.{given.skip}", "plain_ms": plain, "ms": skipped, "share": share, "overhead": overhead}
    )
    if abs(share - 0.3) < 0.02:  # few evaluations skip less than they are asked for
        bars[f"model.{given.config}.skip30_overhead"] = overhead


def loop(given, bench, baselines, bars, rows) -> None:
    """A sampling loop with guidance, against the baselines' own."""
    ms, report = bench.timed_loop(given.skip, given.evaluations)
    rows.append(
        {
            "name": "loop.ours",
            "ms": ms,
            "share": report.skipped_fraction,
            "cache_bytes": report.cache_bytes,
            "bits": report.average_activation_bits,
        }
    )
    for name, call in baselines.items():
        measured = bench.timed_baseline_loop(call, given.baseline_evaluations)
        whole = measured * given.evaluations / given.baseline_evaluations
        rows.append({"name": f"loop.{name}", "ms": whole, "evaluations_timed": given.baseline_evaluations})
        bars[f"loop.{given.config}.vs_{_short(name)}"] = whole / ms


def _short(name: str) -> str:
    return name.removeprefix("comfy-").replace("-", "_")


if __name__ == "__main__":
    main()
