"""Quantize the weights of Linears to NVFP4: what is asked for, and one group of layers.

    W' = H(W),   global_scale = max|W'| / (448·6) over all W' of the group,   (data, scale) = NVFP4(W')

Block scales are found by least squared error (method "search") or by rounding to nearest ("rtn"). Where
the second moments of the inputs are known, "search" rounds the values by them; "gptq" has the same scales
and rounds by sample inputs. A group is what reads one input: q, k and v of a block share rotation and
global scale, so that they can run as one product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..kernels import block_hadamard, hadamard_block_size, linear_w4a8, quantize_nvfp4
from .gptq import input_factor, moment_factor, round_by_inputs
from .quantized import QuantizedWeight

METHODS = {
    "search": "search",
    "rtn": "nearest",
}  # need no data: what people ask for -> rounding of the kernel
GPTQ = "gptq"
ROTATIONS = ("auto", "on", "off")
_GLOBAL_RANGE = 448.0 * 6.0  # largest E4M3 scale times largest E2M1 value
_SMALLEST_SCALE = 2.0**-126


@dataclass(frozen=True)
class QuantizeConfig:
    """How a checkpoint is quantized.

    Attributes:
        method: "search" tries eight scales a block and rounds by moments of the inputs, where they are
            known; "rtn" takes the nearest; "gptq" rounds to the scales of "search" by sample inputs.
        rotation: "on" and "off" for all block Linears; "auto" chooses by the output error of a
            W4A8 Linear where sample inputs are given, and rotates where none are.
        compatible: nothing rotated, so that a host which knows plain NVFP4 reads the file.
        force: replace an existing target.
        calibrated: sample inputs of every layer will be given, without which there is no "gptq".
    """

    method: str = "search"
    rotation: str = "auto"
    compatible: bool = False
    force: bool = False
    calibrated: bool = False

    def __post_init__(self) -> None:
        if self.method not in (*METHODS, GPTQ):
            raise ValueError(f"method must be one of {', '.join((*METHODS, GPTQ))}, got {self.method!r}")
        if self.method == GPTQ and not self.calibrated:
            raise ValueError(
                "without sample inputs gptq is not available; use search, or write them with "
                "`sixbit calibrate --inputs DIR` and give --calibration DIR"
            )
        if self.rotation not in ROTATIONS:
            raise ValueError(f"rotation must be one of {', '.join(ROTATIONS)}, got {self.rotation!r}")
        if self.compatible and self.rotation == "on":
            raise ValueError("a compatible file holds no rotated layer; leave rotation at auto or off")

    @property
    def rotates(self) -> bool:
        """Whether block Linears may be rotated at all."""
        return self.rotation != "off" and not self.compatible


def quantize_linear(
    weight: torch.Tensor,
    config: QuantizeConfig,
    shared_global: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Quantize the weight of one Linear.

    Args:
        weight: (N, K) float16, bfloat16 or float32, finite; K a multiple of 16.
        shared_global: float32 () global scale to use instead of the weight's own (as rotated).
        inputs: (n, K) sample inputs, for rotation "auto" and for "gptq", which needs them.

    Raises:
        ValueError: wrong type, rank or K, values whose rotation overflows float32, no inputs for "gptq".
    """
    return quantize_group([weight], config, shared_global, inputs)[0]


def quantize_group(
    weights: Sequence[torch.Tensor],
    config: QuantizeConfig,
    shared_global: torch.Tensor | None = None,
    inputs: torch.Tensor | None = None,
    moments: torch.Tensor | None = None,
) -> list[QuantizedWeight]:
    """Quantize Linears that read one input: one global scale and one rotation for all.

    Args:
        weights: each (N, K), one K.
        config, shared_global, inputs: as in `quantize_linear`.
        moments: (K/B, B, B) float32 diagonal blocks of E[xxᵀ] of the input, B a multiple of the rotation's
            block, that "search" rounds by; None to round to nearest. No other method reads them.

    Raises:
        ValueError: as `quantize_linear`, and moments that are not finite.
    """
    if inputs is not None:
        inputs = inputs.to(weights[0].device, torch.float32)

    def made(size: int) -> list[QuantizedWeight]:
        group = _encoded(weights, size, config, shared_global)
        if config.method == GPTQ:
            return _rounded_by_inputs(weights, group, inputs)
        if config.method == "search" and moments is not None:
            return _rounded(weights, group, moment_factor(_turned_moments(moments, size)))
        return group

    size = hadamard_block_size(weights[0].shape[1]) if config.rotates else 0
    if size > 1 and config.rotation == "auto" and inputs is not None:
        # As they will be: rounded to nearest, rotated outliers are worse; rounded by inputs, they are better.
        return min(made(size), made(0), key=lambda group: _w4a8_error(weights, group, inputs))
    return made(size)


def output_errors(
    weights: Sequence[torch.Tensor], group: Sequence[QuantizedWeight], inputs: torch.Tensor
) -> list[float]:
    """‖XWᵀ − XŴᵀ‖ / ‖XWᵀ‖ of each Linear of a group on inputs X (n, K); 0 where the output is."""
    inputs, errors = inputs.to(weights[0].device, torch.float32), []
    for weight, quantized in zip(weights, group, strict=True):
        exact = inputs @ weight.float().T
        error = (exact - inputs @ quantized.dequantize().T).norm()
        errors.append(float(error / exact.norm().clamp(min=_SMALLEST_SCALE)))
    return errors


def _rounded_by_inputs(
    weights: Sequence[torch.Tensor], group: Sequence[QuantizedWeight], inputs: torch.Tensor | None
) -> list[QuantizedWeight]:
    if inputs is None or inputs.shape[1] != group[0].in_features:
        found = "none" if inputs is None else f"{inputs.shape[1]} columns"
        raise ValueError(f"gptq needs sample inputs of {group[0].in_features} columns, got {found}")
    return _rounded(weights, group, input_factor(_turned(inputs, group[0].hadamard)))


def _rounded(
    weights: Sequence[torch.Tensor], group: Sequence[QuantizedWeight], factor: torch.Tensor
) -> list[QuantizedWeight]:
    """The group with its scales, the values rounded by a factor of inputs as they are rotated."""
    made = []
    for weight, scaled in zip(weights, group, strict=True):
        turned = _turned(weight, scaled.hadamard)
        made.append(replace(scaled, data=round_by_inputs(turned, scaled.scale, scaled.global_scale, factor)))
    return made


def _turned_moments(moments: torch.Tensor, size: int) -> torch.Tensor:
    """H R H of blocks R (G, B, B)."""
    return _turned(_turned(moments, size).mT, size)


def _turned(rows: torch.Tensor, size: int) -> torch.Tensor:
    return block_hadamard(rows.float(), size) if size > 1 else rows.float()


def _encoded(
    weights: Sequence[torch.Tensor], size: int, config: QuantizeConfig, shared_global: torch.Tensor | None
) -> list[QuantizedWeight]:
    turned = [_turned(w, size) for w in weights]
    if shared_global is None:
        amax = torch.stack([w.abs().amax() for w in turned]).amax()
        if not torch.isfinite(amax):
            raise ValueError("the weights are too large for float32 once rotated; check the source")
        shared_global = amax / torch.full_like(amax, _GLOBAL_RANGE)
        shared_global = torch.where(shared_global >= _SMALLEST_SCALE, shared_global, 1.0)
    codes = (
        quantize_nvfp4(w, METHODS.get(config.method, "search"), global_scale=shared_global) for w in turned
    )
    return [
        QuantizedWeight(data, scale, global_scale, *weight.shape, hadamard=size if size > 1 else 0)
        for weight, (data, scale, global_scale) in zip(weights, codes, strict=True)
    ]


def _w4a8_error(
    weights: Sequence[torch.Tensor], group: Sequence[QuantizedWeight], inputs: torch.Tensor
) -> float:
    """Squared error of the outputs of W4A8 Linears, summed over the group."""
    total = 0.0
    for weight, quantized in zip(weights, group, strict=True):
        exact = inputs @ weight.float().T
        args = (quantized.data, quantized.scale, quantized.global_scale)
        total += float((linear_w4a8(inputs, *args, hadamard=quantized.hadamard) - exact).square().sum())
    return total
