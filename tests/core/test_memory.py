import json
from pathlib import Path

import pytest
import torch
from sixbit_diffusion.sixbit_core import courier
from sixbit_diffusion.sixbit_core.block import PIECE
from sixbit_diffusion.sixbit_core.config import DMPQConfig
from sixbit_diffusion.sixbit_core.delta_codecs import bytes_on_gpu
from sixbit_diffusion.sixbit_core.memory import FULL, INT8, formats_of, sampling_bytes

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
TOKENS = 226 + 13 * 30 * 45
HIDDEN, CASTS = TOKENS * 3072 * 2, 8 * 3072**2


@pytest.mark.parametrize(
    "formats, streams, together, expected",
    [
        (INT8, 1, False, int(5.9 * HIDDEN) + CASTS),
        (INT8, 2, False, int(7.9 * HIDDEN) + CASTS),
        (INT8, 6, False, 18 * HIDDEN + CASTS),
        (INT8, 2, True, int(11.8 * HIDDEN) + CASTS),
        ("gamma", 2, False, int(10.3 * HIDDEN) + CASTS),
        (FULL, 2, False, 26 * HIDDEN),
    ],
)
def test_bytes_of_the_5b(formats, streams, together, expected):
    assert sampling_bytes(formats, TOKENS, 3072, 2, streams, together) == expected


def test_a_refresh_may_leave_int8():
    refreshed, plain = (DMPQConfig(router="int8", purified_refresh=on) for on in (True, False))
    assert formats_of(refreshed, cached=True) != INT8
    assert formats_of(refreshed, cached=False) == formats_of(plain, cached=True) == INT8


def test_few_tokens_go_together():
    long, short = (sampling_bytes(INT8, tokens, 64, 2, 2) for tokens in (PIECE, PIECE - 1))
    assert short > 1.4 * long
    assert short == sampling_bytes(INT8, PIECE - 1, 64, 2, 2, together=True)


@pytest.mark.parametrize("config, width, blocks", [("5b", 3072, 42), ("2b", 1920, 30)])
@pytest.mark.parametrize("location", ["gpu", "host"])
def test_measured_peaks_are_foreseen(config, width, blocks, location, monkeypatch):
    """Loops on an H200 whose refreshes left INT8 nowhere; in host memory before sums of spans were kept, with
    twice as much on its way."""
    monkeypatch.setattr(courier, "AHEAD_BYTES", 256 * 2**20)
    found = json.loads((RESULTS / f"memory-{config}.json").read_text(encoding="utf-8"))
    weights = next(bar["value"] for bar in found["bars"] if bar["id"] == f"memory.{config}.weights_gib")
    row = next(row for row in found["rows"] if row["name"] == f"sampling.13x60x90.{location}.recorded")
    begun = TOKENS * width * 2 * 2 if location == "host" else 0  # what a span began with
    cache = bytes_on_gpu(location, TOKENS, width, blocks, 2, torch.bfloat16) - begun
    foreseen = weights * 2**30 + cache + sampling_bytes(INT8, TOKENS, width, 2, 2)
    assert foreseen == pytest.approx(row["peak_bytes"], rel=0.03)
