"""What happened in a run: formats and skips per block and evaluation, bits, bytes.

average_activation_bits   = Σ bits·MACs / Σ MACs over the block linears that ran
effective_activation_bits = the same with skipped blocks' linears in the denominator at 0 bits
skipped_fraction          = skipped / all (block, evaluation, stream)
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from .formats import FORMATS
from .layout import BlockLayout

SKIPPED = "skipped"
CODES = {"nvfp4": "4", "int8": "8", "bf16": "b", SKIPPED: "-"}
NOT_RUN = "."


@dataclass(frozen=True)
class RunReport:
    """A run's record, free of tensors. Ratios are None where nothing ran.

    Attributes:
        router: the one that ran, None where linears were left alone.
        note: one line to show, e.g. why the router is not the one that was asked for; else None.
        cache: the skip policy and its settings, None without the cache.
        evaluations, blocks, streams: counts; `streams` is the largest number seen in one evaluation.
        progress: share of sampling done at each evaluation.
        bits_by_evaluation: average bits of what ran in each, None where every block was skipped.
        effective_bits_by_evaluation: the same with skipped linears at 0 bits.
        cache_bytes: most that the delta cache held.
        mac_share: linear kind -> its share of all MACs of the block linears.
        choices: linear kind -> one text per block, one letter per evaluation, see `legend`.
        legend: letter -> format name, "skipped" or "not run".
    """

    router: str | None
    note: str | None
    cache: Mapping[str, object] | None
    evaluations: int
    blocks: int
    streams: int
    progress: tuple[float, ...]
    average_activation_bits: float | None
    effective_activation_bits: float | None
    skipped_fraction: float | None
    bits_by_evaluation: tuple[float | None, ...]
    effective_bits_by_evaluation: tuple[float | None, ...]
    cache_bytes: int
    mac_share: Mapping[str, float]
    choices: Mapping[str, tuple[str, ...]]
    legend: Mapping[str, str]

    def to_dict(self) -> dict:
        """Plain dicts and lists, ready for JSON."""
        return asdict(self)


class Ledger:
    """Counts what runs, as it runs. All host arithmetic."""

    def __init__(self, layout: BlockLayout) -> None:
        self._layout = layout
        self.reset()

    def reset(self) -> None:
        """Forget everything. The only place that names the fields."""
        self.progress: list[float] = []
        self._choices: list[dict[tuple[int, str], str]] = []  # per evaluation: (block, kind) -> format
        self._macs: list[dict[str, int]] = []  # per evaluation: format, or "skipped" -> MACs
        self._computed = 0  # (block, evaluation, stream)
        self._skipped = 0
        self._streams = 0

    def begin_evaluation(self, progress: float) -> None:
        """Start the next evaluation."""
        self.progress.append(progress)
        self._choices.append({})
        self._macs.append({})

    def saw_streams(self, count: int) -> None:
        """Note how many streams the present evaluation has so far."""
        self._streams = max(self._streams, count)

    def ran(self, block: int, kind: str, format_name: str, rows: int) -> None:
        """A linear ran on `rows` tokens. A block that also answered by its residual stays "skipped"."""
        self._choices[-1].setdefault((block, kind), format_name)
        self._add(format_name, self._layout.macs(block, kind) * rows)

    def ran_untouched(self, block: int, rows: int) -> None:
        """All linears of a block ran in the model's own precision."""
        for kind in self._layout.names:
            self.ran(block, kind, "bf16", rows)

    def computed(self, streams: int) -> None:
        """A block ran for that many streams."""
        self._computed += streams

    def skipped(self, block: int, streams: int, rows: int) -> None:
        """A block was skipped for that many streams, of `rows` tokens together."""
        self._skipped += streams
        for kind in self._layout.names:
            self._choices[-1][block, kind] = SKIPPED
            self._add(SKIPPED, self._layout.macs(block, kind) * rows)

    def report(
        self, router: str | None, note: str | None, cache: Mapping[str, object] | None, cache_bytes: int
    ) -> RunReport:
        """The record so far."""
        total: dict[str, int] = {}
        for macs in self._macs:
            for name, count in macs.items():
                total[name] = total.get(name, 0) + count
        calls = self._computed + self._skipped
        return RunReport(
            router=router,
            note=note,
            cache=cache,
            evaluations=len(self.progress),
            blocks=self._layout.blocks,
            streams=self._streams,
            progress=tuple(self.progress),
            average_activation_bits=_bits(total, effective=False),
            effective_activation_bits=_bits(total, effective=True),
            skipped_fraction=self._skipped / calls if calls else None,
            bits_by_evaluation=tuple(_bits(macs, effective=False) for macs in self._macs),
            effective_bits_by_evaluation=tuple(_bits(macs, effective=True) for macs in self._macs),
            cache_bytes=cache_bytes,
            mac_share=self._layout.mac_share(),
            choices={kind: self._texts(kind) for kind in self._layout.names},
            legend={**{code: name for name, code in CODES.items()}, NOT_RUN: "not run"},
        )

    def _add(self, name: str, macs: int) -> None:
        self._macs[-1][name] = self._macs[-1].get(name, 0) + macs

    def _texts(self, kind: str) -> tuple[str, ...]:
        return tuple(
            "".join(CODES.get(c.get((block, kind), ""), NOT_RUN) for c in self._choices)
            for block in range(self._layout.blocks)
        )


def _bits(macs: Mapping[str, int], effective: bool) -> float | None:
    """MAC-weighted mean bits, `effective` with skipped MACs at 0 bits."""
    ran = {name: count for name, count in macs.items() if name != SKIPPED}
    weight = sum(macs.values()) if effective else sum(ran.values())
    return sum(FORMATS[name].bits * count for name, count in ran.items()) / weight if weight else None
