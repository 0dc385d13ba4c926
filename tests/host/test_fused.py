"""Fused blocks in a real host: whose attention they take, and what a run with them is said to need."""

import pytest

pytest.importorskip("diffusers")
from host_cases import VARIANTS, make_transformer

CHECKS = (
    "attention_is_torchs_where_the_hosts_is_that_alone",
    "the_5b_needs_what_was_measured",
    "needs_follow_the_batch_and_the_text",
    "a_model_as_it_is_needs_what_the_host_says",
    "where_others_run_in_the_blocks_the_larger_figure_counts",
    "the_planner_is_told_while_a_run_lasts",
)


@pytest.fixture(scope="module")
def results(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("diffusion_models")
    make_transformer(VARIANTS["5b"]).save_pretrained(folder / "tiny")
    return host.run("fused", folder=folder)["results"]


def test_every_check_is_asked_for(results: dict) -> None:
    assert set(results) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_run(results: dict, name: str) -> None:
    assert results[name] == []
