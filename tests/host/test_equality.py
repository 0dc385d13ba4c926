"""The MODEL gives what diffusers gives: every variant, float32, at two sizes and two lengths."""

import itertools
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
from host_cases import VARIANTS, Run, write_case


def run_host(host, folder: Path, runs: dict[str, list[Run]]) -> dict:
    jobs = {name: write_case(VARIANTS[name], folder / name, runs[name]) for name in runs}
    return host.run("equality", folder=folder, variants=jobs)["results"]


@pytest.fixture(scope="module")
def results(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    runs = {
        name: [
            Run(variant.sizes[0], variant.lengths[0], 10, 0),
            Run(variant.sizes[-1], variant.lengths[1], 50, 1),
        ]
        for name, variant in VARIANTS.items()
    }
    return run_host(host, tmp_path_factory.mktemp("variants"), runs)


@pytest.mark.parametrize("name", VARIANTS)
def test_prediction_equals_diffusers(results: dict, name: str) -> None:
    assert len(results[name]["predictions"]) == len(VARIANTS[name].latents)
    assert max(results[name]["predictions"]) < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_run_through_the_stock_sampler_equals_diffusers(results: dict, name: str) -> None:
    assert len(results[name]["runs"]) == 2
    assert max(results[name]["runs"]) < 5e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_run_of_every_size_length_and_count_of_steps(host, tmp_path: Path, name: str) -> None:
    variant = VARIANTS[name]
    cases = list(itertools.product(variant.sizes, variant.lengths, (10, 50)))
    runs = [Run(*case, seed) for seed, case in enumerate(cases)]
    found = run_host(host, tmp_path, {name: runs})[name]["runs"]
    assert len(found) == len(runs) and max(found) < 5e-4, dict(zip(cases, found, strict=True))
