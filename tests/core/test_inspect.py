import json

import pytest
import torch
from sixbit_diffusion.sixbit_core.inspect import format_inspection, inspect_checkpoint
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint


def test_a_plain_checkpoint(native_file):
    found = inspect_checkpoint(native_file())
    assert found["family"] == "cogvideox-small" and found["blocks"] == 2 and not found["quantized"]
    assert found["formats"] == {
        "bfloat16": {"layers": 0, "tensors": found["tensors"], "bytes": found["bytes"]}
    }
    assert found["ratio"] == 1.0 and found["rotation"] == {"rotated": 0, "plain": 0, "blocks": {}}
    assert found["source"] == "native.safetensors" and found["licence"] == "unknown"


def test_a_quantized_checkpoint(native_file, tmp_path):
    source = native_file(metadata={"license": "Apache-2.0"})
    target = tmp_path / "q.safetensors"
    quantize_checkpoint(source, target, QuantizeConfig(method="rtn"))
    before, found = inspect_checkpoint(source), inspect_checkpoint(target)
    assert found["quantized"] and found["method"] == "rtn" and found["licence"] == "Apache-2.0"
    assert found["formats"]["sixbit_nvfp4"]["layers"] == 12 and found["formats"]["nvfp4"]["layers"] == 5
    assert found["rotation"] == {"rotated": 12, "plain": 5, "blocks": {"128": 12}}
    assert found["bytes"] == sum(row["bytes"] for row in found["formats"].values())
    for key in ("parameters", "bf16_bytes", "fingerprint", "source", "family"):
        assert found[key] == before[key], key
    assert found["ratio"] == pytest.approx(before["bytes"] / found["bytes"], abs=1e-3)


def test_control_characters_do_not_reach_the_terminal(native_file):
    metadata = {"sixbit_source": "\x1b[2Jcaf\u00e9\nline", "license": "a\rb\u202e"}
    text = format_inspection(inspect_checkpoint(native_file(metadata=metadata)))
    assert r"\x1b[2Jcafé\nline" in text and r"a\rb\u202e" in text
    assert all(c.isprintable() for c in text.replace("\n", ""))


def test_a_format_of_the_host_is_counted_by_its_name(native_file):
    mark = json.dumps({"format": "int8_tensorwise"}).encode()

    def quantize(state):
        state["blocks.0.q.weight"] = state["blocks.0.q.weight"].to(torch.int8)
        state["blocks.0.q.weight_scale"] = torch.ones(())
        state["blocks.0.q.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)

    found = inspect_checkpoint(native_file(change=quantize))
    assert found["formats"]["int8_tensorwise"] == {
        "layers": 1,
        "tensors": 3,
        "bytes": 128 * 128 + 4 + len(mark),
    }
    assert found["quantized"] and found["rotation"] == {"rotated": 0, "plain": 1, "blocks": {}}


def test_text_for_people(native_file, tmp_path):
    target = tmp_path / "q.safetensors"
    quantize_checkpoint(native_file(), target, QuantizeConfig(method="rtn", rotation="off"))
    text = format_inspection(inspect_checkpoint(target))
    assert "q.safetensors" in text and "17 layers" in text and "0 layers rotated, 17 not" in text
    assert all(len(line) < 110 for line in text.splitlines())
