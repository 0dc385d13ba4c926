"""Twins of the linears in plain PyTorch, for a GPU without Triton: the reference's numbers by fast products.

    int8_linear    (q C^T) * row_scale * channel_scale + bias,  C the weight cast to INT8
    linear_w4a16   x W^T + b,  W decoded, rotated back and rounded to the type of x

Whole numbers up to 127 are exact in each type that q C^T is computed in: its ways differ in the sums only.

    kitchen   comfy-kitchen's int8_linear. It quantizes by rows what is quantized already: the largest value
              of a row is 127 (or all are 0), so its scale is 1 and its integers are ours. Scales and bias
              are applied here, in float32.
    int_mm    torch._int_mm, int32 sums, exact.
    half      a product in the type of the run, both sides divided by 128: at most K in size, so that float16
              holds it. Its sums are rounded to that type once.

`int8_product` chooses. The weights are decoded by `decode_torch`; the passes around are `rows_torch`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from .cast import cast_nvfp4_to_int8, check_cast
from .decode_torch import cast_weight, decode_weight
from .linear import beside, check_int8_linear, check_linear, int8_linear, linear_w4a16

HALVES = (torch.float16, torch.bfloat16)
OLDEST_KITCHEN = (7, 5)
# GPUs on which torch._int_mm is taken: their consumer cards have four INT8 operations for one of bf16. At two
# for one (sm_80, 90 and 100) the int32 sums, written and read again, take back what the product gains. An
# estimate, not measured: `benchmarks/kernels.py` times all three ways.
INT_MM_PAYS = {(8, 6), (8, 9), (12, 0)}
LEAST_ROWS = 17  # of torch._int_mm; its other sides are multiples of 8
VALUES = 1 << 26  # of an operand or a result at a time: four bytes each
SPOKEN = {
    "kitchen": "INT8 products by comfy-kitchen",
    "int_mm": "INT8 products by torch._int_mm",
    "half": "INT8 values multiplied in 16 bits",
}


def _kitchen(q: torch.Tensor, channels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    import comfy_kitchen

    one = torch.ones((), dtype=torch.float32, device=q.device)
    return comfy_kitchen.int8_linear(q.half(), channels, one, None, torch.float32)


def _int_mm(q: torch.Tensor, channels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch._int_mm(q, channels.t())


def _half(q: torch.Tensor, channels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    small = torch.nn.functional.linear(q.to(dtype).div_(128), channels.to(dtype).div_(128))
    return small.float() * 128**2


# Name -> (q (M, K) int8, channels (N, K) int8, type of the run) -> q channels^T (M, N), of any type.
PRODUCTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]] = {
    "kitchen": _kitchen,
    "int_mm": _int_mm,
    "half": _half,
}


def int8_product(x: torch.Tensor) -> str | None:
    """Which of `PRODUCTS` the device of `x` takes where Triton does not run; None on the CPU and on AMD."""
    return _product_of(x.device.index) if x.is_cuda and torch.version.hip is None else None


@cache
def _product_of(device: int) -> str:
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST_KITCHEN and kitchen_multiplies():
        return "kitchen"
    return "int_mm" if capability in INT_MM_PAYS else "half"


def kitchen_multiplies(backend: str = "cuda") -> bool:
    """Whether comfy-kitchen is installed and this backend of it, at work, has an INT8 linear."""
    try:
        import comfy_kitchen
    except (ImportError, OSError):
        return False
    found = comfy_kitchen.list_backends().get(backend, {})
    return (
        found.get("available", False)
        and not found.get("disabled", True)
        and "int8_linear" in found.get("capabilities", ())
    )


def _takes(name: str) -> Callable[..., bool]:
    """Where `int8_linear` is computed by this product."""

    def when(
        q: torch.Tensor,
        row_scale: torch.Tensor,
        channels: torch.Tensor,
        channel_scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> bool:
        if int8_product(q) != name:
            return False
        if name == "half":
            return dtype in HALVES
        return q.shape[0] >= LEAST_ROWS and channels.shape[0] % 8 == 0 and q.shape[1] % 8 == 0

    return when


def _register(name: str) -> None:
    @int8_linear.register(name, when=_takes(name))
    def int8_linear_torch(
        q: torch.Tensor,
        row_scale: torch.Tensor,
        channels: torch.Tensor,
        channel_scale: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        check_int8_linear(q, row_scale, channels, channel_scale, bias)
        by_channel = channel_scale.T
        y = torch.empty((q.shape[0], channels.shape[0]), dtype=dtype, device=q.device)
        # Pieces alike but for one row: no rest that is shorter than torch._int_mm takes.
        pieces = max(1, -(-max(q.numel(), y.numel()) // VALUES))
        for part, rows, out in zip(*(t.tensor_split(pieces) for t in (q, row_scale, y)), strict=True):
            sums = PRODUCTS[name](part.contiguous(), channels, dtype).float().mul_(rows).mul_(by_channel)
            out.copy_(sums if bias is None else sums.add_(bias.float()))
        return y


for _name in PRODUCTS:
    _register(_name)


def _lacks_triton(data: torch.Tensor, *args: object, **kwargs: object) -> bool:
    return int8_product(data) is not None


@cast_nvfp4_to_int8.register("half", when=_lacks_triton)
def cast_nvfp4_to_int8_half(
    data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    check_cast(data, scale, global_scale, out)
    return cast_weight(data, scale, global_scale, out)


def has_half(x: torch.Tensor, *args: object, **kwargs: object) -> bool:
    """The `when` of 16-bit twins."""
    return int8_product(x) is not None and x.dtype in HALVES


@linear_w4a16.register("half", when=has_half)
def linear_w4a16_half(
    x: torch.Tensor,
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    hadamard: int = 0,
) -> torch.Tensor:
    check_linear("linear_w4a16", x, data, scale, global_scale, bias, hadamard)
    data, scale = beside(x, data, scale)
    weight = decode_weight(data, scale, global_scale, x.dtype, hadamard)
    return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def status() -> str | None:
    """One clause about the current GPU's INT8 products without Triton; None where the references serve."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return SPOKEN[_product_of(torch.cuda.current_device())]
