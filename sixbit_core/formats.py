"""Activation formats of a linear over an NVFP4 weight: FORMATS, name -> (bits, function).

Add a format by adding one record; the routers, the report and its picture know it by its name.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..kernels import linear_w4a4, linear_w4a8, linear_w4a16
from .quantized import QuantizedWeight

KernelLinear = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Format:
    """An activation format.

    Attributes:
        name: its key in `FORMATS`.
        bits: bits of one activation value (block scales not counted, as in the paper).
        kernel: op (x [M, K], data, scale, global_scale, bias, hadamard) -> [M, N] in x.dtype.
    """

    name: str
    bits: int
    kernel: KernelLinear

    def linear(
        self, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`x` [M, K] times the weight, plus `bias` [N]: [M, N] in x.dtype."""
        return self.kernel(x, weight.data, weight.scale, weight.global_scale, bias, weight.hadamard)


FORMATS: dict[str, Format] = {
    "nvfp4": Format("nvfp4", 4, linear_w4a4),
    "int8": Format("int8", 8, linear_w4a8),
    "bf16": Format("bf16", 16, linear_w4a16),
}
