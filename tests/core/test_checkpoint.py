import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
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


def test_header_and_data_may_be_cut_anywhere(native_file):
    path = native_file()
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    positions = [
        *range(0, 64),
        *range(64, header + 8, 211),
        header - 1,
        header,
        len(whole) // 2,
        len(whole) - 1,
    ]
    for position in positions:
        path.write_bytes(whole[:position])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value), position
    path.write_bytes(whole + b"more")
    with pytest.raises(CheckpointError, match="longer than its header"):
        open_checkpoint(path)


def test_damaged_headers_never_crash(native_file):
    path = native_file()
    whole = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(whole[:8], "little")
    generator = torch.Generator().manual_seed(0)
    for position in torch.randint(0, header, (150,), generator=generator).tolist():
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except CheckpointError as error:
            assert "\n" not in str(error)  # a flip that only changes metadata may pass


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a": 1}',
        b'{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "U8", "shape": 1, "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, "1"]}}',
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}',
        b'{"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}',
        b'{"a": {"dtype": "U8", "shape": [99999999999], "data_offsets": [0, 99999999999]}}',
        b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "__metadata__": 3}',
    ],
)
def test_headers_made_up(tmp_path, header):
    path = tmp_path / "made-up.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def drop(name):
    return lambda state: state.pop(name)


def reshape(name, *shape):
    return lambda state: state.update({name: torch.zeros(shape, dtype=torch.bfloat16)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("blocks.1.ff_out.weight"), r"blocks\.1\.ff_out\.weight is missing"),
        (drop("blocks.0.norm1.linear.weight"), r"blocks\.0\.norm1\.linear\.weight is missing"),
        (drop("blocks.1.v.bias"), r"blocks\.1\.v\.bias is missing"),
        (drop("patch_embed.proj.bias"), r"patch_embed\.proj\.bias is missing"),
        (drop("proj_out.weight"), r"proj_out\.weight is missing"),
        (reshape("blocks.0.k.weight", 128, 64), r"blocks\.0\.k\.weight is \[128, 64\].* needs \[128, 128\]"),
        (reshape("norm_final.weight", 127), r"norm_final\.weight is \[127\]"),
        (reshape("blocks.0.lora.weight", 4), r"blocks\.0\.lora\.weight is not part of"),
    ],
)
def test_tensors_that_do_not_fit_are_named(native_file, change, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(native_file(change=change))
    assert "\n" not in str(caught.value)


def retype(name, dtype):
    return lambda state: state.update({name: state[name].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.float64])
def test_types_that_need_scales_are_refused_without(native_file, dtype):
    for name in ("blocks.0.q.weight", "norm_final.bias"):
        with pytest.raises(CheckpointError, match=f"{name} is {str(dtype)[6:]}; needed is"):
            open_checkpoint(native_file(change=retype(name, dtype)))


def with_layer(change):
    """One layer in NVFP4, rotated by 128, then changed."""

    def quantize(state):
        weight = state.pop("blocks.0.q.weight")
        layer = QuantizedWeight(*quantize_nvfp4(weight), *weight.shape, hadamard=128)
        state.update(layer.state_dict("blocks.0.q"))
        change(state)

    return quantize


def mark(text):
    return {"blocks.0.q.comfy_quant": torch.tensor(list(text), dtype=torch.uint8)}


def rotated_by(size):
    return lambda state: state.update(mark(b'{"format": "sixbit_nvfp4", "hadamard": %s}' % size))


def set_to(name, value):
    return lambda state: state.update({name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (rotated_by(size), "power of two from 2 to 128")
            for size in (b"256", b"1", b"96", b"16.0", b'"16"')
        ),
        (rotated_by(b"[" * 100_000), "quantization entries are damaged"),
        (retype("blocks.0.q.weight_scale", torch.bfloat16), "weight_scale is bfloat16, needs float8_e4m3fn"),
        (
            retype("blocks.0.q.weight_scale_2", torch.float16),
            r"weight_scale_2 is float16 \[\], needs one float32",
        ),
        (set_to("blocks.0.q.weight_scale_2", torch.ones(2)), r"weight_scale_2 is float32 \[2\]"),
        (set_to("blocks.0.q.weight_scale_2", torch.tensor(float("nan"))), "weight_scale_2 is nan"),
        (set_to("blocks.0.q.weight_scale_2", torch.tensor(-1.0)), "weight_scale_2 is -1.0"),
    ],
)
def test_quantized_layers_are_checked_when_opened(native_file, change, message):
    open_checkpoint(native_file(change=with_layer(lambda state: None)))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(native_file(change=with_layer(change)))


def test_a_made_up_block_number_ends_at_once(native_file):
    name = "transformer_blocks.30000000.attn1.to_q.weight"
    with pytest.raises(CheckpointError, match=r"blocks\.30000000 cannot be among \d+ tensors"):
        open_checkpoint(native_file(change=set_to(name, torch.zeros(1))))


def test_a_tensor_under_both_its_names_is_refused(native_file):
    name = "transformer_blocks.0.attn1.to_q.weight"
    with pytest.raises(CheckpointError, match=r"blocks\.0\.q\.weight is there twice"):
        open_checkpoint(native_file(change=set_to(name, torch.zeros(128, 128))))


@pytest.mark.parametrize("name", ["blocks.0.norm_q.weight", "patch_embed.proj.weight"])
def test_tensors_without_a_value_are_refused(native_file, name):
    def empty(state):
        state[name] = state[name][..., :0].contiguous()

    with pytest.raises(CheckpointError, match=f"{name} is .*, which holds no value"):
        open_checkpoint(native_file(change=empty))


@pytest.mark.parametrize("text", ["{", "[1]", "3", "[" * 100_000])
def test_a_broken_configuration_in_the_metadata(native_file, text):
    with pytest.raises(CheckpointError, match="its sixbit_config is no JSON"):
        open_checkpoint(native_file(metadata={"sixbit_config": text}))


def lose_shard(folder):
    next(iter(sorted(folder.glob("*-00002-of-*")))).unlink()


def cut_shard(folder):
    shard = sorted(folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])


def empty_shard(folder):
    save_file({"other": torch.zeros(1)}, sorted(folder.glob("*.safetensors"))[0])


def lose_index(folder):
    next(folder.glob("*.index.json")).unlink()


def no_weight_map(folder):
    next(folder.glob("*.index.json")).write_text("{}")


def half_index(folder):
    index = next(folder.glob("*.index.json"))
    index.write_text(index.read_text()[:100])


def half_config(folder):
    (folder / "config.json").write_text('{"num_layers":')


def only_pickles(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"PK")


def deep_index(folder):
    next(folder.glob("*.index.json")).write_text("[" * 100_000)


def long_shard(folder):
    index = next(folder.glob("*.index.json"))
    index.write_text(index.read_text().replace("00001-of", "1" * 300))


def deep_config(folder):
    (folder / "config.json").write_text('{"a":' * 100_000)


def nothing(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_shard, r"00002-of-.* is missing; download it"),
        (cut_shard, "00001-of-.* is cut short at"),
        (empty_shard, "00001-of-.* is missing, which"),
        (lose_index, r"files and no index"),
        (no_weight_map, "no weight_map"),
        (half_index, "index.json is no readable JSON"),
        (half_config, "config.json is no readable JSON"),
        (deep_index, "index.json is no readable JSON"),
        (deep_config, "config.json is no readable JSON"),
        (long_shard, "cannot read .*name too long"),
        (only_pickles, "holds pickled weights"),
        (nothing, r"holds no \.safetensors file"),
    ],
)
def test_folders_that_are_not_whole(tiny, store, damage, message):
    folder = store(tiny(), "sharded folder")
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.safetensors", None, "does not exist"),
        ("model.pt", b"PK\x03\x04", "pickled weights"),
        ("model.ckpt", b"", "pickled weights"),
        ("text.safetensors", b"hello, this is not a checkpoint", "not a safetensors file"),
        ("json.safetensors", (2).to_bytes(8, "little") + b"[]", "not a safetensors file"),
        ("empty.safetensors", b"", "not a safetensors file"),
        ("none.safetensors", (2).to_bytes(8, "little") + b"{}", "no model this pack knows"),
        ("m.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs"),
        ("model-00001-of-00003.safetensors", b"", "one shard of 3; give the folder"),
    ],
)
def test_files_that_are_no_checkpoint(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_a_name_too_long(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot read .*name too long"):
        open_checkpoint(tmp_path / ("a" * 300 + ".safetensors"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes with names")
def test_a_pipe_is_refused(tmp_path, tiny, store):
    os.mkfifo(tmp_path / "pipe.safetensors")
    with pytest.raises(CheckpointError, match="is no regular file"):
        open_checkpoint(tmp_path / "pipe.safetensors")
    folder = store(tiny(), "transformer folder")
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json is no regular file"):
        open_checkpoint(folder)


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
