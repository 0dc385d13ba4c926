"""Which run a report is of."""

import pytest
import torch
from sixbit_diffusion.nodes.settings import Entry, Journal, mark_of, run_of

PROMPT = {
    "load": {"inputs": {}},
    "one": {"inputs": {"model": ["load", 0], "steps": 1}},
    "two": {"inputs": {"model": ["load", 0], "steps": 2, "latent_image": ["one", 0]}},
    "fit": {"inputs": {"samples": ["one", 0]}},
    "report of one": {"inputs": {"model": ["load", 0], "latent": ["fit", 0]}},
    "report of two": {"inputs": {"model": ["load", 0], "latent": ["two", 0]}},
}


def test_a_run_is_known_by_its_latent_whatever_node_made_it():
    latent = torch.randn(1, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    journal = Journal()
    journal.keep("of another graph", Entry("made", None, mark_of(latent)))
    journal.keep("one", Entry("older", None, mark_of(latent + 1)))
    assert run_of(journal.runs, PROMPT, "report of one", latent.clone()).report == "made"
    assert run_of(journal.runs, PROMPT, "report of one", latent[:, :, :2]).report == "older"  # cut since
    assert mark_of(latent) == mark_of(latent.clone()) != mark_of(latent.view(1, 4, 3, 4, 16))
    assert mark_of(None) is None and mark_of(latent[:0]) is None


def entry(name: str) -> Entry:
    return Entry(name, None)


def test_a_report_is_of_the_sampler_before_it():
    journal = Journal()
    for name in ("one", "two"):
        journal.keep(name, entry(name))
    assert run_of(journal.runs, PROMPT, "report of one") == entry("one")
    assert run_of(journal.runs, PROMPT, "report of two") == entry("two")
    journal.keep("one", entry("again"))
    assert run_of(journal.runs, PROMPT, "report of one") == entry("again") == journal.last
    with pytest.raises(ValueError, match="no run of this model to report"):
        run_of({"two": entry("two")}, PROMPT, "report of one")


def test_outside_of_a_graph_it_is_the_latest():
    assert run_of({"": entry("a")}, {}, None) == entry("a")
    with pytest.raises(ValueError, match="no run of this model"):
        run_of({}, {}, None)


def test_a_journal_is_bounded():
    journal = Journal()
    for number in range(100):
        journal.keep(str(number), entry(str(number)))
    assert len(journal.runs) == 16 and journal.last == entry("99")
