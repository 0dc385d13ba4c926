"""The minutes by GPU in docs/comfyui.md are those of benchmarks/roofline.py and of what was measured."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ("2b", "5b", "1.5-5b")  # columns, in order
EVALUATIONS = 50
MODULES = ("measure", "model_parts", "roofline")


@pytest.fixture(scope="module")
def roofline():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    for name in MODULES:
        sys.modules.pop(name, None)
    try:
        yield importlib.import_module("roofline")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def table() -> dict[str, list[str]]:
    """Card -> cells after its name, of the rows that have figures."""
    text = (ROOT / "docs" / "comfyui.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w ]+?) \((\d+) GB\) \| (.*) \|$", text, re.MULTILINE)
    return {name: [memory, *cells.split(" | ")] for name, memory, cells in rows}


def estimated(roofline, card: object, config: str) -> dict[str, float]:
    shares = roofline.measured_shares(RESULTS) if card is roofline.H200 else roofline.ASSUMED
    return roofline.row(card, roofline.work(config), shares)


def shown(ours_ms: float, eager_ms: float) -> str:
    """Minutes of a clip as the table has them: ours, and in brackets those of 16-bit diffusers."""
    minutes = (ms * EVALUATIONS / 60_000 for ms in (ours_ms, eager_ms))
    ours, eager = (f"{value:.1f}" if value < 9.95 else f"{value:.0f}" for value in minutes)
    return f"{ours} ({eager})"


def test_the_table_has_every_card_that_is_estimated(roofline, table) -> None:
    assert {name: row[0] for name, row in table.items()} == {
        card.name: str(card.memory) for card in roofline.CARDS
    }


def test_every_figure_is_the_estimate_or_the_measurement(roofline, table) -> None:
    for card in roofline.CARDS:
        expected, sources = [], []
        for config in CONFIGS:
            measured = roofline.measured_forward(RESULTS, config) if card is roofline.H200 else {}
            row = estimated(roofline, card, config)
            times = measured.get("ours", row["ours_ms"]), measured.get("diffusers", row["eager_ms"])
            expected.append(shown(*times))
            sources.append("measured" if measured else "estimated")
        assert table[card.name][2:5] == expected, card.name
        words = {"2B": sources[0], "5B": sources[1], "1.5": sources[2]}
        if set(sources) == {"estimated"}:
            assert table[card.name][5] == "estimated"
        else:
            said = [
                " and ".join(k for k, v in words.items() if v == how) + f" {how}"
                for how in ("measured", "estimated")
            ]
            assert table[card.name][5] == ", ".join(said)


def test_the_result_on_file_is_what_the_program_gives(roofline) -> None:
    stored = json.loads((RESULTS / "roofline.json").read_text(encoding="utf-8"))
    assert stored["estimate"] is True and stored["others"] == vars(roofline.ASSUMED)
    assert stored["h200"] == pytest.approx(vars(roofline.measured_shares(RESULTS)))
    for card, row in zip(roofline.CARDS, stored["rows"], strict=True):
        kept = {name: value for name, value in row.items() if not name.startswith("measured_")}
        found = estimated(roofline, card, stored["config"])
        assert kept.pop("card") == found.pop("card") == card.name
        assert kept == pytest.approx(found), card.name


def test_seconds_in_the_text_are_the_measured_ones(roofline) -> None:
    text = " ".join((ROOT / "docs" / "comfyui.md").read_text(encoding="utf-8").split())
    five, two = (roofline.measured_forward(RESULTS, config) for config in ("5b", "2b"))
    assert f"{five['ours'] / 1e3:.2f} s an evaluation against {five['diffusers'] / 1e3:.2f}" in text
    assert f"the 2B {two['ours'] / 1e3:.2f} s against {two['diffusers'] / 1e3:.2f}" in text
