import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from sixbit_diffusion.kernels import quantize_nvfp4
from sixbit_diffusion.sixbit_core.checkpoint import CheckpointError, open_checkpoint
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight


def test_every_way_of_storing_reads_the_same(tiny, store, native_state, way):
    model = tiny("5b-i2v")
    checkpoint = open_checkpoint(store(model, way))
    expected = native_state(model)
    assert set(checkpoint.keys()) == set(expected) == set(checkpoint.shapes)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
        assert checkpoint.shape(name) == tuple(tensor.shape) and checkpoint.dtype(name) == tensor.dtype
    assert not checkpoint.is_quantized
    assert checkpoint.nbytes == sum(t.numel() * 2 for t in expected.values())
    has_config = "folder" in way or way == "index file"
    assert (checkpoint.config or {}).get("num_layers") == (2 if has_config else None)
    assert not has_config or checkpoint.config["use_rotary_positional_embeddings"] is True


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_kind_and_precision(native_file, kind, dtype):
    checkpoint = open_checkpoint(native_file(kind, dtype))
    assert checkpoint.dtype("blocks.0.q.weight") == dtype
    assert checkpoint.family.image_to_video == ("i2v" in kind)


def test_a_plain_nvfp4_file_is_read(native_file, native_state, tiny):
    """As other tools write it: two layers in NVFP4 without rotation, the rest as it was."""
    exact = native_state(tiny())["blocks.1.ff_out.weight"]

    def quantize(state):
        for layer in ("blocks.1.ff_out", "blocks.0.norm1.linear"):
            weight = state.pop(f"{layer}.weight")
            state.update(QuantizedWeight(*quantize_nvfp4(weight), *weight.shape).state_dict(layer))

    checkpoint = open_checkpoint(native_file(change=quantize))
    assert checkpoint.is_quantized and set(checkpoint.formats) == {"blocks.1.ff_out", "blocks.0.norm1.linear"}
    assert checkpoint.shapes["blocks.1.ff_out.weight"] == (128, 512)
    assert checkpoint.shape("blocks.1.ff_out.weight") == (128, 256)
    decoded = checkpoint.quantized("blocks.1.ff_out").dequantize()
    assert (decoded - exact).norm() < 0.11 * exact.norm()
    with pytest.raises(CheckpointError, match=r"blocks\.0\.q is not quantized"):
        checkpoint.quantized("blocks.0.q")


def coded(name, way):
    """A change that stores a layer's weight in a format of the host's, and the weight that it then holds."""
    held = {}

    def change(state):
        weight = state["blocks.0.q.weight"].float()
        if way == "scaled_fp8":
            state["scaled_fp8"] = torch.zeros(2).to(torch.float8_e4m3fn)
        dtype = torch.int8 if name == "int8_tensorwise" else getattr(torch, name)
        largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
        rows = way == "a scale a row"
        scale = weight.abs().amax(dim=1, keepdim=True) if rows else weight.abs().amax()
        scale = torch.ones(()) if way == "no scale" else scale / largest
        data = (weight / scale).round().to(dtype) if dtype == torch.int8 else (weight / scale).to(dtype)
        held["weight"] = (data.float() * scale).bfloat16()
        state["blocks.0.q.weight"] = data.view(torch.uint8) if way == "as uint8" else data
        if way == "scaled_fp8":
            state["blocks.0.q.scale_weight"], state["blocks.0.q.scale_input"] = scale, torch.ones(())
            return
        mark = json.dumps({"format": name}).encode()
        state["blocks.0.q.comfy_quant"] = torch.tensor(list(mark), dtype=torch.uint8)
        state["blocks.0.q.input_scale"] = torch.ones(())
        if way != "no scale":
            state["blocks.0.q.weight_scale"] = scale.reshape(1) if way == "a scale of one" else scale

    return change, held


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("int8_tensorwise", "one scale"),
        ("int8_tensorwise", "a scale of one"),
        ("int8_tensorwise", "a scale a row"),
        ("float8_e4m3fn", "one scale"),
        ("float8_e4m3fn", "no scale"),
        ("float8_e4m3fn", "as uint8"),
        ("float8_e4m3fn", "scaled_fp8"),
        ("float8_e5m2", "one scale"),
    ],
)
def test_a_format_of_the_host_is_read_decoded(native_file, name, way):
    change, held = coded(name, way)
    checkpoint = open_checkpoint(native_file(change=change))
    assert checkpoint.coded == {"blocks.0.q": {"format": name}} and not checkpoint.is_quantized
    assert torch.equal(checkpoint.tensor("blocks.0.q.weight"), held["weight"])
    assert checkpoint.dtype("blocks.0.q.weight") == torch.bfloat16
    assert set(checkpoint.shapes) == set(open_checkpoint(native_file()).shapes)


def test_a_format_named_in_the_metadata_is_seen(native_file):
    change, held = coded("float8_e4m3fn", "one scale")

    def without_mark(state):
        change(state)
        del state["blocks.0.q.comfy_quant"]

    listed = {"layers": {"model.diffusion_model.blocks.0.q": {"format": "float8_e4m3fn"}}}
    file = native_file(change=without_mark, metadata={"_quantization_metadata": json.dumps(listed)})
    assert torch.equal(open_checkpoint(file).tensor("blocks.0.q.weight"), held["weight"])


def test_a_file_of_the_host_s_is_a_source_of_a_6_bit_copy(native_file, tmp_path):
    change, _ = coded("int8_tensorwise", "a scale a row")
    target = tmp_path / "copy.safetensors"
    quantize_checkpoint(native_file(change=change), target, QuantizeConfig("rtn"))
    copy = open_checkpoint(target)
    assert "blocks.0.q" in copy.formats and not copy.coded


def test_a_layer_marked_in_the_header_alone_loads(native_file):
    quantized = {}

    def quantize(state):
        for layer, size in (("blocks.0.q", 0), ("blocks.1.k", 128)):
            weight = state.pop(f"{layer}.weight")
            quantized[layer] = QuantizedWeight(*quantize_nvfp4(weight), *weight.shape, hadamard=size)
            state.update(quantized[layer].state_dict(layer))
            del state[f"{layer}.comfy_quant"]

    listed = {"blocks.0.q": {"format": "nvfp4"}, "blocks.1.k": {"format": "sixbit_nvfp4", "hadamard": 128}}
    metadata = {"_quantization_metadata": json.dumps({"layers": listed})}
    checkpoint = open_checkpoint(native_file(change=quantize, metadata=metadata))
    for layer, weight in quantized.items():
        assert torch.equal(checkpoint.quantized(layer).dequantize(), weight.dequantize()), layer


def test_smoothed_layers_are_refused(native_file):
    def quantize(state):
        weight = state.pop("blocks.0.q.weight")
        state.update(QuantizedWeight(*quantize_nvfp4(weight), *weight.shape).state_dict("blocks.0.q"))
        state["blocks.0.q.pre_quant_scale"] = torch.ones(128)

    with pytest.raises(CheckpointError, match="smoothing"):
        open_checkpoint(native_file(change=quantize))


def test_a_file_that_shrinks_after_opening(native_file):
    path = native_file()
    checkpoint = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="became shorter"):
        for name in checkpoint.infos:
            checkpoint.tensor(name)


def test_an_unknown_name(native_file):
    with pytest.raises(CheckpointError, match="nonsense is missing"):
        open_checkpoint(native_file()).tensor("nonsense")


def test_holds_neither_tensors_nor_files(native_file):
    path = native_file()
    checkpoint = open_checkpoint(path)
    tensor = checkpoint.tensor("blocks.0.q.weight")
    tensor.zero_()  # the caller's own
    assert checkpoint.tensor("blocks.0.q.weight").any()
    assert load_file(path)["blocks.0.q.weight"].any()
    assert replace(checkpoint, path=path).family == checkpoint.family
