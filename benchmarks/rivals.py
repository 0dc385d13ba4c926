"""Linears of other papers, as runs that take the place of the pack's.

    y = Q_a(x') · Q_w(W')ᵀ + bias

    uniform       x' = x, W' = W
    SmoothQuant   x' = x / s, W' = W · s, s = max|x|^α / max|W|^(1−α) of each input channel, α = 0.5,
                  max|W| over q, k and v together            Xiao et al. 2022, arXiv 2211.10438
    QuaRot        x' = x R, W' = W R, R random signs, then Hadamard blocks of the largest power of two that
                  divides K                                  Ashkboos et al. 2024, arXiv 2404.00456
    ViDiT-Q       static-dynamic channel balancing: x' = (x / s) R, W' = (W · s) R, SmoothQuant's s of each
                  linear by itself                           Zhao et al. 2024, arXiv 2406.02540

Activations are INT8 or NVFP4, one scale a row, measured as they come. Weights are NVFP4 with the pack's
rounding for all, its scales and by its moments of the inputs as a paper moves them; or as the papers have
them: INT4, symmetric, one scale a row, rounded to nearest. What is left out of the papers: QuaRot's GPTQ and
its rotations inside attention, ViDiT-Q's mixed precision. max|x| is that of the sample inputs of a
calibration. Rounding is emulated in float32: this measures quality alone.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from parts import Bench
from sixbit_diffusion.engine.calibrate import full_weights
from sixbit_diffusion.engine.settings import RunSettings
from sixbit_diffusion.kernels import dequantize_nvfp4, quantize_int8, quantize_nvfp4
from sixbit_diffusion.sixbit_core.config import DMPQConfig
from sixbit_diffusion.sixbit_core.gptq import moment_factor, round_by_inputs
from sixbit_diffusion.sixbit_core.input_moments import linear_moments
from sixbit_diffusion.sixbit_core.layout import BlockLayout, linear_name
from sixbit_diffusion.sixbit_core.plan import INPUT_OF
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight
from sixbit_diffusion.sixbit_core.run import RunState
from sixbit_diffusion.sixbit_core.time_embedding import time_inputs

ALPHA = 0.5
_SMALLEST = 1e-5  # of a channel's maximum, as in SmoothQuant's code
Maxima = Callable[[str], torch.Tensor]  # native name of a linear -> (K,) max|x| of its input
Moments = Callable[[str], torch.Tensor | None]  # the same -> `linear_moments`


@dataclass(frozen=True)
class Recipe:
    """A paper's linears.

    Attributes:
        activations: "int8" or "nvfp4".
        smooth: scale channels; `shares`: q, k and v by one scale.
        rotate: rotate channels.
        own_weights: INT4 rows in place of NVFP4.
    """

    activations: str = "int8"
    smooth: bool = False
    shares: bool = False
    rotate: bool = False
    own_weights: bool = False


PAPERS = {
    "uniform w4a4": Recipe("nvfp4"),
    "uniform w4a8": Recipe(),
    "smoothquant": Recipe(smooth=True, shares=True),
    "quarot": Recipe(rotate=True),
    "vidit-q": Recipe(smooth=True, rotate=True),
}
OWN = {f"{name}, int4 weights": replace(recipe, own_weights=True) for name, recipe in PAPERS.items()}
RECIPES = PAPERS | {name: recipe for name, recipe in OWN.items() if recipe.activations == "int8"}


@dataclass(frozen=True, eq=False)
class RivalLinear:
    """One linear: what its input is divided by (K,) and then multiplied by (K, K), and its weight (N, K)."""

    scale: torch.Tensor | None
    rotation: torch.Tensor | None
    weight: torch.Tensor
    activations: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(M, K) to (M, N) float32, without the bias."""
        x = moved(x.float(), self.scale, self.rotation)
        return ROUNDINGS[self.activations](x) @ self.weight.T


class RivalRun(RunState):
    """A run whose linears are a rival's."""

    def __init__(self, layout: BlockLayout, activations: str, linears: Mapping[str, RivalLinear]) -> None:
        super().__init__(layout, DMPQConfig(router=activations, purified_refresh=False))
        self._linears = linears

    def linear(
        self, block_index: int, kind: str, x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """See `RunState.linear`; `weight` is not used."""
        self.ran(block_index, (kind,), x.shape[1], None)
        y = self._linears[linear_name(block_index, kind)](x.flatten(0, 1))
        y = y if bias is None else y + bias.float()
        return y.view(*x.shape[:-1], -1).to(x.dtype)


@dataclass
class MakeRival:
    """Makes a rival's run; its linears are made once a process."""

    recipe: Recipe
    maxima: Maxima = field(repr=False)
    _linears: dict[str, RivalLinear] = field(default_factory=dict, repr=False)

    def __call__(self, bench: Bench, settings: RunSettings) -> RivalRun:
        layout = bench.model.layout
        if not self._linears:
            checkpoint = bench.model.facts.checkpoint
            embedded = time_inputs(checkpoint).to(bench.model.device)
            self._linears = make_linears(
                self.recipe,
                layout,
                full_weights(bench.model),
                self.maxima,
                lambda name: linear_moments(checkpoint, name, embedded),
            )
        return RivalRun(layout, self.recipe.activations, self._linears)


def make_linears(
    recipe: Recipe,
    layout: BlockLayout,
    weight: Callable[[int, str], torch.Tensor],
    maxima: Maxima,
    moments: Moments,
) -> dict[str, RivalLinear]:
    """All linears of a model under a recipe, by native name.

    Args:
        weight: (block, kind) -> full-precision weight (N, K).
        maxima: of the inputs; asked only where the recipe scales.
        moments: of the inputs; asked only where weights are NVFP4.
    """
    made = {}
    for name, block, kind in layout.linear_names():
        full = weight(block, kind).float()
        scale = rotation = None
        source = INPUT_OF.get(kind, kind)
        if recipe.smooth:
            together = [k for k in layout.names if INPUT_OF.get(k, k) == source] if recipe.shares else [kind]
            columns = [weight(block, k).float().abs().amax(0) for k in together]
            largest = maxima(linear_name(block, source)).to(full.device)
            scale = smooth_scale(largest, torch.stack(columns).amax(0))
        if recipe.rotate:
            rotation = rotation_matrix(full.shape[1]).to(full.device)
        turned = moved(full, None if scale is None else 1 / scale, rotation)
        if recipe.own_weights:
            rounded = int4_rows(turned)
        else:
            known = moments(linear_name(block, source))
            known = None if known is None else moved_moments(known.to(full.device), scale, rotation)
            rounded = nvfp4_weight(turned, known)
        made[name] = RivalLinear(scale, rotation, rounded, recipe.activations)
    return made


def smooth_scale(inputs: torch.Tensor, weights: torch.Tensor, alpha: float = ALPHA) -> torch.Tensor:
    """SmoothQuant's s of each channel from max|x| and max|W|, (K,) each."""
    return inputs.clamp(min=_SMALLEST) ** alpha / weights.clamp(min=_SMALLEST) ** (1 - alpha)


def rotation_matrix(size: int, seed: int = 0) -> torch.Tensor:
    """(K, K) orthogonal: random signs, then Hadamard blocks of the largest power of two that divides K."""
    block = size & -size
    hadamard = torch.ones(1, 1)
    while hadamard.shape[0] < block:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (size,), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
    return signs[:, None] * torch.block_diag(*[hadamard / block**0.5] * (size // block))


def moved(x: torch.Tensor, scale: torch.Tensor | None, rotation: torch.Tensor | None) -> torch.Tensor:
    """Rows (M, K) divided by `scale` and rotated."""
    x = x if scale is None else x / scale
    return x if rotation is None else x @ rotation


def int4_rows(weight: torch.Tensor) -> torch.Tensor:
    """Rounded to INT4, -7 to 7 times max/7 of each row."""
    step = (weight.abs().amax(1, keepdim=True) / 7).clamp(min=1e-12)
    return (weight / step).round().clamp(-7, 7) * step


def nvfp4_weight(weight: torch.Tensor, moments: torch.Tensor | None) -> torch.Tensor:
    """Rounded to NVFP4 as the pack's own weights are, by moments (G, B, B) of what it multiplies."""
    data, scale, global_scale = quantize_nvfp4(weight, "search")
    if moments is not None:
        data = round_by_inputs(weight, scale, global_scale, moment_factor(moments))
    return dequantize_nvfp4(data, scale, global_scale)


def moved_moments(
    moments: torch.Tensor, scale: torch.Tensor | None, rotation: torch.Tensor | None
) -> torch.Tensor:
    """Diagonal blocks (G, B, B) of E[xxᵀ], of x as `moved`; larger ones where the rotation's are."""
    whole = torch.block_diag(*moments)
    whole = moved(moved(whole, scale, rotation).T, scale, rotation)
    columns = len(whole)
    size = moments.shape[1] if rotation is None else max(moments.shape[1], columns & -columns)
    return torch.stack([whole[n : n + size, n : n + size] for n in range(0, columns, size)])


def int8_rows(x: torch.Tensor) -> torch.Tensor:
    """Rounded to INT8, one scale a row."""
    q, scale = quantize_int8(x)
    return q * scale


def nvfp4_rows(x: torch.Tensor) -> torch.Tensor:
    """Rounded to NVFP4, one global scale a row."""
    return dequantize_nvfp4(*quantize_nvfp4(x, per_row=True))


ROUNDINGS = {"int8": int8_rows, "nvfp4": nvfp4_rows}
