"""A process of `quality.py` that works on several parts, and what processes tell each other by.

It loads the model once and takes the groups of all parts, prompt by prompt, in the order of the parts; a part
that needs solved thresholds is passed over until they are there. In a folder of one run stand

    PART@GROUP        the process that took it
    PART.settled      nothing is left to take
    PART.there        it is in the results
"""

import os
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from parts import Bench, Opened, open_bench, open_part
from quality_parts import SOLVED_BY, make_job, prepare
from sixbit_diffusion.engine.commands import quiet_libraries
from sixbit_diffusion.engine.errors import InputError

PAUSE = 0.5  # seconds between two looks


@dataclass(frozen=True)
class Claims:
    """See the module."""

    folder: Path

    def take(self, part: str, group: str, by: str) -> bool:
        """Whether the group is now this process's."""
        try:
            with (self.folder / f"{part}@{group}").open("x") as file:
                file.write(by)
        except FileExistsError:
            return False
        return True

    def free(self, part: str, group: str) -> bool:
        """Whether no process has the group."""
        return not (self.folder / f"{part}@{group}").exists()

    def taken(self, by: str) -> list[tuple[str, str]]:
        """(part, group) of all that a process took."""
        return [tuple(p.name.split("@")) for p in self.folder.glob("*@*") if p.read_text() == by]

    def give_up(self, part: str, group: str) -> None:
        """Leave the group to none."""
        (self.folder / f"{part}@{group}").write_text("none")

    def release(self, part: str, group: str) -> None:
        """Leave the group to whoever comes."""
        (self.folder / f"{part}@{group}").unlink(missing_ok=True)

    def seconds(self, part: str) -> float:
        """Since the part's first group was taken."""
        begun = [path.stat().st_mtime for path in self.folder.glob(f"{part}@*")]
        return time.time() - min(begun, default=time.time())

    def mark(self, part: str, what: str) -> None:
        (self.folder / f"{part}.{what}").touch()

    def has(self, part: str, what: str) -> bool:
        return (self.folder / f"{part}.{what}").exists()


def take_work(each: Sequence[Namespace], command: str) -> int:
    """Work until every part is settled or the deadline passes; the exit code."""
    quiet_libraries()
    claims, by = Claims(each[0].claims), each[0].shard
    each = [one for one in each if one.part in SOLVED_BY]
    for given in each:
        prepare(given)
    opened: dict[str, Opened] = {}
    bench: Bench | None = None
    parent = os.getppid()

    def over() -> bool:
        late = each[0].deadline is not None and time.time() > each[0].deadline
        return late or os.getppid() != parent  # nobody watches any more

    while not over() and not all(claims.has(given.part, "settled") for given in each):
        found = _next_group(each, opened, claims, by)
        if found is None:
            time.sleep(PAUSE)
            continue
        part, group = found
        if bench is None:  # before anything is taken: where a model does not load, no group is to blame
            bench = open_bench(part)
        elif claims.take(part.given.part, group, by):
            for _ in part.measure(replace(bench, given=part.given, prompts=part.job.prompts), group):
                if over():
                    return 0
    return 0


def _next_group(
    each: Sequence[Namespace], opened: dict[str, Opened], claims: Claims, by: str
) -> tuple[Opened, str] | None:
    """The first group that is left and free."""
    for given in each:
        name, needs = given.part, SOLVED_BY[given.part]
        solving = any(one.part == needs for one in each) and not claims.has(needs, "there")
        if claims.has(name, "settled") or (needs and solving):
            continue
        try:
            if name not in opened:
                opened[name] = _open(given, by)
            part = opened[name]
            part.store.load()
        except InputError:
            if claims.has(name, "settled"):  # its rows went into the results just now
                continue
            raise
        for group in filter(part.left, part.job.part.groups):
            if claims.free(name, group):
                return part, group
    return None


def _open(given: Namespace, by: str) -> Opened:
    number, count = map(int, by.split("/"))
    return open_part(given, make_job(given, (), ""), (number, count))
