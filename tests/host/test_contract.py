"""What the pack counts on of the host: registered without optional libraries, every seam probed."""

import json
import re
from pathlib import Path

import pytest
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint

pytest.importorskip("diffusers")
from host_cases import Variant, make_transformer

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted((ROOT / "tests" / "host" / "golden").glob("*.json"))
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))


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


LOST = {  # what a node's fields read of the host -> the field, and what is offered without it
    ("comfy.samplers", "KSampler"): ("SixBitCalibratePredictor", "scheduler", ["simple"]),
    ("comfy.samplers", "KSampler.SAMPLERS"): ("SixBitCalibratePredictor", "sampler_name", ["euler"]),
    ("comfy.samplers", "KSampler.SCHEDULERS"): ("SixBitCalibratePredictor", "scheduler", ["simple"]),
    ("folder_paths", "get_filename_list"): ("SixBitLoadLora", "lora_name", []),
    ("folder_paths", "get_folder_paths"): ("SixBitLoadCogVideoX", "model_name", ["bundled reference"]),
    ("folder_paths", "models_dir"): ("SixBitApplyDMPQ", "predictor", ["bundled"]),
    ("node_helpers", "conditioning_set_values"): ("SixBitImageToVideo", "image", []),
}


@pytest.mark.parametrize("lost", LOST, ids=lambda lost: lost[1])
def test_every_node_is_registered_whatever_the_host_has_lost(host, lost: tuple[str, str]) -> None:
    found = host.run("registering", lost=lost)
    assert found["loaded"] is True and set(found["fields"]) == set(found["shown"]) == node_ids()
    node, field, offered = LOST[lost]
    assert found["fields"][node][field] == offered
    said = [line for line in found["log"].splitlines() if "6Bit: this ComfyUI is not one this pack" in line]
    assert len(said) == (lost[0] != "node_helpers") and all(lost[1].split(".")[-1] in line for line in said)


def test_every_node_has_a_help_page() -> None:
    assert {path.stem for path in (ROOT / "web" / "docs").glob("*.md")} == node_ids()


NODE_SEAMS = {  # of the public interface -> the nodes that are left out without it
    "ui": {"SixBitCalibratePredictor", "SixBitQuantize"},
    "io.Vae": {"SixBitImageToVideo", "SixBitLoadReference"},
    "io.Hidden": {"SixBitRunReport"},
}


@pytest.mark.parametrize("lost", NODE_SEAMS)
def test_a_node_that_this_host_cannot_show_is_left_out_with_a_line(host, lost: str) -> None:
    found = host.run("registering", lost=["comfy_api.latest", lost])
    assert found["loaded"] is True and node_ids() - set(found["fields"]) == NODE_SEAMS[lost]
    said = [line for line in found["log"].splitlines() if "6Bit: this ComfyUI is not one this pack" in line]
    left_out = {line.rpartition("; the node ")[2].removesuffix(" is left out") for line in said}
    assert len(said) == len(left_out) and left_out == NODE_SEAMS[lost]


def test_what_the_nodes_reach_of_the_host_is_listed(host) -> None:
    found = host.run("touched", nodes=ROOT / "nodes")
    assert (found["paths"], found["names"], found["keys"]) == ([], [], [])


def test_this_host_is_as_listed(found: dict) -> None:
    assert found["mismatches"] == [] and found["after"] == []


def test_the_hosts_number_formats_are_its_own(found: dict) -> None:
    assert found["same_formats"] is True


def test_every_broken_seam_is_noticed(found: dict) -> None:
    assert found["unnoticed"] == []


def test_an_unknown_host_gets_a_plain_model_and_one_line(found: dict) -> None:
    unknown = found["unknown"]
    assert unknown["kind"] == "CogVideoX" and unknown["untouched"]
    assert unknown["types"] in (["torch.bfloat16"], ["torch.float32"])  # the host chooses by its device
    assert "comfy.ops.cast_bias_weight takes no dtype, bias_dtype, offloadable" in unknown["said"][0]
    assert "load_diffusion_model_state_dict is gone); use ComfyUI 0.33" in unknown["without_loader"]


def test_the_reference_says_what_of_the_host_is_gone(found: dict) -> None:
    assert "AutoencoderKLCogVideoX._decode_batched is gone" in found["parts"] and "\n" not in found["parts"]


@pytest.mark.parametrize("release", GOLDEN, ids=lambda path: path.stem)
def test_nodes_only_grow(found: dict, release: Path) -> None:
    """What a release had stays: ids, inputs and outputs in order, choices; the new is optional and last."""
    for node, before in json.loads(release.read_text(encoding="utf-8")).items():
        now = found["schemas"][node]
        assert now["outputs"][: len(before["outputs"])] == before["outputs"], node
        for old, new in zip(before["inputs"], now["inputs"], strict=False):
            assert {**new, "options": None} == {**old, "options": None}, node
            assert set(old["options"]) <= set(new["options"]), node
        assert len(now["inputs"]) >= len(before["inputs"]), node
        assert all(added["optional"] for added in now["inputs"][len(before["inputs"]) :]), node


def test_the_newest_release_has_every_node_and_field(found: dict) -> None:
    """Ids, names, types, defaults and outputs of today: what is new goes into the newest file, too."""

    def pinned(schemas: dict) -> dict:
        kept = ("name", "type", "optional", "default")
        return {
            node: ([{key: entry[key] for key in kept} for entry in schema["inputs"]], schema["outputs"])
            for node, schema in schemas.items()
        }

    newest = max(GOLDEN, key=lambda path: tuple(map(int, path.stem.split("."))))
    assert pinned(json.loads(newest.read_text(encoding="utf-8"))) == pinned(found["schemas"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_fit_the_nodes(found: dict, path: Path) -> None:
    """Both forms: {id: {class_type, inputs}} of the API, and the editor's list of nodes."""
    document = json.loads(path.read_text(encoding="utf-8"))
    schemas, ours = found["schemas"], 0
    if "nodes" not in document:
        for node in document.values():
            if (schema := schemas.get(node["class_type"])) is not None:
                ours += 1
                names = {entry["name"] for entry in schema["inputs"]}
                needed = {entry["name"] for entry in schema["inputs"] if not entry["optional"]}
                assert needed <= set(node["inputs"]) <= names, node
    else:
        for node in document["nodes"]:
            if (schema := schemas.get(node["type"])) is not None:
                ours += 1
                given = {entry["name"] for entry in node.get("inputs", [])}
                assert given <= {entry["name"] for entry in schema["inputs"]}, node
                assert len(node.get("outputs", [])) == len(schema["outputs"]), node
    assert ours, "no node of this pack"
