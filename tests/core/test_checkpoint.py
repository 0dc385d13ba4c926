import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from sixbit_diffusion.kernels import quantize_nvfp4
from sixbit_diffusion.sixbit_core.checkpoint import CheckpointError, open_checkpoint
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


def test_quantization_named_in_the_metadata_is_seen(native_file):
    listed = {"layers": {"model.diffusion_model.blocks.0.q": {"format": "float8_e4m3fn"}}}
    checkpoint = open_checkpoint(native_file(metadata={"_quantization_metadata": json.dumps(listed)}))
    assert checkpoint.formats == {"blocks.0.q": {"format": "float8_e4m3fn"}}
    with pytest.raises(CheckpointError):
        checkpoint.quantized("blocks.0.q")


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

    checkpoint = open_checkpoint(native_file(change=quantize))
    with pytest.raises(CheckpointError, match="smoothing"):
        checkpoint.quantized("blocks.0.q")


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
