"""What the published benchmark of the reference measures, on rows and settings that need no sampling."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from sixbit_diffusion.engine.facts import read_facts
from sixbit_diffusion.engine.machine import find_machine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def parts(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("parts", "reference_parts"):
        sys.modules.pop(name, None)
    import reference_parts

    return reference_parts


@pytest.fixture
def bench(parts, tiny_folder):
    given = Namespace(predictor=None, steps=4)
    return parts.Bench(given, find_machine("cpu"), read_facts(str(tiny_folder)), None)


def test_what_is_random_is_drawn_anew_for_every_prompt(parts, bench):
    found = [bench.settings(parts.ROUTED["random"], number) for number in (3, 4)]
    assert [one.dmpq.seed for one in found] == [one.cache.seed for one in found] == [3, 4]
    assert bench.settings(parts.SKIPS["tdc alone"], 3).cache.seed == 3


def test_equal_configurations_are_sampled_once(parts, bench, monkeypatch):
    sampled = []

    def run(bench, settings, clip, full):
        sampled.append(settings.label())
        return None, {"run": len(sampled)}

    monkeypatch.setattr(parts, "_run", run)
    monkeypatch.setattr(parts, "sample_frames", lambda *_: (None, None))
    choices = {"w4a8": parts.FIXED["w4a8"], "dmpq": parts.UNSKIPPED["dmpq"], "again": parts.BALANCED}
    row = parts._clips(choices)(bench, parts.Prompt("a star"), 0)
    # without a predictor the balanced preset is INT8 everywhere, as W4A8 is
    assert row["w4a8"] == row["dmpq"] == {"run": 1} and row["again"] == {"run": 2}
    assert len(sampled) == 2


def test_skipping_is_held_against_w4a8_without_it(parts):
    def row(dmpq: float, whole: float, w4a8: float) -> dict:
        skipped = dict.fromkeys(parts.REPORTED, 0.5)
        marks = {name: {"psnr_db": 30.0, **skipped} for name in parts.SKIPS}
        for name, value in (("dmpq", dmpq), ("dmpq+tdc+pdr", whole), ("w4a8", w4a8)):
            marks[name]["psnr_db"] = value
        return marks

    bars, summary = parts._conclude_skip([row(29.0, 28.0, 30.0), row(27.0, 28.0, 29.0)])
    assert bars["full_vs_w4a8_db"] == summary["skipping - w4a8"]["mean"] == -1.5
    assert summary["skipping - dmpq"]["mean"] == 0.0
