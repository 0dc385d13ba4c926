"""What a run costs: Σ MACs · weight bits · activation bits / 256, as a share of full precision's.

Everything that the transformer runs counts. Full precision is 16 x 16 bits, and so is attention in any run,
which is never quantized here. adaLN linears have 16-bit activations, what lies outside the blocks is 16 x
16; a skipped block counts 0 with its attention and its adaLN. Fetching, adding and rounding are not in it:
this is no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..sixbit_core.formats import FORMATS
from ..sixbit_core.report import NOT_RUN, SKIPPED, RunReport
from .facts import ModelFacts

FULL_BITS = 16


@dataclass(frozen=True)
class Macs:
    """Multiply-accumulates of one evaluation of one stream.

    Attributes:
        linears: of every block, by linear kind.
        attention: of one block, both products.
        modulation: of one block's adaLN linears.
        rest: outside the blocks.
    """

    linears: Sequence[Mapping[str, int]]
    attention: int
    modulation: int
    rest: int

    @property
    def total(self) -> int:
        """All of them."""
        blocks = len(self.linears) * (self.attention + self.modulation)
        return sum(sum(kinds.values()) for kinds in self.linears) + blocks + self.rest


def model_macs(facts: ModelFacts, size: tuple[int, int] | None = None, frames: int | None = None) -> Macs:
    """MACs of a clip of `size` (height, width in pixels) and `frames`; None for the model's own."""
    tokens, width = facts.tokens(size or facts.size, frames or facts.frames), facts.width
    config, layout, text = facts.config, facts.layout, facts.text_length
    video, time = tokens - text, config["time_embed_dim"]
    patch = config["patch_size"] ** 2 * (config.get("patch_size_t") or 1)
    rest = video * patch * width * (config["in_channels"] + config["out_channels"])
    rest += text * config["text_embed_dim"] * width
    rest += width * time + time * time + time * 2 * width  # time embedding, last norm
    linears = [{k: tokens * layout.macs(b, k) for k in layout.names} for b in range(layout.blocks)]
    return Macs(linears, 2 * tokens * tokens * width, 2 * time * 6 * width, rest)


def run_cost(macs: Macs, report: RunReport, weight_bits: int, evaluations: int) -> float:
    """Cost of a run.

    Args:
        macs: of the model.
        report: of the run.
        weight_bits: 4, or 16 in full precision.
        evaluations: that full precision makes.

    Returns:
        the share of full precision's cost.
    """
    bits: dict[str, Any] = {
        code: FORMATS[name].bits for code, name in report.legend.items() if name in FORMATS
    }
    idle = {code for code, name in report.legend.items() if name == SKIPPED} | {NOT_RUN}
    total = 0
    for now in range(report.evaluations):
        total += macs.rest * FULL_BITS * FULL_BITS
        for block, kinds in enumerate(macs.linears):
            chosen = {kind: report.choices[kind][block][now] for kind in kinds}
            if idle.intersection(chosen.values()):
                continue
            total += sum(kinds[kind] * weight_bits * bits[code] for kind, code in chosen.items())
            total += macs.attention * FULL_BITS * FULL_BITS + macs.modulation * weight_bits * FULL_BITS
    return total / (evaluations * macs.total * FULL_BITS * FULL_BITS)


def step_cache_cost(macs: Macs, answered: float) -> float:
    """Cost of a full-precision run whose share `answered` of the evaluations ran no block.

    What lies outside the blocks is counted as run.
    """
    return 1 - answered * (1 - macs.rest / macs.total)
