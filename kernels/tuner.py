"""The fastest of a few configurations of a kernel, found by timing them on the first call of a shape.

Candidates differ in speed alone: each gives the same bits, so that no result depends on what was chosen, and
a second run equals a first. The first candidate is the table's, and serves whenever nothing may be timed:
outside `tuning`, on the CPU, while a graph is captured or compiled, once the seconds of this process are
spent. What was found is kept on disk, per GPU, Triton, kernel, shape and the table's candidate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from .disk_cache import entries, keep

BUDGET = 20.0  # seconds a process spends on tuning, compiling included
REPEATS = 3
Candidate = TypeVar("Candidate")
Launch = Callable[[Candidate], None]
Show = Callable[[str, int, int], None]  # (what is tuned, number of the candidate, candidates)


def cuda_ms(launch: Callable[[], None]) -> float:
    """Median milliseconds of a launch on the current stream, after one that compiles and warms up."""
    launch()
    times = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@dataclass
class Tuner:
    """What a process has found out, and how long that took.

    Attributes:
        file: where choices are kept; None keeps them in this process alone.
        unfit: errors of a candidate that this GPU cannot launch; it is passed over.
        budget: seconds to spend in all.
        time_ms: of a launch. `clock`: in seconds.
        spent, longest: seconds so far, and those of the slowest candidate.
        choices: what this process chose. `kept`: what the file held when it was first asked.
    """

    file: Path | None
    unfit: tuple[type[Exception], ...] = ()
    budget: float = BUDGET
    time_ms: Callable[[Callable[[], None]], float] = cuda_ms
    clock: Callable[[], float] = time.monotonic
    spent: float = 0.0
    longest: float = 0.0
    choices: dict[str, Any] = field(default_factory=dict)
    kept: dict[str, Any] | None = None

    def seconds_left(self) -> float:
        """What of the budget is not spent."""
        return max(0.0, self.budget - self.spent)

    def choose(
        self, key: str, candidates: Sequence[Candidate], launch: Launch, may_time: bool, show: Show
    ) -> Candidate:
        """The fastest candidate for `key`, as far as it is known or may be found out now."""
        found = self.choices.get(key)
        if found not in candidates:
            found = self._recalled(key, candidates)
            if found is None and may_time and self.spent < self.budget:
                found = self._time(key, candidates, launch, show)
            if found is None:
                return candidates[0]
            self.choices[key] = found
        return found

    def _recalled(self, key: str, candidates: Sequence[Candidate]) -> Candidate | None:
        """The candidate that the file names. It is read once: unknown keys are asked for at every launch."""
        if self.kept is None:
            self.kept = {} if self.file is None else entries(self.file)
        name = self.kept.get(key)
        if not isinstance(name, str):
            return None
        return next((candidate for candidate in candidates if repr(candidate) == name), None)

    def _time(self, key: str, candidates: Sequence[Candidate], launch: Launch, show: Show) -> Candidate:
        """Time the candidates, as many as there are seconds for; only a full comparison goes to disk."""
        best, least = candidates[0], float("inf")
        for number, candidate in enumerate(candidates, 1):
            if self.spent + self.longest > self.budget:  # this one may take as long as the slowest did
                return best
            show(key, number, len(candidates))
            begin = self.clock()
            try:
                taken = self.time_ms(lambda candidate=candidate: launch(candidate))
            except self.unfit:
                taken = float("inf")
            seconds = self.clock() - begin
            self.spent, self.longest = self.spent + seconds, max(self.longest, seconds)
            if taken < least:
                best, least = candidate, taken
        if self.file is not None:
            keep(self.file, key, repr(best))
        return best


_active: list[tuple[Tuner, Show]] = []


@contextmanager
def tuning(on: bool, show: Show = lambda *_: None, tuner: Tuner | None = None) -> Iterator[None]:
    """Let kernels time their candidates inside the block, if `on`.

    Args:
        show: told of every candidate that is about to be timed.
        tuner: another than the process's own (tests).
    """
    if not on:
        yield
        return
    _active.append((tuner or process_tuner(), show))
    try:
        yield
    finally:
        _active.pop()


@cache
def process_tuner() -> Tuner:
    """The tuner of this process; without Triton nothing asks it."""
    try:
        from .support_triton import UNFIT, kept
    except ImportError:
        return Tuner(None)
    return Tuner(kept("tuning.json"), UNFIT)


def fastest(
    kernel: str, shape: tuple[int, ...], candidates: Sequence[Candidate], launch: Launch, x: torch.Tensor
) -> Candidate:
    """The candidate to launch.

    Args:
        kernel: name and types of what is launched; with `shape`, the GPU and the table's candidate, what a
            choice holds for. The first size is a number of rows, of which only the power of two counts.
        candidates: of one kind, told apart by their repr; the table's first.
        launch: runs one on the real operands; running it again changes nothing.
        x: an operand, which tells the GPU.
    """
    if not _active or len(candidates) == 1:
        return candidates[0]
    tuner, show = _active[-1]
    rows, *rest = shape
    sizes = "x".join(str(size) for size in (1 << (rows - 1).bit_length(), *rest))
    key = f"{kernel} {sizes}, {_gpu(x)}, from {candidates[0]}"
    with torch.cuda.device_of(x):  # whose stream is timed
        return tuner.choose(key, candidates, launch, _may_time(x), show)


def _may_time(x: torch.Tensor) -> bool:
    """Whether kernels may be launched beside the run's own and waited for."""
    return x.is_cuda and not torch.compiler.is_compiling() and not torch.cuda.is_current_stream_capturing()


def _gpu(x: torch.Tensor) -> str:
    return _gpu_named(x.device.index) if x.is_cuda else "cpu"


@cache
def _gpu_named(device: int) -> str:
    from .support_triton import TRITON_VERSION

    return f"{torch.cuda.get_device_name(device)}, Triton {TRITON_VERSION}"
