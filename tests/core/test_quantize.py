import itertools
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sixbit_diffusion.kernels import linear_w4a8
from sixbit_diffusion.sixbit_core.checkpoint import CheckpointError, open_checkpoint
from sixbit_diffusion.sixbit_core.families import FAMILIES
from sixbit_diffusion.sixbit_core.quantize import (
    QuantizeConfig,
    quantize_checkpoint,
    quantize_group,
    quantize_linear,
    quantize_tensors,
)
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight, file_entries

FAST = QuantizeConfig(method="rtn")


def gaussian(rows=256, columns=512, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def on_the_grid(rows, columns):
    """Values that NVFP4 holds exactly, unless they are rotated."""
    grid = torch.tensor([-6.0, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])
    weight = grid[torch.randint(0, 15, (rows, columns), generator=torch.Generator().manual_seed(0))]
    weight[:, ::16] = 6.0
    return weight


def relative_error(weight, quantized):
    return float((quantized.dequantize() - weight).norm() / weight.norm())


def test_error_of_a_gaussian_weight_is_that_of_the_method():
    weight = gaussian()
    for rotation in ("on", "off"):
        nearest = relative_error(weight, quantize_linear(weight, QuantizeConfig("rtn", rotation)))
        search = relative_error(weight, quantize_linear(weight, QuantizeConfig("search", rotation)))
        assert nearest == pytest.approx(0.095, abs=0.003)
        assert search == pytest.approx(0.082, abs=0.003)


def test_rotation_spreads_an_outlier_of_the_weight():
    weight = gaussian(64, 256)
    weight[:, 5] *= 50
    assert quantize_linear(weight, QuantizeConfig(rotation="on")).hadamard == 128
    assert quantize_linear(weight, QuantizeConfig(rotation="off")).hadamard == 0
    assert quantize_linear(gaussian(16, 48), QuantizeConfig(rotation="on")).hadamard == 16
    assert quantize_linear(weight, QuantizeConfig(compatible=True)).hadamard == 0


def test_auto_rotation_takes_the_smaller_output_error():
    weight = gaussian(64, 256)
    outliers = gaussian(128, 256, seed=1)
    outliers[:, ::64] *= 100  # INT8 activations lose the small channels, unless rotated
    gridded = on_the_grid(64, 256)
    auto = QuantizeConfig(rotation="auto")
    assert quantize_linear(weight, auto).hadamard == 128  # nothing known: on
    for w, x, expected in ((weight, outliers, 128), (gridded, gaussian(128, 256), 0)):
        chosen = quantize_linear(w, auto, inputs=x)
        assert chosen.hadamard == expected
        errors = {}
        for rotation in ("on", "off"):
            q = quantize_linear(w, QuantizeConfig(rotation=rotation))
            y = linear_w4a8(x, q.data, q.scale, q.global_scale, hadamard=q.hadamard)
            errors[q.hadamard] = float((y - x @ w.T).norm())
        assert chosen.hadamard == min(errors, key=errors.get)


def test_a_group_shares_global_scale_and_rotation():
    weights = [gaussian(32, 128, seed=s) * (s + 1) for s in range(3)]
    group = quantize_group(weights, QuantizeConfig())
    assert len({float(q.global_scale) for q in group}) == 1 and {q.hadamard for q in group} == {128}
    assert float(group[0].global_scale) == float(quantize_linear(weights[2], QuantizeConfig()).global_scale)
    assert max(relative_error(w, q) for w, q in zip(weights, group, strict=True)) < 0.09


@pytest.mark.parametrize("method", ["rtn", "search"])
def test_weights_whose_rotation_overflows_are_refused(native_file, tmp_path, method):
    huge = torch.full((128, 128), 3e38)
    target = tmp_path / "out.safetensors"
    source = native_file(dtype=torch.float32, change=lambda state: state.update({"blocks.1.k.weight": huge}))
    with pytest.raises(CheckpointError, match=r"blocks\.1\.k.* cannot be quantized: .*too large"):
        quantize_checkpoint(source, target, QuantizeConfig(method))
    assert not target.exists()
    upright = quantize_linear(huge, QuantizeConfig(method, rotation="off"))
    assert relative_error(huge.double(), upright) < 0.11


def test_zeros_stay_zeros():
    assert not quantize_linear(torch.zeros(16, 32), QuantizeConfig()).dequantize().any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "gptq"}, "gptq is not available; use search"),
        ({"method": "fp8"}, "method must be one of search, rtn"),
        ({"rotation": "maybe"}, "rotation must be one of auto, on, off"),
        ({"compatible": True, "rotation": "on"}, "compatible file holds no rotated layer"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        QuantizeConfig(**settings)


@pytest.mark.parametrize("way", ["sharded folder", "single native", "full diffusers"])
def test_the_file_holds_the_model(tiny, store, native_state, tmp_path, way, kind):
    model = tiny(kind)
    target = tmp_path / "out.safetensors"
    seen = []
    summary = quantize_checkpoint(store(model, way), target, FAST, lambda *args: seen.append(args))
    exact, checkpoint = native_state(model), open_checkpoint(target)
    assert summary.layers == 17 and summary.rotated == 12 and summary.target_bytes == target.stat().st_size
    assert seen[-1][0] == seen[-1][1] == summary.source_bytes
    assert all(a[0] < b[0] for a, b in itertools.pairwise(seen))
    layers = {*checkpoint.family.block_layers(), *checkpoint.family.modulation_layers()}
    assert set(checkpoint.formats) == layers and set(checkpoint.shapes) == set(exact)
    for layer in layers:
        weight = exact[f"{layer}.weight"].float()
        quantized = checkpoint.quantized(layer)
        assert relative_error(weight, quantized) < 0.11
        assert quantized.hadamard == (0 if "norm" in layer else 128), layer
    for name in set(exact) - {f"{layer}.weight" for layer in layers}:
        assert torch.equal(checkpoint.tensor(name), exact[name]), name
    scales = [float(checkpoint.tensor(f"blocks.1.{kind}.weight_scale_2")) for kind in "qkv"]
    assert len(set(scales)) == 1
    expected = open_checkpoint(tmp_path / way if (tmp_path / way).exists() else store(model, way)).config
    assert expected is None or checkpoint.config == {**checkpoint.config, **expected}


def test_other_readers_read_the_file(native_file, tmp_path):
    target = tmp_path / "out.safetensors"
    quantize_checkpoint(native_file(), target, FAST)
    ours, theirs = open_checkpoint(target), load_file(target)
    assert set(theirs) == set(ours.keys())
    for name, tensor in theirs.items():
        assert tensor.shape == ours.shape(name)
        a, b = (t.reshape(-1).view(torch.uint8) for t in (tensor, ours.tensor(name)))
        assert torch.equal(a, b), name
    assert json.loads(theirs["blocks.0.q.comfy_quant"].numpy().tobytes())["format"] == "sixbit_nvfp4"


def test_metadata_says_where_it_comes_from(native_file, tmp_path):
    source, target = native_file("1.5"), tmp_path / "out.safetensors"
    quantize_checkpoint(source, target, QuantizeConfig())
    with safe_open(target, "pt") as file:
        metadata = file.metadata()
    assert metadata["sixbit_source"] == "native.safetensors" and metadata["sixbit_method"] == "search"
    assert metadata["sixbit_fingerprint"] == open_checkpoint(source).fingerprint
    assert metadata["sixbit_family"] == "cogvideox-small" and metadata["sixbit_licence"] == "unknown"
    assert metadata["sixbit_version"] and json.loads(metadata["sixbit_config"])["patch_size_t"] == 2
    assert str(tmp_path) not in json.dumps(metadata)


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\nlicense: apache-2.0\n---\ntext", "apache-2.0"),
        ('---\nlicense: other\nlicense_name: "cogvideox-license"\n---\n', "cogvideox-license"),
        ("no front matter\nlicense: mit", "unknown"),
    ],
)
def test_licence_of_a_model_card(tiny, tmp_path, card, licence):
    folder = tmp_path / "models--OWNER--Model" / "snapshots" / "0123abcd"
    tiny().save_pretrained(folder / "transformer")
    (folder / "README.md").write_text(card)
    for source in (folder, folder / "transformer"):
        target = tmp_path / "out.safetensors"
        quantize_checkpoint(source, target, QuantizeConfig(method="rtn", force=True))
        metadata = open_checkpoint(target).metadata
        assert (metadata["sixbit_licence"], metadata["sixbit_source"]) == (licence, "OWNER/Model")


@pytest.mark.parametrize(
    ("card", "name"), [("---\nmodel_name: A name\n---\n", "A name"), ("---\nlicense: mit\n---\n", "folder")]
)
def test_name_of_a_model_card(tiny, tmp_path, card, name):
    folder, target = tmp_path / "folder", tmp_path / "out.safetensors"
    tiny().save_pretrained(folder / "transformer")
    (folder / "README.md").write_text(card)
    quantize_checkpoint(folder, target, QuantizeConfig(method="rtn"))
    assert open_checkpoint(target).metadata["sixbit_source"] == name


def test_compatible_files_hold_plain_nvfp4_only(native_file, tmp_path):
    target = tmp_path / "out.safetensors"
    summary = quantize_checkpoint(native_file(), target, QuantizeConfig("rtn", compatible=True))
    checkpoint = open_checkpoint(target)
    assert summary.rotated == 0 and summary.layers == len(checkpoint.formats) == 16
    assert {mark["format"] for mark in checkpoint.formats.values()} == {"nvfp4"}
    assert checkpoint.dtype("blocks.0.norm1.linear.weight") == torch.bfloat16  # a stock host reads its shape


@pytest.mark.parametrize(
    ("dtype", "copied"),
    [
        (torch.float32, torch.bfloat16),  # the precision the family was published in
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_of_what_is_copied(native_file, tmp_path, dtype, copied):
    target = tmp_path / "out.safetensors"
    quantize_checkpoint(native_file(dtype=dtype), target, FAST)
    checkpoint = open_checkpoint(target)
    rest = [n for n in checkpoint.shapes if n.removesuffix(".weight") not in checkpoint.formats]
    assert {checkpoint.dtype(name) for name in rest} == {copied}


def test_in_memory_and_in_a_file_are_the_same(native_file, tmp_path):
    source, target = native_file(), tmp_path / "out.safetensors"
    quantize_checkpoint(source, target, QuantizeConfig())
    stored, count = open_checkpoint(target), 0
    for name, item in quantize_tensors(open_checkpoint(source), QuantizeConfig()):
        if isinstance(item, QuantizedWeight):
            assert torch.equal(item.data, stored.quantized(name).data)
            count += 1
        else:
            assert torch.equal(item, stored.tensor(name))
    assert count == 17


def test_inputs_choose_the_rotation_per_layer(native_file, tmp_path):
    def put_on_the_grid(state):
        state["blocks.0.attn_out.weight"] = on_the_grid(128, 128).bfloat16()

    outliers = gaussian(64, 512, seed=1)
    outliers[:, ::64] *= 100
    inputs = {"blocks.0.attn_out": gaussian(64, 128), "blocks.0.ff_out": outliers}
    target = tmp_path / "out.safetensors"
    quantize_checkpoint(native_file(change=put_on_the_grid), target, FAST, inputs=inputs)
    formats = open_checkpoint(target).formats
    assert formats["blocks.0.attn_out"] == {"format": "nvfp4"}
    assert formats["blocks.0.ff_out"]["hadamard"] == formats["blocks.1.attn_out"]["hadamard"] == 128


def test_same_source_gives_the_same_bytes(native_file, tmp_path):
    source = native_file()
    for name in ("a", "b"):
        quantize_checkpoint(source, tmp_path / f"{name}.safetensors", QuantizeConfig())
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_a_5b_shrinks_three_and_a_half_times():
    family = FAMILIES["cogvideox-5b"]
    shapes = family.tensor_shapes()
    full = 2 * sum(torch.Size(s).numel() for s in shapes.values())
    small = full
    for layer in (*family.block_layers(), *family.modulation_layers()):
        shape = shapes[f"{layer}.weight"]
        entries = file_entries(layer, *shape)
        small += sum(torch.Size(s).numel() * dtype.itemsize for _, dtype, s in entries)
        small -= 2 * torch.Size(shape).numel()
    assert full / 1e9 == pytest.approx(11.14, abs=0.01)
    assert small / 1e9 == pytest.approx(3.16, abs=0.02)
    assert full / small == pytest.approx(3.52, abs=0.02)


# --- faults: one line that names the place, and whatever stood at the target still stands there


def test_a_shard_of_the_source_is_no_target(tiny, store):
    folder = store(tiny(), "sharded folder")
    shard = sorted(folder.glob("*.safetensors"))[0]
    with pytest.raises(CheckpointError, match="is the source itself"):
        quantize_checkpoint(folder, shard, QuantizeConfig(force=True))


def test_no_weights_of_the_pipeline_are_a_target(tiny, store):
    folder = store(tiny(), "pipeline folder")
    vae = folder / "vae" / "diffusion_pytorch_model.safetensors"
    vae.parent.mkdir()
    vae.write_bytes(b"vae")
    weights = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    for source in (folder, folder / "transformer", weights):
        with pytest.raises(CheckpointError, match="is the source itself or part of its pipeline"):
            quantize_checkpoint(source, vae, QuantizeConfig(method="rtn", force=True))
    assert vae.read_bytes() == b"vae"
    quantize_checkpoint(folder, folder / "6bit.safetensors", FAST)


def test_fp32_that_overflows_fp16_is_named(tmp_path):
    """The 2B was published in fp16; a float32 copy with values beyond it cannot be stored so."""
    from sixbit_diffusion.sixbit_core.families.cogvideox import PUBLISHED
    from sixbit_diffusion.sixbit_core.quantize import copied_dtype

    two = PUBLISHED[0]
    state = {n: torch.zeros(1).expand(s) for n, s in two.tensor_shapes().items() if "norm_final" in n}
    save_file({n: t.clone() + 1e6 for n, t in state.items()}, tmp_path / "a.safetensors")
    from sixbit_diffusion.sixbit_core.checkpoint import Checkpoint
    from sixbit_diffusion.sixbit_core.safetensors_file import read_header

    infos, metadata = read_header(tmp_path / "a.safetensors")
    shapes = {n: i.shape for n, i in infos.items()}
    checkpoint = Checkpoint(tmp_path / "a.safetensors", two, metadata, None, infos, shapes, {}, {})
    assert copied_dtype(checkpoint, "norm_final.weight") == torch.float16
    with pytest.raises(CheckpointError, match=r"norm_final\.weight holds NaN or Inf"):
        checkpoint.finite("norm_final.weight", "cpu", torch.float16)
