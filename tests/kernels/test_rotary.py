"""q and k, normalized by head and rotated by position, in place; v and the text's positions left alone."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import norm_rotary_, use_backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def attention(make):
    """(qkv, heads, norm_q, norm_k, eps, rotary, text_tokens); no table repeats a number."""

    def build(batch, text, video, heads, size, dtype=torch.float32, device="cpu", norm=True, rotary=True):
        def vectors(seed):
            return tuple(make(size, dtype=dtype, device=device, seed=seed + i) for i in range(2))

        angle = make(video, size, device=device, seed=7)
        return (
            make(batch, text + video, 3 * heads * size, dtype=dtype, device=device),
            heads,
            vectors(1) if norm else None,
            vectors(3) if norm else None,
            1e-6,
            (angle.cos(), angle.sin()) if rotary else None,
            text,
        )

    return build


def test_norm_then_rotation_of_pairs(attention):
    qkv, heads, norm_q, norm_k, eps, (cos, sin), text = attention(2, 3, 5, 2, 8)
    before = qkv.clone()
    assert norm_rotary_(qkv, heads, norm_q, norm_k, eps, (cos, sin), text) is qkv
    old, new = (t.view(2, 8, 3, heads, 8) for t in (before, qkv))
    assert torch.equal(new[:, :, 2], old[:, :, 2])
    for part, norm in ((0, norm_q), (1, norm_k)):
        y = torch.nn.functional.layer_norm(old[:, :, part], (8,), *norm, eps)
        torch.testing.assert_close(new[:, :text, part], y[:, :text], rtol=1e-5, atol=1e-5)
        y, z = y[:, text:], new[:, text:, part]
        for i in range(0, 8, 2):
            c, s = cos[None, :, None], sin[None, :, None]
            even = y[..., i] * c[..., i] - y[..., i + 1] * s[..., i]
            odd = y[..., i + 1] * c[..., i + 1] + y[..., i] * s[..., i + 1]
            torch.testing.assert_close(z[..., i], even, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(z[..., i + 1], odd, rtol=1e-5, atol=1e-5)


def test_neither_norm_nor_rotation_leaves_it_alone(attention):
    arguments = attention(1, 2, 3, 2, 8, norm=False, rotary=False)
    before = arguments[0].clone()
    assert torch.equal(norm_rotary_(*arguments), before)


CASES = [
    (2, 3, 5, 2, 8),
    (1, 0, 4, 3, 64),
    (1, 4, 0, 2, 16),
    (2, 1, 3, 30, 64),
    (1, 2, 2, 48, 64),
    (1, 1, 2, 3, 24),
]
LARGE = [(2, 226, 1351, 48, 64), (1, 226, 3000, 30, 64)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *(pytest.param(c, marks=pytest.mark.gpu) for c in LARGE)], ids=str)
@pytest.mark.parametrize("norm, rotary", [(True, True), (True, False), (False, True)])
def test_twin_agrees(device, attention, case, norm, rotary, dtype):
    """Against float32 of the same numbers, at most twice the reference's error and one rounding."""
    qkv, *rest = attention(*case, dtype=dtype, device=device, norm=norm, rotary=rotary)
    results = {}
    for name, backend, x in (("exact", "reference", qkv.float()), ("reference", "reference", qkv.clone())):
        with use_backend(backend):
            results[name] = norm_rotary_(x, *rest)
    with use_backend("triton"):
        got = norm_rotary_(qkv, *rest)
    exact = results["exact"]
    worst = (results["reference"].float() - exact).abs().max()
    unit = max(torch.finfo(dtype).eps, 1e-6) if device == "cpu" else 1e-6
    assert got.data_ptr() == qkv.data_ptr()
    assert (got.float() - exact).abs().max() <= 2 * worst + unit * exact.abs().max()


def test_only_k_may_be_normalized(device, attention):
    qkv, heads, _, norm_k, eps, rotary, text = attention(1, 2, 3, 2, 8, device=device)
    with use_backend("reference"):
        expected = norm_rotary_(qkv.clone(), heads, None, norm_k, eps, rotary, text)
    with use_backend("triton"):
        norm_rotary_(qkv, heads, None, norm_k, eps, rotary, text)
    torch.testing.assert_close(qkv, expected, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_named(attention):
    qkv, heads, norm_q, norm_k, eps, (cos, sin), text = attention(2, 3, 5, 2, 8)
    for arguments, message in (
        ((qkv[0], heads, None, None, eps, None, text), "3-D"),
        ((qkv.transpose(0, 1), heads, None, None, eps, None, text), "in place and needs a contiguous qkv"),
        ((qkv, 5, None, None, eps, None, text), "qkv with 3 x 5 heads of an even size, got .2, 8, 48."),
        ((qkv, heads, None, None, eps, None, 9), "text_tokens from 0 to 8, got 9"),
        ((qkv, heads, (norm_q[0][:4], norm_q[1]), None, eps, None, text), "norm_q as a float tensor .8,."),
        ((qkv, heads, None, (norm_k[0], norm_k[1].int()), eps, None, text), "norm_k as a float tensor"),
        ((qkv, heads, None, None, eps, (cos, sin[1:]), text), "rotary as a float tensor .5, 8."),
        ((qkv, heads, None, None, eps, (cos.half(), sin), text), "rotary as float32, got .5, 8. float16"),
    ):
        with pytest.raises(ValueError, match=message):
            norm_rotary_(*arguments)
