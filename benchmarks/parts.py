"""What benchmarks in parts share: rows kept as they come, worker processes, results that are merged.

A part is groups of units, and a unit is one row. A group (a prompt, say) stays in one process, where its
units share what is costly to make. A part that stops goes on where it was.
"""

import datetime
import json
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sixbit_diffusion.engine.commands import quiet_libraries
from sixbit_diffusion.engine.facts import ModelFacts, read_facts
from sixbit_diffusion.engine.files import write_json
from sixbit_diffusion.engine.intervals import bootstrap_mean
from sixbit_diffusion.engine.machine import Machine, find_machine, versions
from sixbit_diffusion.engine.pipeline import LoadedModel, load_model
from sixbit_diffusion.engine.prompts import Prompt
from sixbit_diffusion.engine.rows import Row, RowStore, Shard, digest, mine, run_workers
from sixbit_diffusion.engine.sample import ClipSpec
from sixbit_diffusion.engine.settings import Choice, RunSettings, settle
from sixbit_diffusion.sixbit_core.predictor import Predictor

BALANCED = Choice(precision="dmpq", preset="balanced")
FIXED = {name: Choice(precision=name, cache="off") for name in ("w4a16", "w4a8", "w4a4")}
Bars = dict[str, float | None]  # None: the bar of an earlier run does not hold any more


@dataclass(frozen=True)
class Bench:
    """What a part works with: a loaded model, and how to turn a choice into settings."""

    given: Namespace
    machine: Machine
    facts: ModelFacts
    model: LoadedModel | None
    prompts: Sequence[Prompt] = ()

    def settings(self, choice: Choice, number: int) -> RunSettings:
        """Settings of a choice for a prompt: with the predictor that was given, what is random drawn anew."""
        found = settle(with_predictor(choice, self.given), self.facts, self.machine)
        dmpq = None if found.dmpq is None else replace(found.dmpq, seed=found.dmpq.seed + number)
        cache = None if found.cache is None else replace(found.cache, seed=found.cache.seed + number)
        return replace(found, dmpq=dmpq, cache=cache)

    def clip(self, prompt: Prompt, number: int) -> ClipSpec:
        """What to sample for a prompt."""
        size, frames = self.facts.size, self.facts.frames
        return ClipSpec(prompt.text, size, frames, steps=self.given.steps, seed=number)


@dataclass(frozen=True)
class Part:
    """One part of a benchmark.

    Attributes:
        groups: their keys.
        units: names of the units of every group; ("",) where a group is one.
        measure: those units of a group that are left, each with its row as it is made.
        conclude: all rows, one mapping from unit to row a group, to the bars and a summary.
        identity: equal for equal measurements, besides model, predictor, captions, steps and machine.
        loads: whether it needs a loaded model.
    """

    groups: Sequence[str]
    units: Sequence[str]
    measure: Callable[[Bench, str, Sequence[str]], Iterator[tuple[str, Row]]]
    conclude: Callable[[Sequence[Mapping[str, Row]]], tuple[Bars, Row]]
    identity: str = ""
    loads: bool = True


@dataclass(frozen=True)
class Job:
    """A part to run, and what of.

    Attributes:
        name: of the part, in the results.
        prefix: of the ids of its bars.
        prompts: that its groups number.
        program: how to start a worker.
        command: for the results.
    """

    name: str
    prefix: str
    part: Part
    prompts: Sequence[Prompt]
    program: Sequence[str]
    command: str


@dataclass(frozen=True)
class Opened:
    """A part whose rows are being made, by this process or by others.

    Attributes:
        store: its rows so far.
        how: machine and versions, for the results.
        what: is measured; equal for equal measurements.
    """

    given: Namespace
    job: Job
    facts: ModelFacts
    machine: Machine
    predictor: Predictor | None
    store: RowStore
    how: Row
    what: Row

    def left(self, group: str) -> list[str]:
        """Units of a group that have no row yet."""
        return [unit for unit in self.job.part.units if _key(group, unit) not in self.store.rows]

    @property
    def complete(self) -> bool:
        return not any(map(self.left, self.job.part.groups))

    @property
    def published(self) -> bool:
        """Whether its results stand in the file, of just this measurement."""
        found = read_results(self.given.out)["parts"].get(self.job.name, {})
        return found.get("measured") == digest(json.dumps(self.what))

    def progress(self) -> str:
        """How many rows there are, of all."""
        part = self.job.part
        return f"{self.job.name}: {len(self.store.rows)} of {len(part.groups) * len(part.units)}"

    def measure(self, bench: Bench, group: str) -> Iterator[None]:
        """Make what is left of a group; at every yield one more row is on disk."""
        if units := self.left(group):
            for unit, row in self.job.part.measure(bench, group, units):
                self.store.add(_key(group, unit), row)
                yield

    def conclude(self) -> Row:
        """Put a complete part into the results; its bars and summary."""
        job = self.job
        found = [{u: self.store.rows[_key(group, u)] for u in job.part.units} for group in job.part.groups]
        bars, summary = job.part.conclude(found)
        if self.predictor is not None:
            summary["predictor"] = self.predictor.summary()
        rows = [
            {"part": job.name, **({"group": group, "unit": unit} if unit else {}), **row}
            for group, units in zip(job.part.groups, found, strict=True)
            for unit, row in units.items()
        ]
        how = self.how | {"command": job.command, "date": datetime.date.today().isoformat()}
        of = {"of": _tied_to(self.facts, self.predictor), "measured": digest(json.dumps(self.what))}
        made = _write(self.given.out, job, (bars, {**of, "summary": summary}), rows, how)
        self.store.clear()
        return {"bars": made, "summary": summary}


def open_part(given: Namespace, job: Job, shard: Shard | None = None) -> Opened:
    """A part, with the rows that it has already. InputError where rows of another measurement stand there.

    Args:
        given: `model`, `predictor`, `device`, `steps` and `out` of the command line.
        job: what to run.
        shard: of a process beside others, whose number its rows are kept under.
    """
    facts, machine = read_facts(given.model), find_machine(given.device)
    predictor = _predictor(given, facts, machine)
    how = {"machine": f"{machine.device.type}: {machine.name}", "versions": versions()}
    what = {
        "part": job.name,
        "choices": digest(job.part.identity),
        **_tied_to(facts, predictor),
        "captions": digest(*(prompt.text for prompt in job.prompts)),
        "count": len(job.part.groups),
        "steps": given.steps,
        **how,
    }
    store = RowStore(given.out.with_name(f"{given.out.stem}-{job.name}.json"), what, shard)
    return Opened(given, job, facts, machine, predictor, store, how, what)


def run_part(given: Namespace, job: Job) -> None:
    """Measure what is left of a part, in this process or in workers, and merge the results.

    Args:
        given: `model`, `predictor`, `device`, `steps`, `workers`, `shard` and `out` of the command line.
        job: what to run.
    """
    quiet_libraries()
    shard = None if given.shard is None else tuple(int(n) for n in given.shard.split("/"))
    opened = open_part(given, job, shard)
    left = list(filter(opened.left, mine(job.part.groups, shard)))

    def watch() -> None:
        opened.store.load()
        print(f"\r{opened.progress()}", end="", flush=True)

    if given.workers > 1 and shard is None and left:
        run_workers(job.program, given.workers, watch)
    elif left:
        bench, parent = open_bench(opened), os.getppid()
        for group in left:
            for _ in opened.measure(bench, group):
                watch()
                if shard is not None and os.getppid() != parent:
                    return  # nobody waits for this process any more
    if shard is None:
        print(f"\n{json.dumps(opened.conclude(), indent=1)}")


def open_bench(opened: Opened) -> Bench:
    """What a part works with, its model loaded where it needs one."""
    given, facts, machine = opened.given, opened.facts, opened.machine
    loads = opened.job.part.loads
    model = load_model(given.model, None, "search", machine, facts=facts) if loads else None
    return Bench(given, machine, facts, model, opened.job.prompts)


def read_results(out: Path) -> Row:
    """What stands in a results file, with no bars, rows and parts where there is none."""
    empty: Row = {"bars": [], "rows": [], "parts": {}}
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else empty


def tied_to(given: Namespace) -> Row:
    """Fingerprint of the model and digest of its predictor, as results name them in `of`."""
    facts = read_facts(given.model)
    return _tied_to(facts, _predictor(given, facts, find_machine(given.device)))


def with_predictor(choice: Choice, given: Namespace) -> Choice:
    """The choice, with the predictor that was given where it has a use for one."""
    takes = choice.precision in ("dmpq", "w4a8", "w4a4")
    return replace(choice, predictor=given.predictor) if takes else choice


def interval(values: Sequence[float]) -> Row:
    """Mean and 95 % bootstrap interval."""
    mean, low, high = bootstrap_mean(values)
    return {"mean": mean, "interval": [low, high]}


def means(rows: Sequence[Mapping[str, Row]], names: Sequence[str], what: Sequence[str]) -> Row:
    """Of every name the mean of each value, over the rows that have it."""
    found: Row = {}
    for name in names:
        values = {key: [row[name][key] for row in rows if row[name].get(key) is not None] for key in what}
        found[name] = {key: interval(known) for key, known in values.items() if known}
    return found


def paired(rows: Sequence[Mapping[str, Row]], a: str, b: str, what: str = "psnr_db") -> Row:
    """Mean of a − b over the same prompts."""
    return interval([row[a][what] - row[b][what] for row in rows])


def _predictor(given: Namespace, facts: ModelFacts, machine: Machine) -> Predictor | None:
    return settle(with_predictor(BALANCED, given), facts, machine).predictor


def _tied_to(facts: ModelFacts, predictor: Predictor | None) -> Row:
    return {
        "fingerprint": facts.checkpoint.fingerprint,
        "predictor": None if predictor is None else digest(predictor.to_json()),
    }


def _key(group: str, unit: str) -> str:
    return f"{group}/{unit}" if unit else group


def _write(out: Path, job: Job, concluded: tuple[Bars, Row], rows: list[Row], how: Row) -> list[Row]:
    """Put a part's bars, rows and summary in place of those of an earlier run of it; returns its bars."""
    bars, told = concluded
    old = read_results(out)
    new_ids = {f"{job.prefix}.{key}" for key in bars}
    kept_rows = [row for row in old["rows"] if row["part"] != job.name]
    new_bars = [
        {"id": f"{job.prefix}.{key}", "value": value} for key, value in bars.items() if value is not None
    ]
    kept_bars = [bar for bar in old["bars"] if bar["id"] not in new_ids]
    result = {
        **how,
        "bars": sorted([*kept_bars, *new_bars], key=lambda bar: bar["id"]),
        "rows": [*kept_rows, *rows],
        "parts": {**old["parts"], job.name: {**how, **told}},
    }
    write_json(out, result)
    return new_bars
