"""A calibration run: what rounding activations costs each linear, evaluation by evaluation.

In a W4A8 run without cache, per linear and evaluation t, with Ŵ the decoded weight, Q₄ and Q₈ activations
rounded to NVFP4 and INT8 (rotated where the weight is), and W the full-precision weight:

    excess e = (‖XŴᵀ − Q₄(X)Ŵᵀ‖₂ − ‖XŴᵀ − Q₈(X)Ŵᵀ‖₂) / ‖XŴᵀ‖₂        ours
    paper  E = ‖XWᵀ − Q₄(XH)·Q₄(WH)ᵀ‖₂ / ‖XWᵀ‖₂                        6Bit-Diffusion (arXiv 2603.18742)

E holds the weight's error too, which both routes share. Streams are measured apart and the worst counts,
as it does when a run decides. `calibrate` fits a predictor to the records.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..kernels import block_hadamard, dequantize_nvfp4, hadamard_quantize_int8, hadamard_quantize_nvfp4
from .config import DMPQConfig
from .layout import BlockLayout, Stream, linear_name
from .observe import Observer
from .plan import INPUT_OF
from .quantized import QuantizedWeight
from .run import Pair, RunState

FullWeight = Callable[[int, str], torch.Tensor]
SAMPLED_ROWS = 256
INPUT_ROWS = 4  # of a linear's input, kept in an evaluation
_GOLDEN = 0.6180339887  # of a gap: turns of it fill the gap evenly, however many there are
_TINY = 1e-30


@dataclass(frozen=True)
class LinearRecord:
    """One linear in one evaluation of a calibration run; errors and ratio of the worst stream.

    Attributes:
        gamma: Γ of its block one evaluation earlier, None in the first.
        excess, error_nvfp4, error_int8: relative output errors; `paper` is None without full weights.
        ratio: outlier ratio of its input.
    """

    block: int
    kind: str
    progress: float
    gamma: float | None
    excess: float
    error_nvfp4: float
    error_int8: float
    paper: float | None
    ratio: float


@dataclass(frozen=True)
class BlockRecord:
    """One block in one evaluation of a calibration run.

    Attributes:
        gamma: Γ of the worst stream.
        growth: ‖Δ(t)‖₂ / ‖Δ(t−1)‖₂ over the video tokens, mean of the streams; None in the first.
    """

    block: int
    progress: float
    gamma: float
    growth: float | None


class CalibrationRun(RunState):
    """A W4A8 run that also records errors and residuals: `records` and `blocks` hold them after `finish`.

    Args:
        layout: the model's block linears.
        full_weight: (block, kind) -> (N, K) weight before quantization, for the paper's error; or None.
        rows: tokens of each stream that errors are measured on, evenly spaced.
        inputs: where to keep sample inputs, `INPUT_ROWS` an evaluation by native linear name; or None.
    """

    def __init__(
        self,
        layout: BlockLayout,
        full_weight: FullWeight | None = None,
        rows: int = SAMPLED_ROWS,
        inputs: dict[str, list[torch.Tensor]] | None = None,
    ) -> None:
        self._full_weight, self._sampled_rows, self._inputs = full_weight, rows, inputs
        super().__init__(layout, DMPQConfig(router="int8"))
        self._watch_outliers = True

    def reset(self) -> None:
        """Back to before the first evaluation."""
        super().reset()
        self.records: list[LinearRecord] = []
        self.blocks: list[BlockRecord] = []
        self._sizes: dict[tuple[int, Stream], float] = {}
        self._errors = Observer()

    def linear(
        self,
        block_index: int,
        kind: str,
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """As `RunState.linear`, in INT8, with the errors of both formats recorded."""
        y = super().linear(block_index, kind, x, weight, bias)
        full = None if self._full_weight is None else self._full_weight(block_index, kind)
        if self._inputs is not None and kind not in INPUT_OF:
            kept = evenly_spaced(x.flatten(0, 1), INPUT_ROWS, self.evaluation).cpu()
            self._inputs.setdefault(linear_name(block_index, kind), []).append(kept)
        for stream in x:
            errors = format_errors(evenly_spaced(stream, self._sampled_rows), weight, full)
            self._errors.record((block_index, kind), errors)
        return y

    def close(self) -> None:
        """Free every tensor; records stay."""
        super().close()
        self._errors.reset()

    def _observe(self, block: int, rows: Sequence[int], inp: Pair, out: Pair) -> None:
        super()._observe(block, rows, inp, out)
        sizes = torch.linalg.vector_norm(out[0] - inp[0], dim=(1, 2), dtype=torch.float32)
        for row in rows:
            self._errors.record((block, self._streams[row]), sizes[row])

    def _learn(self) -> None:
        if self._learnt == self.evaluation:
            return
        worst: dict[tuple[int, str], list[float]] = {}
        sizes: dict[tuple[int, Stream], float] = {}
        for (block, what), values in self._errors.read():
            if isinstance(what, tuple):
                sizes[block, what] = values[0]
                continue
            before = worst.get((block, what), values)
            worst[block, what] = [max(pair) for pair in zip(values, before, strict=True)]
        gammas = [memory.gamma for memory in self._memory]
        super()._learn()
        for (block, kind), (excess, error_nvfp4, error_int8, *paper) in worst.items():
            self.records.append(
                LinearRecord(
                    block=block,
                    kind=kind,
                    progress=self._moment.progress,
                    gamma=gammas[block],
                    excess=excess,
                    error_nvfp4=error_nvfp4,
                    error_int8=error_int8,
                    paper=paper[0] if paper else None,
                    ratio=self._memory[block].ratios[INPUT_OF.get(kind, kind)],
                )
            )
        for block, memory in enumerate(self._memory):
            grown = [
                size / max(self._sizes[block, stream], _TINY)
                for (index, stream), size in sizes.items()
                if index == block and (block, stream) in self._sizes
            ]
            growth = sum(grown) / len(grown) if grown else None
            self.blocks.append(BlockRecord(block, self._moment.progress, memory.gamma, growth))
        self._sizes = sizes


def format_errors(x: torch.Tensor, weight: QuantizedWeight, full: torch.Tensor | None) -> torch.Tensor:
    """Output errors of a linear by activation format, see the module's formulas.

    Args:
        x: (M, K) input rows.
        weight: (N, K) NVFP4.
        full: (N, K) weight before quantization, or None.

    Returns:
        (3,) or with `full` (4,) float32 on the device: excess, NVFP4 error, INT8 error, paper's error.
    """
    decoded = dequantize_nvfp4(weight.data, weight.scale, weight.global_scale)
    rotated = block_hadamard(x.float(), weight.hadamard)
    q, scale = hadamard_quantize_int8(x, weight.hadamard)
    rounded = dequantize_nvfp4(*hadamard_quantize_nvfp4(x, weight.hadamard))
    exact = (rotated @ decoded.T).norm().clamp(min=_TINY)
    error_nvfp4 = ((rotated - rounded) @ decoded.T).norm() / exact
    error_int8 = ((rotated - q * scale) @ decoded.T).norm() / exact
    errors = [error_nvfp4 - error_int8, error_nvfp4, error_int8]
    if full is not None:
        y = x.float() @ full.float().T
        errors.append((y - rounded @ decoded.T).norm() / y.norm().clamp(min=_TINY))
    return torch.stack(errors)


def evenly_spaced(x: torch.Tensor, rows: int, turn: int = 0) -> torch.Tensor:
    """At most `rows` rows of `x` (N, K), evenly spaced, other ones at each `turn`; always the same ones."""
    if x.shape[0] <= rows:
        return x
    first = int(turn * _GOLDEN * x.shape[0] / rows)
    return x[(torch.arange(rows, device=x.device) * x.shape[0] // rows + first) % x.shape[0]]
