import math

import pytest
import torch
from sixbit_diffusion.kernels import block_hadamard, dequantize_nvfp4, quantize_nvfp4
from sixbit_diffusion.kernels.nvfp4 import decode_e2m1, encode_e2m1, round_e2m1
from sixbit_diffusion.sixbit_core.checkpoint import CheckpointError, open_checkpoint
from sixbit_diffusion.sixbit_core.gptq import DAMPING, input_factor, round_by_inputs
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint, quantize_group
from sixbit_diffusion.sixbit_core.quantize_weight import output_errors, quantize_linear
from sixbit_diffusion.sixbit_core.sample_inputs import SampleInputs, write_inputs
from sixbit_diffusion.sixbit_core.time_embedding import time_inputs

GPTQ = QuantizeConfig("gptq", calibrated=True)


def correlated(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Inputs with a few strong directions, as a transformer's have."""
    generator = torch.Generator().manual_seed(seed)
    strong = torch.randn(8, columns, generator=torch.Generator().manual_seed(99))
    return torch.randn(rows, 8, generator=generator) @ strong + torch.randn(
        rows, columns, generator=generator
    )


def gaussian(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def by_the_paper(weight, scale, global_scale, x):
    """GPTQ as published, by the inverse of H, in float64 and from the last column to the first."""
    hessian = x.double().T @ x.double()
    hessian += DAMPING * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=torch.float64)
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian.flip(0, 1)), upper=True)
    w = weight.double().flip(1)
    steps = (scale.float() * global_scale).double().repeat_interleave(16, dim=1).flip(1)
    rounded = torch.zeros_like(w)
    for j in range(w.shape[1]):
        rounded[:, j] = decode_e2m1(encode_e2m1((w[:, j] / steps[:, j]).float())) * steps[:, j]
        error = (w[:, j] - rounded[:, j]) / inverse[j, j]
        w[:, j:] -= error[:, None] * inverse[j, j:]
    return rounded.flip(1)


def test_rounding_is_encoding_and_decoding():
    values = torch.cat(
        [gaussian(64, 64).flatten() * 4, torch.arange(-32, 33) / 4, torch.tensor([-0.0, 1e-40])]
    )
    rounded, decoded = round_e2m1(values), decode_e2m1(encode_e2m1(values))
    assert torch.equal(rounded.view(torch.int32), decoded.view(torch.int32))


@pytest.mark.parametrize("columns", [64, 272])
def test_it_is_the_published_algorithm(columns):
    weight, x = gaussian(32, columns), correlated(100, columns)
    _, scale, global_scale = quantize_nvfp4(weight, "search")
    data = round_by_inputs(weight, scale, global_scale, input_factor(x))
    ours = dequantize_nvfp4(data, scale, global_scale)
    different = (ours - by_the_paper(weight, scale, global_scale, x)).abs() > 1e-6
    assert different.float().mean() < 0.01  # a tie may fall either way and moves what follows


def test_outputs_on_unseen_inputs_are_better_and_scales_stay():
    weights = [gaussian(64, 256, seed) for seed in range(3)]
    unseen = correlated(200, 256, seed=5)
    search = quantize_group(weights, QuantizeConfig(rotation="on"))
    gptq = quantize_group(weights, QuantizeConfig("gptq", "on", calibrated=True), inputs=correlated(400, 256))
    before, after = output_errors(weights, search, unseen), output_errors(weights, gptq, unseen)
    assert all(a < 0.75 * b for a, b in zip(after, before, strict=True))
    for old, new in zip(search, gptq, strict=True):
        assert torch.equal(old.scale.view(torch.uint8), new.scale.view(torch.uint8))
        assert torch.equal(old.global_scale, new.global_scale) and new.hadamard == 128


def test_inputs_are_rotated_with_the_weight():
    weight, x = gaussian(32, 128), correlated(100, 128)
    x[:, 0] *= 50
    rotated = quantize_linear(weight, QuantizeConfig("gptq", "on", calibrated=True), inputs=x)
    factor = input_factor(block_hadamard(x, 128))
    data = round_by_inputs(block_hadamard(weight, 128), rotated.scale, rotated.global_scale, factor)
    assert torch.equal(rotated.data, data)
    upright = quantize_linear(weight, QuantizeConfig("gptq", "off", calibrated=True), inputs=x)
    data = round_by_inputs(weight, upright.scale, upright.global_scale, input_factor(x))
    assert torch.equal(upright.data, data)


def test_inputs_that_say_nothing_round_to_nearest():
    weight = gaussian(16, 64)
    plain = quantize_linear(weight, QuantizeConfig(rotation="off"))
    config = QuantizeConfig("gptq", "off", calibrated=True)
    same = quantize_linear(weight, config, inputs=torch.zeros(4, 64)).dequantize()
    assert torch.equal(same, plain.dequantize())
    assert not quantize_linear(torch.zeros(16, 64), config, inputs=torch.randn(4, 64)).dequantize().any()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (None, "needs sample inputs of 64 columns, got none"),
        (torch.ones(4, 32), "needs sample inputs of 64 columns, got 32 columns"),
        (torch.full((4, 64), math.nan), "sample inputs hold NaN or Inf; calibrate again"),
    ],
)
def test_inputs_that_cannot_serve(inputs, message):
    with pytest.raises(ValueError, match=message):
        quantize_linear(gaussian(16, 64), QuantizeConfig("gptq", "off", calibrated=True), inputs=inputs)


def test_without_calibration_it_is_refused():
    with pytest.raises(ValueError, match=r"use search, or write them with `sixbit calibrate --inputs DIR`"):
        QuantizeConfig("gptq")


def kept_inputs(source, folder) -> SampleInputs:
    checkpoint = open_checkpoint(source)
    kinds = {"q": 128, "attn_out": 128, "ff_proj": 128, "ff_out": 512}
    rows = {f"blocks.{n}.{k}": correlated(64, size).bfloat16() for n in range(2) for k, size in kinds.items()}
    folder.mkdir(exist_ok=True)
    write_inputs(folder, rows, checkpoint.fingerprint)
    return SampleInputs(folder, checkpoint)


def test_a_file_by_gptq_repeats_and_tells_its_errors(native_file, tmp_path):
    source = native_file()
    inputs = kept_inputs(source, tmp_path / "kept")
    assert len(inputs) == len(list(inputs)) == 2 * 4
    found = {}
    for name, config in {"a": GPTQ, "b": GPTQ, "search": QuantizeConfig()}.items():
        errors = found[name] = {}
        quantize_checkpoint(source, tmp_path / f"{name}.safetensors", config, None, inputs, errors=errors)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    made = open_checkpoint(tmp_path / "a.safetensors")
    assert made.metadata["sixbit_method"] == "gptq" and len(made.formats) == 17
    assert set(found["a"]) == set(made.formats)
    blocks = [layer for layer in inputs if found["a"][layer] > 0.9 * found["search"][layer]]
    assert not blocks


def test_what_reads_the_time_embedding_is_always_rounded_by_it(native_file, tmp_path):
    """But for "rtn", whose adaLN errors are larger. Nothing else has an error to tell here."""
    source, found = native_file(), {}
    for method in ("search", "rtn"):
        errors = found[method] = {}
        quantize_checkpoint(source, tmp_path / f"{method}.safetensors", QuantizeConfig(method), errors=errors)
    assert len(found["search"]) == 5 and "norm_out.linear" in found["search"]
    assert all(error < 0.6 * found["rtn"][layer] for layer, error in found["search"].items())


def test_a_layer_without_inputs_is_named_and_nothing_is_written(native_file, tmp_path):
    target = tmp_path / "out.safetensors"
    with pytest.raises(CheckpointError, match=r"blocks\.0\.q.*gptq needs sample inputs of 128 columns"):
        quantize_checkpoint(native_file(), target, GPTQ, inputs={"blocks.0.ff_out": correlated(9, 512)})
    assert not target.exists()


def test_inputs_of_other_weights_are_refused(native_file, tmp_path):
    source = native_file()
    write_inputs(tmp_path, {"blocks.0.q": torch.ones(4, 128)}, "of another model")
    with pytest.raises(CheckpointError, match="other weights than the checkpoint"):
        SampleInputs(tmp_path, open_checkpoint(source))


def test_the_time_embedding_is_the_models(tiny, store, kind):
    model = tiny(kind, torch.float32)
    computed = time_inputs(open_checkpoint(store(model, "single native")))
    seen = []
    model.transformer_blocks[0].norm1.linear.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    channels, config = model.config.in_channels, model.config
    with torch.no_grad():
        rotary = None
        if config.use_rotary_positional_embeddings:
            tokens = (2 // (config.patch_size_t or 1)) * 16
            rotary = (torch.ones(tokens, 64), torch.zeros(tokens, 64))
        model(
            torch.zeros(1, 2, channels, 8, 8),
            torch.zeros(1, 8, 32),
            torch.tensor([437]),
            ofs=torch.tensor([2.0]) if config.ofs_embed_dim else None,
            image_rotary_emb=rotary,
        )
    torch.testing.assert_close(seen[0], computed[437:438], rtol=1e-4, atol=1e-5)
