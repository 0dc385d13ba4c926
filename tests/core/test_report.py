import json
from dataclasses import replace

import pytest
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.report import Ledger

LAYOUT = BlockLayout(("q", "ff"), ({"q": (10, 10), "ff": (30, 10)}, {"q": (10, 10), "ff": (10, 10)}))


def test_bits_and_shares_by_hand():
    ledger = Ledger(LAYOUT)
    ledger.begin_evaluation(0.0)
    ledger.saw_streams(2)
    ledger.ran(0, "q", "nvfp4", 6)  # 600 MACs
    ledger.ran(0, "ff", "int8", 6)  # 1800
    ledger.computed(2)
    ledger.ran(1, "q", "bf16", 6)  # 600
    ledger.ran(1, "ff", "nvfp4", 6)  # 600
    ledger.computed(2)
    ledger.begin_evaluation(0.5)
    ledger.skipped(0, 2, 6)  # 2400 in all
    ledger.ran(1, "q", "int8", 6)
    ledger.ran(1, "ff", "int8", 6)
    ledger.computed(2)
    report = ledger.report("static", None, {"threshold": 0.15}, 123)
    first = 4 * 600 + 8 * 1800 + 16 * 600 + 4 * 600
    assert report.bits_by_evaluation == (first / 3600, 8.0)
    assert report.effective_bits_by_evaluation == (first / 3600, 8 * 1200 / 3600)
    assert report.average_activation_bits == (first + 8 * 1200) / 4800
    assert report.effective_activation_bits == (first + 8 * 1200) / 7200
    assert report.skipped_fraction == 2 / 8
    assert report.choices == {"q": ("4-", "b8"), "ff": ("8-", "48")}
    assert report.mac_share == {"q": 200 / 600, "ff": 400 / 600}
    assert (report.evaluations, report.blocks, report.streams, report.progress) == (2, 2, 2, (0.0, 0.5))


def test_rows_weigh():
    ledger = Ledger(LAYOUT)
    ledger.begin_evaluation(0.0)
    ledger.ran(1, "q", "nvfp4", 3)
    ledger.ran(1, "q", "int8", 1)
    assert ledger.report(None, None, None, 0).average_activation_bits == 5.0


def test_nothing_ran_and_everything_was_skipped():
    ledger = Ledger(LAYOUT)
    empty = ledger.report(None, None, None, 0)
    assert empty.average_activation_bits is None and empty.skipped_fraction is None
    ledger.begin_evaluation(0.0)
    ledger.skipped(0, 1, 3)
    report = ledger.report(None, None, None, 0)
    assert report.average_activation_bits is None and report.effective_activation_bits == 0
    assert report.choices == {"q": ("-", "."), "ff": ("-", ".")}


def test_to_dict_is_json():
    ledger = Ledger(LAYOUT)
    ledger.begin_evaluation(0.0)
    ledger.ran_untouched(0, 3)
    document = json.loads(json.dumps(ledger.report("int8", "a note", None, 5).to_dict()))
    assert document["choices"]["q"] == ["b", "."] and document["legend"]["-"] == "skipped"
    assert document["average_activation_bits"] == 16 and document["note"] == "a note"


def test_reset_equals_new():
    ledger = Ledger(LAYOUT)
    ledger.begin_evaluation(0.0)
    ledger.ran_untouched(0, 3)
    ledger.computed(1)
    ledger.saw_streams(1)
    ledger.reset()
    assert vars(ledger) == vars(Ledger(LAYOUT))
    with pytest.raises(IndexError):
        ledger.computed(1)
        ledger.ran(0, "q", "int8", 1)


def test_seconds_are_those_between_beginnings():
    now = [10.0]
    ledger = Ledger(LAYOUT, lambda: now[0])
    for seconds in (1.5, 0.5, 2.0):
        ledger.begin_evaluation(0.0)
        now[0] += seconds
    assert ledger.report(None, None, None, 0).seconds_by_evaluation == (1.5, 0.5)  # the last is under way
    ledger.end()
    now[0] += 9
    ledger.end()
    report = ledger.report(None, None, None, 0)
    assert report.seconds_by_evaluation == (1.5, 0.5, 2.0)
    assert report == replace(report, seconds_by_evaluation=())  # a run is what it decided


def test_shares_so_far():
    ledger = Ledger(LAYOUT)
    assert ledger.skipped_fraction is None and ledger.average_bits is None
    ledger.begin_evaluation(0.0)
    ledger.ran(0, "q", "nvfp4", 3)
    ledger.computed(3)
    ledger.skipped(1, 1, 1)
    assert (ledger.skipped_fraction, ledger.average_bits) == (0.25, 4.0)
