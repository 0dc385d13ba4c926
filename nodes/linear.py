"""A Linear of the host whose weight is NVFP4: the host moves and patches it, the core multiplies."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import comfy.ops
import torch
from torch import nn

from ..sixbit_core.linear import mixed_linear
from ..sixbit_core.quantized import QuantizedWeight
from .packed import pack, packed_size, requantize, unpack

Branch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Product = Callable[[torch.Tensor, QuantizedWeight, torch.Tensor | None], torch.Tensor]


@contextmanager
def lent(
    module: nn.Module, x: torch.Tensor, dtype: torch.dtype, beside_others: bool = False
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Weight and bias of a module of the host where `x` is, for as long as the block lasts.

    Args:
        dtype: of the weight; a bias takes that of `x`.
        beside_others: more are lent before this block ends. Weights that the host streams in all pass through
            the same memory, so they are copied out of it.
    """
    weight, bias, stream = comfy.ops.cast_bias_weight(
        module, x, dtype=dtype, bias_dtype=x.dtype, offloadable=True
    )
    if beside_others and stream is not None and stream[0] is not None:
        copies = weight.clone(), None if bias is None else bias.clone()
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)
        yield copies
        return
    try:
        yield weight, bias
    finally:
        comfy.ops.uncast_bias_weight(module, weight, bias, stream)


class QuantizedLinear(nn.Module, comfy.ops.CastWeightBiasOp):
    """Stands where the host's Linear stood; by itself it computes with activations as they come (W4A16).

    `weight` is one packed uint8 tensor (see `packed`), so offload and size accounting work as for any Linear.
    A LoRA of the host's own loader is added to the decoded weight, which is then quantized again. A call of
    the model may set two things on an instance and take them away after: `product`, how a run multiplies
    (`swap`), and `branch`, (x, y) -> y and what a LoRA of ours adds (`branches`). `forward` itself is left to
    others who wrap it.
    """

    comfy_cast_weights = True
    product: Product = staticmethod(partial(mixed_linear, format_name="bf16"))
    branch: Branch | None = None

    def __init__(
        self, out_features: int, in_features: int, hadamard: int, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        self.out_features, self.in_features, self.hadamard = out_features, in_features, hadamard
        size = packed_size(out_features, in_features)
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        self.weight_function: list[Callable] = []
        self.bias_function: list[Callable] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (..., in_features) to (..., out_features), same dtype."""
        with self.cast(x) as (weight, bias):
            y = self.product(x, weight, bias)
        return y if self.branch is None else self.branch(x, y)

    @contextmanager
    def cast(
        self, x: torch.Tensor, beside_others: bool = False
    ) -> Iterator[tuple[QuantizedWeight, torch.Tensor | None]]:
        """Weight, with the host's patches, and bias where `x` is, as `lent` gives them."""
        comfy.ops.run_every_op()
        if getattr(self, "weight_lowvram_function", None) is not None:
            raise RuntimeError(
                "a stock LoRA on a 6-bit model needs ComfyUI started with --disable-dynamic-vram"
            )
        with ExitStack() as held:
            changes, self.weight_function = self.weight_function, []
            try:
                packed, bias = held.enter_context(lent(self, x, torch.uint8, beside_others))
            finally:
                self.weight_function = changes
            weight = self._unpacked(packed)
            if changes:
                dense = weight.dequantize(torch.float32)
                for change in changes:
                    dense = change(dense)
                weight = requantize(dense, self.hadamard)
            yield weight, bias

    def convert_weight(self, weight: torch.Tensor, **_: object) -> torch.Tensor:
        """For the host's patches: the decoded weight (N, K) float32 of a packed one, in any type."""
        return self._unpacked(weight.to(torch.uint8)).dequantize(torch.float32)

    def set_weight(
        self,
        weight: torch.Tensor,
        inplace_update: bool = False,
        seed: int | None = None,
        return_weight: bool = False,
        **_: object,
    ) -> torch.Tensor | None:
        """For the host's patches: take a decoded, changed weight (N, K). `seed` is not used: no dither."""
        packed = pack(requantize(weight, self.hadamard))
        if return_weight:
            return packed
        if inplace_update:
            self.weight.data.copy_(packed)
        else:
            self.weight = nn.Parameter(packed, requires_grad=False)
        return None

    def _unpacked(self, packed: torch.Tensor) -> QuantizedWeight:
        return unpack(packed, self.out_features, self.in_features, self.hadamard)
