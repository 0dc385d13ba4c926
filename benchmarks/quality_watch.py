"""Several parts of `quality.py` in one go: processes do the work (`quality_pool`), and this one watches.

A part whose rows are complete goes into the results. A process that dies is started anew, and what it was at
is tried once more; a part in which that fails in three groups is given up, and the others go on.
"""

import signal
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from parts import Opened, open_part
from quality_calibrate import is_calibrated
from quality_parts import SOLVED_BY, NotSolvedError, draw_picture, make_job, prepare
from quality_pool import PAUSE, Claims
from sixbit_diffusion.engine.commands import quiet_libraries
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.rows import Row, worker_environments
from sixbit_diffusion.sixbit_core.errors import CheckpointError

ATTEMPTS, GIVEN_UP = 2, 3  # at a group; groups that fail for good until a part does
GRACE = 30.0  # seconds until a process that overruns is stopped
SAID = 30  # lines of a failed process that are shown


@dataclass
class Watch:
    """What has become of the parts.

    Attributes:
        opened: parts whose rows are looked at.
        failed: why, by part.
        attempts: that failed, of a part's group.
    """

    each: Sequence[Namespace]
    command: str
    claims: Claims
    begin: float
    opened: dict[str, Opened] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    attempts: Counter = field(default_factory=Counter)

    def look(self) -> None:
        """Open what can be opened, conclude what is complete."""
        for given in self.each:
            name = given.part
            if self.claims.has(name, "settled"):
                continue
            try:
                part = self._opened(given)
                if part is None:
                    continue
                part.store.load()
                if part.published:
                    self._settle(name, "is there already")
                    self.claims.mark(name, "there")
                elif part.complete:
                    self._settle(name, f"measured in {self.claims.seconds(name):.0f} s")
                    bars = part.conclude()["bars"]
                    self.claims.mark(name, "there")
                    self._say(name, ", ".join(["in the results", *map(_told, bars)]))
            except Exception as error:  # one part's is not the others'
                self.fail(name, f"{type(error).__name__}: {error}")

    def _opened(self, given: Namespace) -> Opened | None:
        """The part, None where it waits for thresholds."""
        name, needs = given.part, SOLVED_BY[given.part]
        if name in self.opened:
            return self.opened[name]
        if needs in self.failed:
            raise NotSolvedError(f"{needs} failed")
        if any(one.part == needs for one in self.each) and not self.claims.has(needs, "there"):
            return None
        self.opened[name] = open_part(given, make_job(given, (), self.command))
        return self.opened[name]

    def ended(self, by: str, said: str) -> None:
        """A process failed: what it had taken is left for another, or given up."""
        for name, group in self.claims.taken(by):
            part = self.opened.get(name)
            if part is None or self.claims.has(name, "settled"):
                continue
            with suppress(InputError):  # `look` gives such a part up
                part.store.load()
            if not part.left(group):
                continue
            self.attempts[name, group] += 1
            self._say(name, f"failed in {group}: {said}")
            again = self.attempts[name, group] < ATTEMPTS
            (self.claims.release if again else self.claims.give_up)(name, group)
            given_up = sum(n == name and count >= ATTEMPTS for (n, _), count in self.attempts.items())
            taken = all(not part.left(g) or self.attempts[name, g] >= ATTEMPTS for g in part.job.part.groups)
            if given_up >= GIVEN_UP or (given_up and taken):
                self.fail(name, said)

    def fail(self, name: str, why: str) -> None:
        """Give a part up."""
        self.failed[name] = why
        self._settle(name, f"failed, {why}")

    def _settle(self, name: str, what: str) -> None:
        self.claims.mark(name, "settled")
        self._say(name, what)

    def _say(self, name: str, what: str) -> None:
        print(f"{time.time() - self.begin:6.0f} s  {name}: {what}", flush=True)


def _told(bar: Row) -> str:
    return f"{bar['id']} {bar['value']:.4g}"


def run_parts(each: Sequence[Namespace], program: Sequence[str], command: str) -> int:
    """Run parts in one go; the exit code, 1 where one failed or is not finished."""
    quiet_libraries()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else processes outlive this one
    begin, first = time.time(), each[0]
    deadline = None if first.until is None else begin + first.until
    measured = [one for one in each if one.part in SOLVED_BY]
    for given in measured:
        given.deadline = deadline
    try:
        for given in measured:
            prepare(given)
        if any(one.part == "calibrate" for one in each):
            _calibrate(first, program, deadline, begin)
    except (InputError, CheckpointError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="quality-") as folder:
        watch = Watch(measured, command, Claims(Path(folder)), begin)
        options = ["--claims", folder, *([] if deadline is None else ["--deadline", repr(deadline)])]
        _watch_workers(watch, [*program, *options], first.workers, deadline)
        left = [one.part for one in measured if not watch.claims.has(one.part, "there")]
    for name in left:
        rows = watch.opened[name].progress() if name in watch.opened else "not begun"
        print(f"{name}: {watch.failed.get(name, 'not finished')} ({rows}); the same command goes on")
    if any(one.part == "picture" for one in each):
        try:
            draw_picture(each[-1])
        except InputError as error:
            print(f"quality: {error}", file=sys.stderr)
    print(f"{time.time() - begin:.0f} s in all", flush=True)
    return 1 if left else 0


def _calibrate(first: Namespace, program: Sequence[str], deadline: float | None, begin: float) -> None:
    """In a process of its own, unless it is done. InputError where it fails."""
    work = first.work if first.part != "calibrate" else first.work / f"s{first.twin}"
    if is_calibrated(work):
        print(f"calibrate: {work} has it already", flush=True)
        return
    rest = None if deadline is None else max(1.0, deadline - time.time())
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                [*program, "--part", "calibrate"], stdout=subprocess.DEVNULL, stderr=said, timeout=rest
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(f"calibrate did not end within {rest:.0f} s") from error
        if done.returncode:
            print(_end_of(said), file=sys.stderr, flush=True)
            raise InputError(f"calibrate failed: {_last_line(said, done.returncode)}")
    print(f"{time.time() - begin:6.0f} s  calibrate: done", flush=True)


def _watch_workers(watch: Watch, program: Sequence[str], count: int, deadline: float | None) -> None:
    """Keep `count` processes at work until nothing is left or they end by the deadline."""
    environments = worker_environments(count)
    workers: dict[int, tuple[subprocess.Popen, object]] = {}
    taken: dict[int, int] = {}  # groups that a process's forerunners took

    def start(index: int) -> None:
        said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [*program, "--shard", f"{index}/{count}"]
        taken[index] = len(watch.claims.taken(f"{index}/{count}"))
        process = subprocess.Popen(command, env=environments[index], stdout=subprocess.DEVNULL, stderr=said)
        workers[index] = (process, said)

    with _ending(workers):
        watch.look()
        if all(watch.claims.has(one.part, "settled") for one in watch.each):
            return
        for index in range(count):
            start(index)
        idle_deaths = 0
        while workers:
            time.sleep(PAUSE)
            watch.look()
            for index, (process, said) in list(workers.items()):
                code = process.poll()
                if code is None:
                    continue
                del workers[index]
                if code:
                    line, by = _last_line(said, code), f"{index}/{count}"
                    print(_end_of(said), file=sys.stderr, flush=True)
                    idle_deaths += len(watch.claims.taken(by)) == taken[index]  # before it took anything
                    watch.ended(by, line)
                    if idle_deaths > count:
                        print(f"processes end before they begin: {line}", flush=True)
                        return
                    if deadline is None or time.time() < deadline:
                        start(index)
                said.close()
            if deadline is not None and time.time() > deadline + GRACE:
                break
        watch.look()


@contextmanager
def _ending(workers: dict[int, tuple[subprocess.Popen, object]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process, _ in workers.values():
            process.terminate()
        for process, _ in workers.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.kill()


def _last_line(said: object, code: int) -> str:
    lines = _end_of(said).splitlines()
    return lines[-1] if lines else f"exit code {code}"


def _end_of(said: object) -> str:
    """The last lines that a process wrote to its error output: its traceback, where it had one."""
    said.seek(0)
    return "\n".join(said.read().strip().splitlines()[-SAID:])
