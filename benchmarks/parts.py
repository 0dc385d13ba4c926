"""What benchmarks in parts share: rows kept as they come, worker processes, results that are merged.

A part is groups of units, and a unit is one row. A group (a prompt, say) stays in one process, where its
units share what is costly to make. A part that stops goes on where it was.
"""

import datetime
import json
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
from sixbit_diffusion.engine.rows import Row, RowStore, digest, mine, run_workers
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


def run_part(given: Namespace, job: Job) -> None:
    """Measure what is left of a part, in this process or in workers, and merge the results.

    Args:
        given: `model`, `predictor`, `device`, `steps`, `workers`, `shard` and `out` of the command line.
        job: what to run.
    """
    quiet_libraries()
    part = job.part
    facts, machine = read_facts(given.model), find_machine(given.device)
    shard = None if given.shard is None else tuple(int(n) for n in given.shard.split("/"))
    predictor = _predictor(given, facts, machine)
    how = {"machine": f"{machine.device.type}: {machine.name}", "versions": versions()}
    what = {
        "part": job.name,
        "choices": digest(part.identity),
        **_tied_to(facts, predictor),
        "captions": digest(*(prompt.text for prompt in job.prompts)),
        "count": len(part.groups),
        "steps": given.steps,
        **how,
    }
    store = RowStore(given.out.with_name(f"{given.out.stem}-{job.name}.json"), what, shard)
    left = {
        group: [unit for unit in part.units if _key(group, unit) not in store.rows]
        for group in mine(part.groups, shard)
    }
    left = {group: units for group, units in left.items() if units}

    def watch() -> None:
        store.load()
        print(f"\r{job.name}: {len(store.rows)} of {len(part.groups) * len(part.units)}", end="", flush=True)

    if given.workers > 1 and shard is None and left:
        run_workers(job.program, given.workers, watch)
    elif left:
        model = load_model(given.model, None, "search", machine, facts=facts) if part.loads else None
        bench = Bench(given, machine, facts, model, job.prompts)
        for group, units in left.items():
            for unit, row in part.measure(bench, group, units):
                store.add(_key(group, unit), row)
                watch()
    if shard is not None:
        return
    found = [{unit: store.rows[_key(group, unit)] for unit in part.units} for group in part.groups]
    bars, summary = part.conclude(found)
    if predictor is not None:
        summary["predictor"] = predictor.summary()
    rows = [
        {"part": job.name, **({"group": group, "unit": unit} if unit else {}), **row}
        for group, units in zip(part.groups, found, strict=True)
        for unit, row in units.items()
    ]
    date = datetime.date.today().isoformat()
    how |= {"command": job.command, "date": date}
    _write(given.out, job, (bars, {"of": _tied_to(facts, predictor), "summary": summary}), rows, how)
    store.clear()


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


def _write(out: Path, job: Job, concluded: tuple[Bars, Row], rows: list[Row], how: Row) -> None:
    """Put a part's bars, rows and summary in place of those of an earlier run of it."""
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
    print(f"\n{json.dumps({'bars': new_bars, 'summary': told['summary']}, indent=1)}")
