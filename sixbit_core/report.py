"""What happened in a run: formats and skips per block and evaluation, bits, bytes.

average_activation_bits   = Σ bits·MACs / Σ MACs over the block linears that ran
effective_activation_bits = the same with skipped blocks' linears in the denominator at 0 bits
skipped_fraction          = skipped / all (block, evaluation, stream)
seconds of an evaluation  = from its beginning to that of the next, of the last one to the end of the run

The clock is read when an evaluation begins and nowhere else, so nothing waits for a GPU inside one. On a GPU
the seconds are therefore those between the beginnings: single ones may lean on their neighbours, their sum is
that of the run.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise

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
        seconds_by_evaluation: see the module; two runs that decided alike are equal whatever they took.
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
    seconds_by_evaluation: tuple[float, ...] = field(default=(), compare=False)

    def to_dict(self) -> dict:
        """Plain dicts and lists, ready for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class RunMemory:
    """Bytes that a run took, beside what it would have taken in 16 bits. None where they were not counted.

    Attributes:
        weights: of the transformer; `weights_16_bit`, the same with every weight in 16 bits.
        peak: most that the device held while the run lasted.
        peak_16_bit: of the same run in full precision, where one was made.
        weights_on_device: whether all of them were there; else nothing follows for 16 bits.
    """

    weights: int
    weights_16_bit: int
    peak: int | None = None
    peak_16_bit: int | None = None
    weights_on_device: bool = True


class Ledger:
    """Counts what runs, as it runs. All host arithmetic.

    Args:
        clock: seconds, as `time.perf_counter`.
    """

    def __init__(self, layout: BlockLayout, clock: Callable[[], float] = time.perf_counter) -> None:
        self._layout, self._clock = layout, clock
        self.reset()

    def reset(self) -> None:
        """Forget everything. The only place that names the fields."""
        self.progress: list[float] = []
        self._begins: list[float] = []  # of each evaluation; one more when the run has ended
        self._choices: list[dict[tuple[int, str], str]] = []  # per evaluation: (block, kind) -> format
        self._macs: list[dict[str, int]] = []  # per evaluation: format, or "skipped" -> MACs
        self._computed = 0  # (block, evaluation, stream)
        self._skipped = 0
        self._streams = 0

    def begin_evaluation(self, progress: float) -> None:
        """Start the next evaluation."""
        self._begins.append(self._clock())
        self.progress.append(progress)
        self._choices.append({})
        self._macs.append({})

    def end(self) -> None:
        """The run is over; said again, nothing changes."""
        if len(self._begins) == len(self.progress):
            self._begins.append(self._clock())

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

    @property
    def skipped_fraction(self) -> float | None:
        """Of the run so far."""
        calls = self._computed + self._skipped
        return self._skipped / calls if calls else None

    @property
    def average_bits(self) -> float | None:
        """Of what ran so far."""
        return _bits(self._total(), effective=False)

    def report(
        self, router: str | None, note: str | None, cache: Mapping[str, object] | None, cache_bytes: int
    ) -> RunReport:
        """The record so far."""
        total = self._total()
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
            skipped_fraction=self.skipped_fraction,
            bits_by_evaluation=tuple(_bits(macs, effective=False) for macs in self._macs),
            effective_bits_by_evaluation=tuple(_bits(macs, effective=True) for macs in self._macs),
            cache_bytes=cache_bytes,
            mac_share=self._layout.mac_share(),
            choices={kind: self._texts(kind) for kind in self._layout.names},
            legend={**{code: name for name, code in CODES.items()}, NOT_RUN: "not run"},
            seconds_by_evaluation=tuple(round(b - a, 6) for a, b in pairwise(self._begins)),
        )

    def _total(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for macs in self._macs:
            for name, count in macs.items():
                total[name] = total.get(name, 0) + count
        return total

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


def spelled_bytes(count: float) -> str:
    """A number of bytes as people read it."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
