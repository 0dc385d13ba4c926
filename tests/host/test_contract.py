"""What the pack counts on of the host: registered without optional libraries, every seam probed."""

from pathlib import Path

import pytest
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint

pytest.importorskip("diffusers")
from host_cases import Variant, make_transformer

NODES = {
    "SixBitLoadCogVideoX",
    "SixBitQuantize",
    "SixBitApplyDMPQ",
    "SixBitTemporalDeltaCache",
    "SixBitRunReport",
    "SixBitEmptyLatent",
    "SixBitLoadReference",
}


@pytest.fixture(scope="module")
def found(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = Path(tmp_path_factory.mktemp("contract"))
    like_published = {"in_channels": 16, "out_channels": 16, "use_rotary_positional_embeddings": True}
    make_transformer(Variant("5b", like_published)).save_pretrained(folder / "tiny")
    quantized = folder / "tiny-6bit.safetensors"
    quantize_checkpoint(folder / "tiny", quantized, QuantizeConfig(method="rtn"))
    return host.run("contract", quantized=quantized)


def test_every_node_is_registered_without_optional_libraries(found: dict) -> None:
    assert set(found["ids"]) == NODES


def test_this_host_is_as_listed(found: dict) -> None:
    assert found["mismatches"] == [] and found["after"] == []


def test_every_broken_seam_is_noticed(found: dict) -> None:
    assert found["unnoticed"] == []


def test_an_unknown_host_gets_a_plain_model_and_one_line(found: dict) -> None:
    unknown = found["unknown"]
    assert unknown["kind"] == "CogVideoX" and unknown["untouched"]
    assert unknown["types"] in (["torch.bfloat16"], ["torch.float32"])  # the host chooses by its device
    assert "comfy.ops.cast_bias_weight takes no dtype, bias_dtype, offloadable" in unknown["said"][0]
