"""One sampling run: `run_block`, through which every block call goes, and the state behind it.

    observe -> skip (TDC) | route (DMPQ, PDR) -> compute -> keep Δ

Rows of a batch are *streams*, (conditioning, batch item). Measures are per stream and decisions are
shared: a decision at evaluation t takes the maximum over all streams' measures of t − 1, so joint, split
and reordered calls decide alike. Source: 6Bit-Diffusion (arXiv 2603.18742); docs/method.md says what is
ours. The callers (an engine, a host's nodes) only say who is in the batch and where sampling stands.

Streams may come and go. One that comes while a block is being skipped has no residual: the block is
computed for it alone (the rows that have one keep their skip), and no skip is planned before it has two.
A residual of a stream that one whole evaluation did not see, or of another size, is dropped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch

from ..kernels import block_measures, outlier_ratio
from .config import DeltaCacheConfig, DMPQConfig
from .delta_cache import DeltaCache
from .fits import BlockFit
from .layout import BlockLayout, Stream
from .linear import mixed_linear
from .observe import NonFiniteError, Observer
from .plan import INPUT_OF, BlockMemory, BlockPlan, Moment, learn, plan_blocks
from .predictor import Predictor
from .quantized import QuantizedWeight
from .report import Ledger, RunReport
from .router import ROUTERS, resolve_router
from .router_tables import Place, RouterTables
from .skip import BLOCK_BUDGET, SKIP_POLICIES

__all__ = ["BlockLayout", "NonFiniteError", "RunState", "Stream", "run_block"]

Pair = tuple[torch.Tensor, torch.Tensor]  # hidden states of the video, of the text


class RunState:
    """All state of one sampling run. Nothing is kept on modules; `close` frees every tensor.

    Args:
        layout: the model's block linears.
        dmpq: activation formats, None leaves the linears in the model's own precision.
        cache: skipping, None never skips.
        predictor: the model's calibration, for the routers and limits that need one.
        sums: whether every block gets what the one before gave; where something may change that in place, no
            sum of residuals is kept.

    Raises:
        ValueError: for an unknown router or policy, a router without its predictor, or a predictor of
            another model.
    """

    def __init__(
        self,
        layout: BlockLayout,
        dmpq: DMPQConfig | None = None,
        cache: DeltaCacheConfig | None = None,
        predictor: Predictor | None = None,
        sums: bool = True,
    ) -> None:
        self.layout, self.cache, self.note = layout, cache, None
        self._sums = sums
        self._tolerances: tuple[float, ...] | None = None
        self._fits: tuple[BlockFit, ...] = ()
        self._untouched = dict.fromkeys(layout.names, "bf16")
        self._tables: RouterTables | None = None
        if cache is not None and cache.policy not in SKIP_POLICIES:
            raise ValueError(f"skip policy must be one of {', '.join(SKIP_POLICIES)}, got {cache.policy!r}")
        if predictor is not None:
            predictor.check(layout)
        if cache is not None and (cache.policy == BLOCK_BUDGET or cache.scaled):
            if predictor is None or not predictor.blocks:
                raise ValueError(
                    f"{BLOCK_BUDGET} and scaled residuals need a predictor that knows the model's blocks: "
                    "calibrate again, or choose error-budget without scaling"
                )
            self._tolerances = predictor.block_tolerances()
            self._fits = predictor.blocks if cache.scaled else ()
        if dmpq is not None:
            dmpq, self.note = resolve_router(dmpq, predictor)
            self._tables = RouterTables(dmpq, layout, predictor, cache is not None)
            for _, block, kind in layout.linear_names()[:1]:  # what a router lacks shows here, not in mid-run
                ROUTERS[dmpq.router](Place(0, 0.0, block, kind, 0.0), self._tables)
        self.dmpq = dmpq
        self._watch_outliers = dmpq is not None and dmpq.purified_refresh and cache is not None
        self.reset()

    def reset(self) -> None:
        """Back to before the first evaluation. The only place that names the changing fields."""
        self.evaluation = -1
        self._moment = Moment(-1, 0.0, False)
        self._sigma: float | None = None
        self._seen: set[Stream] = set()
        self._streams: tuple[Stream, ...] = ()
        self._memory = [BlockMemory() for _ in range(self.layout.blocks)]
        self._plans: list[BlockPlan] = []
        self._observer = Observer()
        self._deltas = None
        if self.cache is not None:  # what is scaled block by block has no sum
            self._deltas = DeltaCache(self.cache.location, self.layout.blocks, self._sums and not self._fits)
        self._ledger = Ledger(self.layout)
        self._block: int | None = None  # whose compute is running
        self._rows: tuple[int, ...] = ()  # batch rows that it runs for
        # Inputs whose outlier ratio is recorded already, and of which rows.
        self._measured: set[tuple[str, tuple[int, ...] | None]] = set()
        self._learnt = -1
        self._closed = False

    def begin_call(self, streams: Sequence[Stream], sigma: float, progress: float, last: bool) -> None:
        """Say who is in the batch of the coming call of the model, and where sampling stands.

        A new evaluation begins when sigma changes or one of the streams was already seen in this one.

        Args:
            streams: one per batch row, in the batch's order.
            sigma: noise level of the call.
            progress: share of sampling done, in [0, 1].
            last: whether this is the last evaluation; blocks are never skipped in it.

        Raises:
            ValueError: if there is no stream or one comes twice.
            NonFiniteError: if a block's output of the evaluation before was not finite.
            RuntimeError: if the run is closed.
        """
        if self._closed:
            raise RuntimeError("this run is closed: make a new RunState for every sampling run")
        if not streams or len(set(streams)) != len(streams):
            raise ValueError(f"begin_call needs every stream of the batch once, got {list(streams)}")
        if self.evaluation < 0 or sigma != self._sigma or self._seen.intersection(streams):
            self._begin_evaluation(progress, last)
            self._sigma = sigma
        self._seen.update(streams)
        self._streams = tuple(streams)
        self._ledger.saw_streams(len(self._seen))
        if self._deltas is not None:
            self._deltas.expect(self._streams, [plan.skip for plan in self._plans])

    def linear(
        self,
        block_index: int,
        kind: str,
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None,
        rows: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A block's linear in the format decided for it; to be called inside `compute`.

        Args:
            block_index: the running block.
            kind: one of the layout's names.
            x: (B, N, K), B the streams of the call or, where given, the `rows`.
            weight: NVFP4 weight (out, K).
            bias: (out,) or None.
            rows: of the batch that `x` is of; all where not given.

        Returns:
            (B, N, out) in x.dtype.

        Raises:
            ValueError: if `x` does not match the streams, or the kind is unknown.
            RuntimeError: if that block is not running.
        """
        if block_index != self._block:
            raise RuntimeError(f"linear {kind} of block {block_index} ran outside run_block of that block")
        if kind not in self.layout.names:
            raise ValueError(f"linear kind must be one of {', '.join(self.layout.names)}, got {kind!r}")
        batch = len(self._streams if rows is None else rows)
        if x.ndim != 3 or x.shape[0] != batch:
            raise ValueError(f"linear needs (B, N, K) with B = {batch}, got {tuple(x.shape)}")
        watch = self._watch_outliers and (INPUT_OF.get(kind, kind), rows) not in self._measured
        self.ran(block_index, (kind,), x.shape[1], outlier_ratio(x) if watch else None, rows)
        return mixed_linear(x, weight, bias, self.formats(block_index)[kind])

    @property
    def watches_outliers(self) -> bool:
        """Whether the outlier ratios of the linears' inputs are wanted."""
        return self._watch_outliers

    @property
    def wants_inputs(self) -> bool:
        """Whether every linear must go through `linear`, since this kind of run overrides it."""
        return type(self).linear is not RunState.linear

    def formats(self, block_index: int) -> Mapping[str, str]:
        """Activation format by linear kind, as decided for the block in this evaluation."""
        return self._plans[block_index].formats or self._untouched

    def ran(
        self,
        block_index: int,
        kinds: Sequence[str],
        tokens: int,
        ratio: torch.Tensor | None,
        rows: tuple[int, ...] | None = None,
    ) -> None:
        """Linears of a block ran on one input, in their formats, not through `linear`.

        Args:
            block_index: the running block.
            kinds: which.
            tokens: rows of the input of one stream.
            ratio: (B,) float32 outlier ratio of the input, where it was measured.
            rows: of the batch that the input was of; all where not given.

        Raises:
            RuntimeError: if that block is not running.
        """
        if block_index != self._block:
            raise RuntimeError(
                f"linear {kinds[0]} of block {block_index} ran outside run_block of that block"
            )
        if self._tables is None:
            return
        given = range(len(self._streams)) if rows is None else rows
        counted = [place for place, row in enumerate(given) if row in self._rows]
        for kind in kinds:
            self._ledger.ran(block_index, kind, self._plans[block_index].formats[kind], tokens * len(counted))
        if ratio is not None:
            source = INPUT_OF.get(kinds[0], kinds[0])
            self._measured.add((source, rows))
            self._observer.record_rows(("outliers", block_index, source), ratio, counted)

    def check_batch(self, video: torch.Tensor, text: torch.Tensor) -> None:
        """Raise unless a call is under way whose streams are the batch rows of both tensors."""
        if self._closed or self.evaluation < 0:
            raise RuntimeError("run_block needs an open run in which begin_call was called")
        if not video.shape[0] == text.shape[0] == len(self._streams):
            raise ValueError(
                f"the call was begun for {len(self._streams)} streams, the block got {tuple(video.shape)} "
                f"and {tuple(text.shape)}: name every batch row in begin_call"
            )

    def finish(self) -> None:
        """After the last call: read what is still under way. Raises NonFiniteError as `begin_call` does."""
        if not self._closed and self.evaluation >= 0:
            self._learn()
        self._ledger.end()

    def ran_untouched(self) -> None:
        """The call that was begun runs without `run_block`: every block as the model has it."""
        for block in range(self.layout.blocks):
            self._ledger.ran_untouched(block, len(self._streams))
            self._ledger.computed(len(self._streams))

    @property
    def skipped_fraction(self) -> float | None:
        """Share of the block evaluations so far that were skipped, None before the first."""
        return self._ledger.skipped_fraction

    @property
    def average_bits(self) -> float | None:
        """Average activation bits of what ran so far, None before anything did."""
        return self._ledger.average_bits

    def report(self) -> RunReport:
        """What happened so far; also after `close`."""
        return self._ledger.report(
            router=None if self.dmpq is None else self.dmpq.router,
            note=self.note,
            cache=None if self.cache is None else asdict(self.cache),
            cache_bytes=0 if self._deltas is None else self._deltas.peak_bytes,
        )

    def close(self) -> None:
        """Free every tensor. The report stays; nothing else may be called."""
        self._ledger.end()
        self._observer.reset()
        if self._deltas is not None:
            self._deltas.clear()
        self._closed = True

    def _begin_evaluation(self, progress: float, last: bool) -> None:
        self._learn()
        if self._deltas is not None:
            self._deltas.keep(self._seen)
        self._seen.clear()
        self.evaluation += 1
        self._moment = Moment(self.evaluation, progress, last)
        self._ledger.begin_evaluation(progress)
        self._plans = plan_blocks(self._memory, self._moment, self.cache, self._tables, self._tolerances)

    def _learn(self) -> None:
        """Take the measures of the present evaluation into the blocks' memories, once."""
        if self._learnt == self.evaluation:
            return
        self._learnt = self.evaluation
        learn(self._memory, self._plans, self._observer.read(), self.evaluation)

    def _held(self, block: int, video: torch.Tensor, text: torch.Tensor) -> list[int]:
        """Batch rows that the plan answers with a kept residual."""
        if self._deltas is None or not self._plans[block].skip:
            return []
        return [
            row for row, s in enumerate(self._streams) if self._deltas.holds(block, s, video[row], text[row])
        ]

    @contextmanager
    def _running(self, block: int, rows: Sequence[int]) -> Iterator[None]:
        self._block, self._rows, self._measured = block, tuple(rows), set()
        try:
            yield
        finally:
            self._block, self._rows = None, ()

    def _answer(self, block: int, held: Sequence[int], inp: Pair, out: Pair) -> Pair:
        """`out` with the `held` batch rows replaced by input plus kept residual; new tensors, but for a batch
        to which nothing is added."""
        if all(row in held and self._deltas.passes(block, s) for row, s in enumerate(self._streams)):
            return inp
        video, text = (x.new_empty(x.shape) for x in out)
        for row, stream in enumerate(self._streams):
            if row in held:
                growth = self._growth(block, stream)
                self._deltas.apply(
                    block, stream, inp[0][row], inp[1][row], growth, out=(video[row], text[row])
                )
            else:
                video[row], text[row] = out[0][row], out[1][row]
        return video, text

    def _growth(self, block: int, stream: Stream) -> float:
        """What a kept residual is multiplied by: how much the block's grew since, in calibration."""
        if not self._fits:
            return 1.0
        made = self._ledger.progress[self._deltas.evaluation(block, stream)]
        fit = self._fits[block]
        return fit.magnitude(self._moment.progress) / fit.magnitude(made)

    def _observe(self, block: int, rows: Sequence[int], inp: Pair, out: Pair) -> None:
        """Measure the block for these batch rows, and keep their residuals."""
        fresh = (
            rows
            if self._deltas is None
            else [row for row in rows if not self._measure_change(block, row, inp, out)]
        )
        if fresh:
            self._observer.record_rows(("block", block, 1), block_measures(inp[0], out[0]), fresh)

    def _measure_change(self, block: int, row: int, inp: Pair, out: Pair) -> bool:
        """Keep the residual of a batch row; whether there was an earlier one to measure it against."""
        stream, before, after = self._streams[row], (inp[0][row], inp[1][row]), (out[0][row], out[1][row])
        known = self._deltas.holds(block, stream, *before)
        if known:
            elapsed = self.evaluation - self._deltas.evaluation(block, stream)
            measures = self._deltas.change(block, stream, before[0], after[0])
            self._observer.record(("block", block, elapsed), measures)
        self._deltas.store(block, stream, self.evaluation, before, after)
        return known


def run_block(
    run: RunState,
    index: int,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    compute: Callable[[], Pair],
) -> Pair:
    """A transformer block as the run decides: computed, or answered by its kept residual.

    Args:
        run: state of this sampling run, after `begin_call`.
        index: of the block.
        hidden_states: (B, N, D) video tokens, B the streams of the call.
        encoder_hidden_states: (B, T, D) text tokens.
        compute: runs the block on them, its quantized linears through `run.linear`.

    Returns:
        (hidden_states, encoder_hidden_states) after the block.

    Raises:
        ValueError: if the batch does not match the streams.
        RuntimeError: before `begin_call`, and after `close`.
    """
    run.check_batch(hidden_states, encoder_hidden_states)
    held = run._held(index, hidden_states, encoder_hidden_states)
    rows = [row for row in range(hidden_states.shape[0]) if row not in held]
    tokens = hidden_states.shape[1] + encoder_hidden_states.shape[1]
    video, text = hidden_states, encoder_hidden_states
    if rows:
        with run._running(index, rows):
            video, text = compute()
        run._observe(index, rows, (hidden_states, encoder_hidden_states), (video, text))
        run._ledger.computed(len(rows))
        if run.dmpq is None:
            run._ledger.ran_untouched(index, len(rows) * tokens)
    if held:
        run._ledger.skipped(index, len(held), len(held) * tokens)
        video, text = run._answer(index, held, (hidden_states, encoder_hidden_states), (video, text))
    if index == run.layout.blocks - 1:
        run._observer.flush()
    return video, text
