"""What the pack counts on of the host: registered without optional libraries, every seam probed."""

import re
from pathlib import Path

import pytest
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint

pytest.importorskip("diffusers")
from host_cases import Variant, make_transformer

ROOT = Path(__file__).resolve().parents[2]


def node_ids() -> set[str]:
    """Every node that a module of the pack defines."""
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "nodes").glob("*.py"))
    return {name for source in sources for name in re.findall(r'node_id="(\w+)"', source)}


@pytest.fixture(scope="module")
def found(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = Path(tmp_path_factory.mktemp("contract"))
    like_published = {"in_channels": 16, "out_channels": 16, "use_rotary_positional_embeddings": True}
    make_transformer(Variant("5b", like_published)).save_pretrained(folder / "tiny")
    quantized = folder / "tiny-6bit.safetensors"
    quantize_checkpoint(folder / "tiny", quantized, QuantizeConfig(method="rtn"))
    return host.run("contract", quantized=quantized)


def test_every_node_is_registered_without_optional_libraries(found: dict) -> None:
    assert len(node_ids()) >= 7 and set(found["ids"]) == node_ids()


def test_every_node_has_a_help_page() -> None:
    assert {path.stem for path in (ROOT / "web" / "docs").glob("*.md")} == node_ids()


def test_this_host_is_as_listed(found: dict) -> None:
    assert found["mismatches"] == [] and found["after"] == []


def test_every_broken_seam_is_noticed(found: dict) -> None:
    assert found["unnoticed"] == []


def test_an_unknown_host_gets_a_plain_model_and_one_line(found: dict) -> None:
    unknown = found["unknown"]
    assert unknown["kind"] == "CogVideoX" and unknown["untouched"]
    assert unknown["types"] in (["torch.bfloat16"], ["torch.float32"])  # the host chooses by its device
    assert "comfy.ops.cast_bias_weight takes no dtype, bias_dtype, offloadable" in unknown["said"][0]
