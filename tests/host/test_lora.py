"""LoRAs in a real host: as strong as in full precision, gone when taken off, in any order of nodes."""

from pathlib import Path

import pytest

pytest.importorskip("diffusers")
from host_cases import VARIANTS, make_transformer

CHECKS = {
    "effect_beside_each_linear_is_that_of_the_file": [],
    "effect_on_the_model_is_that_of_full_precision": pytest.approx(1.0, abs=0.02),
    "strength_zero_is_no_lora": True,
    "base_a_b_off_base": [],
    "any_order_of_nodes_gives_the_same": [],
    "beside_a_fused_block_it_is_as_strong": [],
    "every_naming_gives_the_same": [],
    "hosts_bypass_loader_acts_and_leaves": [],
    "what_does_not_match_is_counted_and_said": [
        "6Bit: more.safetensors runs beside 5 linears, rank 4, strength 1",
        "6Bit: 2 keys of more.safetensors match nothing in this model and have no effect, "
        "such as text_encoder.a.lora_A.weight",
    ],
    "interrupting_leaves_nothing": [],
    "offloaded_weights_give_the_same": [],
    "model_stays_known": True,
}
LINES = (
    "is cut short at",
    "there is no LoRA gone in the loras folders; choose one of the list",
    "none.safetensors holds no low-rank pair for a CogVideoX of this kind",
    "this node needs a CogVideoX model",
)


def make_folder(factory: pytest.TempPathFactory) -> Path:
    folder = Path(factory.mktemp("diffusion_models"))
    make_transformer(VARIANTS["5b"]).save_pretrained(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def results(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    return host.run("lora", folder=make_folder(tmp_path_factory))["results"]


def test_every_check_is_asked_for(results: dict) -> None:
    assert set(results) == {*CHECKS, "wrong_use_is_one_line"}


@pytest.mark.parametrize("name", CHECKS)
def test_lora(results: dict, name: str) -> None:
    assert results[name] == CHECKS[name]


def test_wrong_use_is_one_line(results: dict) -> None:
    said = results["wrong_use_is_one_line"]
    assert len(said) == len(LINES)
    assert all(line in found and "\n" not in found for line, found in zip(LINES, said, strict=True))


@pytest.mark.slow
def test_compiled_models_run_it(host, tmp_path_factory: pytest.TempPathFactory) -> None:
    errors = host.run("lora", folder=make_folder(tmp_path_factory), compiled=True)["errors"]
    assert len(errors) == 5 and max(errors) < 1e-4
