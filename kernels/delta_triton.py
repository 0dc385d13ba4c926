"""Triton twin of adding a stored residual: one pass, for any pair of types."""

import torch
import triton
import triton.language as tl

from .delta import apply_delta, check_delta
from .support_triton import on_device, supported

BLOCK = 4096


@triton.jit
def apply_delta_kernel(x_ptr, delta_ptr, y_ptr, count, BLOCK: tl.constexpr):
    # grid: (ceil(count / BLOCK),)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    x = tl.load(x_ptr + i, mask=mask, other=0.0).to(tl.float32)
    delta = tl.load(delta_ptr + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + i, (x + delta).to(y_ptr.dtype.element_ty), mask=mask)


@apply_delta.register("triton", when=supported)
def apply_delta_triton(x: torch.Tensor, delta: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    check_delta(x, delta, out)
    x, delta = x.contiguous(), delta.contiguous()
    y = torch.empty_like(x) if out is None else out
    if x.numel():
        with on_device(x):
            apply_delta_kernel[(triton.cdiv(x.numel(), BLOCK),)](
                x, delta, y, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False
            )
    return y
