"""The line before sampling: what runs, what it takes, how long tuning may last. No host needed."""

import pytest
import torch
from sixbit_diffusion.nodes import status
from sixbit_diffusion.nodes.demand import Demand
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig, DMPQConfig
from sixbit_diffusion.sixbit_core.report import spelled_bytes

TOKENS, WIDTH, BLOCKS, STREAMS = 17_776, 3072, 42, 2
ROWS = TOKENS * BLOCKS * STREAMS
WEIGHTS, SAMPLING, FREE = 3 << 30, 5 << 29, 40 << 30
DEMAND = Demand(WEIGHTS, 0, SAMPLING, TOKENS, WIDTH, BLOCKS, STREAMS, torch.bfloat16)
ROW_BYTES = {"gpu": 2 * WIDTH, "gpu-int8": WIDTH + 4 * WIDTH // 64, "gpu-nvfp4": WIDTH // 2 + WIDTH // 16 + 4}


def said(
    monkeypatch: pytest.MonkeyPatch,
    dmpq: DMPQConfig | None = None,
    location: str | None = None,
    path: str = "int8",
    seconds: float = 0.0,
) -> str:
    monkeypatch.setattr(status, "path_of", lambda device: path)
    monkeypatch.setattr(status, "tuning_seconds", lambda device: seconds)
    cache = None if location is None else DeltaCacheConfig(location=location)
    line = status.status_line(torch.device("cpu"), dmpq, cache, DEMAND, FREE)
    assert line.startswith("6Bit: ") and "\n" not in line and "; Kernels: " in line
    return line


@pytest.mark.parametrize(
    ("path", "words"), [("fp4", "FP4 and INT8"), ("int8", "INT8"), ("reference", "reference")]
)
def test_path_and_router(monkeypatch: pytest.MonkeyPatch, path: str, words: str) -> None:
    line = said(monkeypatch, DMPQConfig(router="protect"), path=path)
    assert line.startswith(f"6Bit: {words}, router protect; ")
    assert said(monkeypatch, None, path=path).startswith("6Bit: activations as they come; ")


@pytest.mark.parametrize(
    ("dmpq", "seconds", "words"),
    [
        (DMPQConfig(router="int8"), 19.6, "; tuning up to 20 s; "),
        (DMPQConfig(router="int8"), 0.0, "; tuning 0 s; "),
        (DMPQConfig(router="int8", tune=False), 19.6, "; tuning 0 s; "),
        (None, 19.6, "; tuning 0 s; "),
    ],
)
def test_tuning(monkeypatch: pytest.MonkeyPatch, dmpq: DMPQConfig | None, seconds: float, words: str) -> None:
    assert words in said(monkeypatch, dmpq, seconds=seconds)


def test_without_a_cache_weights_and_sampling_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "; needs 5.50 GiB (weights 3.00 GiB, sampling 2.50 GiB), 40.00 GiB free; "
    assert words in said(monkeypatch)


@pytest.mark.parametrize("location", ROW_BYTES)
def test_a_cache_on_the_gpu_is_needed_too(monkeypatch: pytest.MonkeyPatch, location: str) -> None:
    held = ROWS * ROW_BYTES[location]
    assert DEMAND.cache(location) == DEMAND.cache_on_gpu(location) == held > 1 << 30
    line = said(monkeypatch, location=location)
    assert f", delta cache up to {spelled_bytes(held)} ({location})), " in line
    assert f"; needs {spelled_bytes(WEIGHTS + SAMPLING + held)} (weights " in line


def test_of_a_cache_in_host_memory_what_is_on_its_way_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    held, on_gpu = ROWS * ROW_BYTES["gpu-int8"] * 49 // 42, DEMAND.cache_on_gpu("host")  # and 7 spans
    assert DEMAND.cache("host") == held and 0 < on_gpu < held / 5
    line = said(monkeypatch, location="host")
    assert f", delta cache up to {spelled_bytes(held)} (host)), " in line
    assert f"; needs {spelled_bytes(WEIGHTS + SAMPLING + on_gpu)} (weights " in line
