"""What stands between a block's products: known formulas, and twins as good as the references."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import (
    gate_residual,
    gelu_int8,
    hadamard_quantize_int8,
    norm_modulate,
    norm_modulate_int8,
    outlier_ratio,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def streams(make):
    """(text, video, weight, bias, eps, scale, shift) of a block."""

    def build(batch, text, video, width, dtype=torch.float32, device="cpu", affine=True):
        def vector(seed):
            return make(width, dtype=dtype, device=device, seed=seed) if affine else None

        return (
            make(batch, text, width, dtype=dtype, device=device, seed=1),
            make(batch, video, width, dtype=dtype, device=device, seed=2),
            vector(3),
            vector(4),
            1e-5,
            make(batch, 2, width, dtype=dtype, device=device, seed=5),
            make(batch, 2, width, dtype=dtype, device=device, seed=6),
        )

    return build


def test_norm_modulate_is_layer_norm_modulated_by_stream(streams):
    text, video, weight, bias, eps, scale, shift = streams(2, 3, 5, 48)
    y = norm_modulate(text, video, weight, bias, eps, scale, shift)
    norm = torch.nn.LayerNorm(48, eps=eps)
    norm.load_state_dict({"weight": weight, "bias": bias})
    for part, tokens, stream in ((video, slice(3, None), 0), (text, slice(0, 3), 1)):
        expected = norm(part) * (1 + scale[:, None, stream]) + shift[:, None, stream]
        torch.testing.assert_close(y[:, tokens], expected, rtol=1e-5, atol=1e-5)


def test_gate_residual_moves_each_stream_by_its_gate(make):
    text, video = make(2, 3, 8), make(2, 5, 8, seed=1)
    y, gate = make(2, 8, 8, seed=2), make(2, 2, 8, seed=3)
    new_text, new_video = gate_residual(text, video, y, gate)
    torch.testing.assert_close(new_text, text + gate[:, 1:] * y[:, :3])
    torch.testing.assert_close(new_video, video + gate[:, :1] * y[:, 3:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [0, 16])
def test_forms_that_quantize_are_the_two_steps(streams, make, dtype, block):
    arguments = streams(2, 3, 5, 48, dtype=dtype)
    y = norm_modulate(*arguments)
    q, scale, ratio = norm_modulate_int8(*arguments, block, outliers=True)
    expected_q, expected_scale = hadamard_quantize_int8(y.flatten(0, 1), block)
    assert torch.equal(q, expected_q) and torch.equal(scale, expected_scale)
    assert torch.equal(ratio, outlier_ratio(y))
    assert len(norm_modulate_int8(*arguments, block)) == 2

    x = make(2, 5, 48, dtype=dtype)
    y = torch.nn.functional.gelu(x, approximate="tanh")
    q, scale, ratio = gelu_int8(x, block, outliers=True)
    expected_q, expected_scale = hadamard_quantize_int8(y.flatten(0, 1), block)
    assert torch.equal(q, expected_q) and torch.equal(scale, expected_scale)
    assert torch.equal(ratio, outlier_ratio(y))
    assert len(gelu_int8(x, block)) == 2


def test_wrong_arguments_are_named(streams, make):
    text, video, weight, bias, eps, scale, shift = streams(2, 3, 5, 48)
    y, gate = make(2, 8, 48), make(2, 2, 48)
    rest = (weight, bias, eps, scale, shift)
    plain = (text, video, None, None, eps, scale, shift)
    for call, message in (
        (
            lambda: norm_modulate(text[:1], video, weight, bias, eps, scale, shift),
            "text as float32 .2, 'T', 48.",
        ),
        (
            lambda: norm_modulate(text.half(), video, weight, bias, eps, scale, shift),
            "got .2, 3, 48. float16",
        ),
        (lambda: norm_modulate(text[0], video[0], *rest), "3-D"),
        (lambda: norm_modulate(text, video, weight[:4], bias, eps, scale, shift), "weight as a float"),
        (lambda: norm_modulate(text, video, None, bias[:4], eps, scale, shift), "bias as a float"),
        (lambda: norm_modulate(text, video, weight, bias, eps, scale[:, 0], shift), "scale as a float"),
        (lambda: norm_modulate(text, video, weight, bias, eps, scale, shift.int()), "shift as a float"),
        (
            lambda: norm_modulate_int8(*plain, 32),
            "norm_modulate_int8 .*K = 48",
        ),
        (lambda: gelu_int8(video[0], 16), "gelu_int8 needs a 3-D"),
        (lambda: gelu_int8(video, 3), "gelu_int8 needs a power of two"),
        (
            lambda: gate_residual(text, video, y[:, 1:], gate),
            "gate_residual needs y as a float .*8, 48.",
        ),
        (
            lambda: gate_residual(text, video, y, gate[:1]),
            "gate_residual needs gate as a float .*2, 48.",
        ),
    ):
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "\n" not in str(error.value)
