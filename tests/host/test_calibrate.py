"""Calibration in a real host, by its own sampler: said first, saved where Apply DMPQ finds it, repeatable."""

from pathlib import Path

import pytest

pytest.importorskip("diffusers")
from host_cases import VARIANTS, make_transformer

CHECKS = {
    "predictor_is_what_dmpq_finds_and_runs_by": [],
    "same_request_gives_the_same_file": [],
    "sixteen_bit_source_at_hand_gives_the_papers_error_too": [
        "cache_off",
        "cache_on",
        "paper_cache_off",
        "paper_cache_on",
        "time_cache_off",
    ],
    "interrupting_leaves_nothing": [],
}
LINES = (
    "name must be that of a file",
    "prompts holds no caption; write one a line",
    "Calibrate Predictor needs 6-bit weights",
    "Calibrate Predictor takes text-to-video models only",
    "taken.json is taken; choose another name",
)


@pytest.fixture(scope="module")
def results(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = Path(tmp_path_factory.mktemp("diffusion_models"))
    make_transformer(VARIANTS["5b"]).save_pretrained(folder / "tiny")
    make_transformer(VARIANTS["5b-i2v"]).save_pretrained(folder / "image")
    return host.run("calibrate", folder=folder)["results"]


def test_every_check_is_asked_for(results: dict) -> None:
    assert set(results) == {*CHECKS, "wrong_use_is_one_line"}


@pytest.mark.parametrize("name", CHECKS)
def test_calibrate(results: dict, name: str) -> None:
    assert results[name] == CHECKS[name]


def test_wrong_use_is_one_line(results: dict) -> None:
    said = results["wrong_use_is_one_line"]
    assert len(said) == len(LINES)
    assert all(line in found and "\n" not in found for line, found in zip(LINES, said, strict=True)), said
