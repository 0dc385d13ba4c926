from dataclasses import replace

import pytest
import torch
from sixbit_diffusion.kernels import block_hadamard, quantize_nvfp4
from sixbit_diffusion.sixbit_core.checkpoint import CheckpointError, open_checkpoint
from sixbit_diffusion.sixbit_core.families import FAMILIES
from sixbit_diffusion.sixbit_core.gptq import moment_factor, round_by_inputs
from sixbit_diffusion.sixbit_core.input_moments import TIMES, _spread, block_size, linear_moments
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_tensors
from sixbit_diffusion.sixbit_core.quantize_weight import output_errors, quantize_group, quantize_linear
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight
from sixbit_diffusion.sixbit_core.time_embedding import time_inputs

SEARCH = QuantizeConfig()


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomly_normed(model: torch.nn.Module) -> torch.nn.Module:
    """With LayerNorms that scale and shift, a strong adaLN, and biases that count."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if (
            ".norm.weight" in name
            or ".norm.bias" in name
            or name.endswith((".to_v.bias", ".net.0.proj.bias"))
        ):
            parameter.data += 0.3 * gaussian(*parameter.shape, seed=number)
        elif ".linear.weight" in name and ".norm" in name:
            parameter.data *= 3
    return model


def watched(module: torch.nn.Module) -> list[torch.Tensor]:
    seen = []
    module.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    return seen


def test_they_are_those_of_white_tokens_through_the_true_modules(tiny, store):
    model = randomly_normed(tiny("5b", torch.float32))
    checkpoint = open_checkpoint(store(model, "single native"))
    block, times = model.transformer_blocks[1], gaussian(6, 32, seed=3) * 2
    proj, out = watched(block.ff.net[0].proj), watched(block.ff.net[2])
    tokens, read = 16384, {"q": [], "attn_out": []}
    with torch.no_grad():
        for number, time in enumerate(times):
            video, text = gaussian(1, tokens, 128, seed=number + 9), gaussian(1, 1, 128)
            x = block.norm1(video, text, time[None])[0][0]
            read["q"].append(x)
            v = block.attn1.to_v(x)
            read["attn_out"].append(v.view(16, -1, 128).mean(0))
            block.ff(block.norm2(video, text, time[None])[0])
    read |= {"ff_proj": proj, "ff_out": out}
    for kind, rows in read.items():
        x = torch.cat(rows)
        whole = (x.T @ x / len(x))[None]
        made = linear_moments(checkpoint, f"blocks.1.{kind}", torch.nn.functional.silu(times))
        assert made.shape == (1, x.shape[1], x.shape[1]) and made.dtype == torch.float32
        assert (made - whole).norm() < 0.03 * whole.norm(), kind
        diagonal = whole.diagonal(dim1=1, dim2=2)
        assert (made.diagonal(dim1=1, dim2=2) - diagonal).norm() < 0.02 * diagonal.norm(), kind


def test_blocks_are_parts_of_the_whole(native_file, monkeypatch):
    checkpoint = open_checkpoint(native_file())
    embedded = time_inputs(checkpoint)
    whole = linear_moments(checkpoint, "blocks.0.ff_out", embedded)[0]
    monkeypatch.setattr("sixbit_diffusion.sixbit_core.input_moments.LARGEST_BLOCK", 256)
    for number, part in enumerate(linear_moments(checkpoint, "blocks.0.ff_out", embedded)):
        at = slice(256 * number, 256 * (number + 1))
        torch.testing.assert_close(part, whole[at, at])


@pytest.mark.parametrize(
    ("columns", "size"),
    [(12288, 2048), (7680, 1920), (3072, 1536), (1920, 1920), (48, 48), (2**20, 2048)],
)
def test_blocks_are_the_largest_that_tile(columns, size):
    assert block_size(columns) == size


def test_the_text_has_no_part_in_them(native_file):
    def louder_text(state):
        for norm in ("norm1", "norm2"):
            state[f"blocks.0.{norm}.linear.weight"][3 * 128 :] *= 7
            state[f"blocks.0.{norm}.linear.weight"][2 * 128 : 3 * 128] *= 7  # the video's gate

    moments = []
    for change in (lambda state: None, louder_text):
        checkpoint = open_checkpoint(native_file(change=change))
        embedded = time_inputs(checkpoint)
        moments.append([linear_moments(checkpoint, f"blocks.0.{k}", embedded) for k in ("q", "ff_out")])
    assert all(map(torch.equal, *moments))


def test_timesteps_are_spread_evenly():
    rows = torch.arange(1000.0)[:, None]
    assert _spread(rows)[:, 0].tolist() == [20 * n + 10 for n in range(TIMES)]
    assert torch.equal(_spread(rows[:7]), rows[:7])


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_every_family_tells_what_its_linears_read(family):
    known, shapes = dict(family.sources), replace(family, layers=1, heads=family.heads or 1).tensor_shapes()
    assert {kind for kind in family.linears if kind not in family.shared_input[1:]} == set(known)
    for source in known.values():
        assert f"{source.norm}.linear" in family.modulation
        assert f"blocks.0.{source.norm}.norm.bias" in shapes
        assert source.through is None or f"blocks.0.{source.through}.bias" in shapes


def test_blocks_are_rounded_as_one_factor_of_them_all():
    weight, x = gaussian(48, 256), gaussian(2, 500, 128, seed=1) @ gaussian(2, 128, 128, seed=2)
    blocks = x.mT @ x
    _, scale, global_scale = quantize_nvfp4(weight, "search")
    apart = round_by_inputs(weight, scale, global_scale, moment_factor(blocks))
    whole = round_by_inputs(weight, scale, global_scale, moment_factor(torch.block_diag(*blocks)[None]))
    assert (apart != whole).float().mean() < 0.01  # a tie may fall either way and moves what follows
    alone = round_by_inputs(weight[:, :128], scale[:, :8], global_scale, moment_factor(blocks)[:1])
    different = moment_factor(blocks[:1])  # damped by the mean of its own diagonal
    assert torch.equal(apart[:, :64], alone) and not torch.equal(different[0], moment_factor(blocks)[0])


@pytest.mark.parametrize(("columns", "size"), [(1920, 128), (320, 64), (48, 16)])
def test_any_width_has_its_blocks(columns, size):
    weight, deviations = gaussian(32, columns), gaussian(columns, seed=1).exp()
    moments = torch.diag_embed(deviations.square().view(-1, size))
    made = quantize_group([weight], QuantizeConfig(rotation="on"), moments=moments)
    x = gaussian(200, columns, seed=2) * deviations
    plain = quantize_group([weight], QuantizeConfig(rotation="on"))
    assert output_errors([weight], made, x)[0] < 0.95 * output_errors([weight], plain, x)[0]


def test_outlier_channels_cost_little():
    """A twin (benchmarks/twins.py): channels 32 times as large, read by weights 32 times as small."""
    scale = torch.ones(256)
    scale[::64] = 32
    weights, x = [gaussian(64, 256, seed=n) / scale for n in range(3)], gaussian(400, 256, seed=9) * scale
    moments = torch.diag_embed(scale.square().view(2, 128))
    plain = quantize_group(weights, SEARCH)
    rounded = quantize_group(weights, SEARCH, moments=moments)
    before, after = output_errors(weights, plain, x), output_errors(weights, rounded, x)
    assert all(a < 0.45 * b for a, b in zip(after, before, strict=True))
    for old, new in zip(plain, rounded, strict=True):
        assert torch.equal(old.scale.view(torch.uint8), new.scale.view(torch.uint8)) and new.hadamard == 128


def test_they_are_rotated_with_the_weight():
    weight, moments = gaussian(32, 128), torch.diag(gaussian(128, seed=1).exp())[None]
    rotated = quantize_group([weight], QuantizeConfig(rotation="on"), moments=moments)[0]
    turned = block_hadamard(block_hadamard(moments, 128).mT, 128)
    factor = moment_factor(turned)
    data = round_by_inputs(block_hadamard(weight, 128), rotated.scale, rotated.global_scale, factor)
    assert torch.equal(rotated.data, data)
    upright = quantize_group([weight], QuantizeConfig(rotation="off"), moments=moments)[0]
    data = round_by_inputs(weight, upright.scale, upright.global_scale, moment_factor(moments))
    assert torch.equal(upright.data, data)


def test_rotation_is_chosen_of_what_is_rounded():
    """Search alone would leave a twin unrotated; with its outliers' errors made up for, rotated is better."""
    scale = torch.ones(256)
    scale[::64] = 32
    weight, x = gaussian(64, 256) / scale, gaussian(400, 256, seed=9) * scale
    moments = torch.diag_embed(scale.square().view(2, 128))
    assert quantize_linear(weight, SEARCH, inputs=x).hadamard == 0
    assert quantize_group([weight], SEARCH, inputs=x, moments=moments)[0].hadamard == 128
    assert quantize_linear(weight, QuantizeConfig("gptq", calibrated=True), inputs=x).hadamard == 128


@pytest.mark.parametrize("config", [QuantizeConfig("rtn"), QuantizeConfig("gptq", calibrated=True)])
def test_other_methods_do_not_read_them(config):
    weight, x = gaussian(32, 128), gaussian(64, 128, seed=1)
    moments = torch.diag(gaussian(128, seed=1).exp())[None]
    without = quantize_group([weight], config, inputs=x)[0]
    assert torch.equal(quantize_group([weight], config, inputs=x, moments=moments)[0].data, without.data)


def test_moments_that_overflow_are_refused():
    with pytest.raises(ValueError, match="the moments of its inputs overflow; check the weights before it"):
        quantize_group([gaussian(16, 128)], SEARCH, moments=torch.full((1, 128, 128), torch.inf))


def test_a_layer_with_moments_that_overflow_is_named(native_file):
    def loud(state):
        state["blocks.1.norm2.norm.weight"][0] = 1e30

    checkpoint = open_checkpoint(native_file(change=loud))
    with pytest.raises(CheckpointError, match=r"blocks\.1\.ff_proj cannot be quantized: the moments"):
        list(quantize_tensors(checkpoint, SEARCH))


def codes(checkpoint, config) -> dict[str, torch.Tensor]:
    made = quantize_tensors(checkpoint, config)
    return {name: item.data for name, item in made if isinstance(item, QuantizedWeight)}


def test_search_rounds_block_linears_by_them(native_file, kind):
    checkpoint = open_checkpoint(native_file(kind))
    embedded = time_inputs(checkpoint)
    found, again = codes(checkpoint, SEARCH), codes(checkpoint, SEARCH)
    assert all(torch.equal(found[name], again[name]) for name in found)
    for layers in (("q", "k", "v"), ("attn_out",), ("ff_proj",), ("ff_out",)):
        names = [f"blocks.1.{layer}" for layer in layers]
        weights = [checkpoint.tensor(f"{name}.weight") for name in names]
        moments = linear_moments(checkpoint, names[0], embedded)
        made = quantize_group(weights, SEARCH, moments=moments)
        plain = quantize_group(weights, SEARCH)
        for name, one, other in zip(names, made, plain, strict=True):
            assert torch.equal(found[name], one.data) and not torch.equal(found[name], other.data)


def test_a_family_that_does_not_tell_is_rounded_to_nearest(native_file):
    checkpoint = open_checkpoint(native_file())
    silent = replace(checkpoint, family=replace(checkpoint.family, sources=()))
    assert linear_moments(silent, "blocks.0.q", time_inputs(checkpoint)) is None
    weight = checkpoint.tensor("blocks.0.attn_out.weight")
    assert torch.equal(codes(silent, SEARCH)["blocks.0.attn_out"], quantize_linear(weight, SEARCH).data)


def test_rtn_stays_plain(native_file):
    checkpoint, plain = open_checkpoint(native_file()), QuantizeConfig("rtn")
    found = codes(checkpoint, plain)
    for name in ("blocks.0.ff_out", "blocks.1.attn_out"):
        weight = checkpoint.tensor(f"{name}.weight")
        data, _, _ = quantize_nvfp4(block_hadamard(weight.float(), 128), "nearest")
        assert torch.equal(found[name], data)
