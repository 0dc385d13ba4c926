"""The MODEL gives what diffusers gives: every variant, float32, at several sizes and lengths."""

from pathlib import Path

import pytest

pytest.importorskip("diffusers")
from host_cases import VARIANTS, write_case


@pytest.fixture(scope="module")
def results(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("variants")
    variants = {}
    for name, variant in VARIANTS.items():
        place = Path(folder / name)
        variants[name] = {"folder": place, "jobs": write_case(variant, place)}
    return host.run("equality", variants=variants)["results"]


@pytest.mark.parametrize("name", VARIANTS)
def test_prediction_equals_diffusers(results: dict, name: str) -> None:
    assert len(results[name]["prediction"]) == len(VARIANTS[name].sizes)
    assert max(results[name]["prediction"]) < 1e-5


@pytest.mark.parametrize("name", VARIANTS)
def test_run_through_the_stock_sampler_equals_diffusers(results: dict, name: str) -> None:
    assert results[name]["latents"], "no run was made"
    assert max(results[name]["latents"]) < 5e-4
