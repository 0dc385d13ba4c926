"""What `reference.py` measures: configurations run prompt by prompt, and the bars made of their rows."""

import datetime
import json
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sixbit_diffusion.engine.commands import quiet_libraries
from sixbit_diffusion.engine.evaluate import KINDS, score_frames
from sixbit_diffusion.engine.facts import ModelFacts, read_facts
from sixbit_diffusion.engine.files import write_json
from sixbit_diffusion.engine.intervals import bootstrap_mean, wilson
from sixbit_diffusion.engine.machine import Machine, find_machine, versions
from sixbit_diffusion.engine.pipeline import LoadedModel, load_model
from sixbit_diffusion.engine.prompts import HELD_OUT_SEED, Prompt
from sixbit_diffusion.engine.report import compare_clips
from sixbit_diffusion.engine.rows import Row, RowStore, digest, mine, run_workers
from sixbit_diffusion.engine.sample import ClipSpec, sample, sample_frames
from sixbit_diffusion.engine.settings import Choice, RunSettings, settle
from sixbit_diffusion.engine.trajectory import record, trajectory_error
from sixbit_diffusion.engine.transformer import build_transformer, full_precision_bytes, weight_bytes
from sixbit_diffusion.reference.world import sample_prompts, sample_scenes

REPORTED = ("average_activation_bits", "effective_activation_bits", "skipped_fraction")
BALANCED = Choice(precision="dmpq", preset="balanced")
ROUTED = {name: replace(BALANCED, router=name) for name in ("gamma", "static", "static-time", "random")}
UNSKIPPED = {name: replace(choice, cache="off") for name, choice in {"dmpq": BALANCED, **ROUTED}.items()}
FIXED = {name: Choice(precision=name, cache="off") for name in ("w4a16", "w4a8", "w4a4")}


@dataclass(frozen=True)
class Bench:
    """What a part works with: a loaded model, and how to turn a choice into settings."""

    given: Namespace
    machine: Machine
    facts: ModelFacts
    model: LoadedModel | None

    def settings(self, choice: Choice, number: int) -> RunSettings:
        """Settings of a choice for a prompt: with the predictor that was given, what is random drawn anew."""
        found = settle(_with_predictor(choice, self.given), self.facts, self.machine)
        dmpq = None if found.dmpq is None else replace(found.dmpq, seed=found.dmpq.seed + number)
        cache = None if found.cache is None else replace(found.cache, seed=found.cache.seed + number)
        return replace(found, dmpq=dmpq, cache=cache)

    def clip(self, prompt: Prompt, number: int) -> ClipSpec:
        """What to sample for a prompt."""
        size, frames = self.facts.size, self.facts.frames
        return ClipSpec(prompt.text, size, frames, steps=self.given.steps, seed=number)


@dataclass(frozen=True)
class Part:
    """One part of the benchmark.

    Attributes:
        prompts: how many the bars are defined on.
        measure: one prompt (and its number) to a row.
        conclude: all rows to the bars and a summary.
        loads: whether it needs a loaded model.
    """

    prompts: int
    measure: Callable[[Bench, Prompt, int], Row]
    conclude: Callable[[Sequence[Row]], tuple[dict[str, float], Row]]
    loads: bool = True


def run_part(given: Namespace, program: Sequence[str], command: str) -> None:
    """Measure what is left of a part, in this process or in workers, and write the results."""
    quiet_libraries()
    part = PARTS[given.part]
    count = given.prompts or part.prompts
    facts, machine = read_facts(given.model), find_machine(given.device)
    shard = None if given.shard is None else tuple(int(n) for n in given.shard.split("/"))
    predictor = settle(_with_predictor(BALANCED, given), facts, machine).predictor
    prompts = [Prompt(scene.caption, scene) for scene in sample_prompts(count, HELD_OUT_SEED)]
    what = {
        "part": given.part,
        "choices": digest(repr((UNSKIPPED, FIXED, SKIPS, TRAJECTORIES))),
        "fingerprint": facts.checkpoint.fingerprint,
        "predictor": None if predictor is None else digest(predictor.to_json()),
        "captions": digest(*(prompt.text for prompt in prompts)),
        "count": count,
        "steps": given.steps,
        "machine": f"{machine.device.type}: {machine.name}",
        "versions": versions(),
    }
    store = RowStore(given.out.with_name(f"{given.out.stem}-{given.part}.json"), what, shard)
    keys = [str(number) for number in range(count)]
    left = [key for key in mine(keys, shard) if key not in store.rows]

    def watch() -> None:
        store.load()
        print(f"\r{given.part}: {len(store.rows)} of {count}", end="", flush=True)

    if given.workers > 1 and shard is None and left:
        run_workers(program, given.workers, watch)
    elif left:
        model = load_model(given.model, None, "search", machine, facts=facts) if part.loads else None
        bench = Bench(given, machine, facts, model)
        for key in left:
            store.add(key, part.measure(bench, prompts[int(key)], int(key)))
            watch()
    if shard is None:
        rows = [store.rows[key] for key in keys]
        how = {
            "machine": f"{machine.device.type}: {machine.name}",
            "versions": versions(),
            "command": command,
            "date": datetime.date.today().isoformat(),
        }
        bars, summary = part.conclude(rows)
        if predictor is not None:
            summary["predictor"] = predictor.summary()
        _write(given.out, given.part, (bars, summary), rows, how)
        store.clear()


def _write(out: Path, name: str, concluded: tuple[dict[str, float], Row], rows: list[Row], how: Row) -> None:
    """Put a part's bars, rows and summary in place of those of an earlier run of it."""
    bars, summary = concluded
    old = (
        json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"bars": [], "rows": [], "parts": {}}
    )
    new_ids = {f"reference.{key}" for key in bars}
    kept_rows = [row for row in old["rows"] if row["part"] != name]
    new_bars = [{"id": f"reference.{key}", "value": value} for key, value in bars.items()]
    kept_bars = [bar for bar in old["bars"] if bar["id"] not in new_ids]
    result = {
        **how,
        "bars": sorted([*kept_bars, *new_bars], key=lambda bar: bar["id"]),
        "rows": [*kept_rows, *({"part": name, **row} for row in rows)],
        "parts": {**old["parts"], name: {**how, "summary": summary}},
    }
    write_json(out, result)
    print(f"\n{json.dumps({'bars': new_bars, 'summary': summary}, indent=1)}")


def _with_predictor(choice: Choice, given: Namespace) -> Choice:
    """The choice, with the predictor that was given where it has a use for one."""
    takes = choice.precision in ("dmpq", "w4a8", "w4a4")
    return replace(choice, predictor=given.predictor) if takes else choice


def _same(settings: RunSettings) -> str:
    """Equal for settings that give the same clip."""
    return repr((settings.precision == "full", settings.dmpq, settings.cache, settings.weights))


def _run(
    bench: Bench, settings: RunSettings, clip: ClipSpec, full: np.ndarray | None
) -> tuple[np.ndarray, Row]:
    """Frames of a configuration, and its bits, skips, seconds and closeness to `full`."""
    frames, run = sample_frames(bench.model, settings, clip)
    row = {name: getattr(run.report, name) for name in REPORTED}
    row |= {"router": run.report.router, "seconds": round(run.seconds, 3)}
    return frames, row | ({} if full is None else compare_clips(frames, full))


def _clips(choices: dict[str, Choice]) -> Callable[[Bench, Prompt, int], Row]:
    """A part that samples every configuration of a table beside full precision."""

    def measure(bench: Bench, prompt: Prompt, number: int) -> Row:
        clip = bench.clip(prompt, number)
        full = sample_frames(bench.model, None, clip)[0]
        settings = {name: bench.settings(choice, number) for name, choice in choices.items()}
        unlike = {_same(one): one for one in settings.values()}
        made = {key: _run(bench, one, clip, full)[1] for key, one in unlike.items()}
        return {"prompt": prompt.text} | {name: made[_same(one)] for name, one in settings.items()}

    return measure


def _mean(rows: Sequence[Row], name: str, what: str) -> Row:
    mean, low, high = bootstrap_mean([row[name][what] for row in rows])
    return {"mean": mean, "interval": [low, high]}


def _means(rows: Sequence[Row], names: Sequence[str], what: Sequence[str]) -> Row:
    return {name: {key: _mean(rows, name, key) for key in what} for name in names}


def _paired(rows: Sequence[Row], a: str, b: str, what: str = "psnr_db") -> Row:
    """Mean of a − b over the same prompts."""
    mean, low, high = bootstrap_mean([row[a][what] - row[b][what] for row in rows])
    return {"mean": mean, "interval": [low, high]}


def _accuracy(bench: Bench, prompt: Prompt, number: int) -> Row:
    clip = bench.clip(prompt, number)
    full = sample_frames(bench.model, None, clip)[0]
    frames, row = _run(bench, bench.settings(BALANCED, number), clip, full)
    return {
        "prompt": prompt.text,
        "full": score_frames(prompt, full),
        "six": score_frames(prompt, frames) | row,
    }


def _conclude_accuracy(rows: Sequence[Row]) -> tuple[dict[str, float], Row]:
    def right(row: Row, name: str) -> int:
        return int(all(row[name][kind] for kind in KINDS))

    counts = {kind: sum(row["full"][kind] for row in rows) for kind in KINDS}
    bars = {kind: 100 * count / len(rows) for kind, count in counts.items()}
    mean, low, high = bootstrap_mean([100 * (right(row, "six") - right(row, "full")) for row in rows])
    bars["accuracy_low"] = low
    shares = {
        name: {
            kind: {"share": sum(values) / len(rows), "interval": list(wilson(sum(values), len(rows)))}
            for kind, values in (
                *((kind, [int(row[name][kind]) for row in rows]) for kind in KINDS),
                ("joint", [right(row, name) for row in rows]),
            )
        }
        for name in ("full", "six")
    }
    six = {key: _mean(rows, "six", key) for key in ("psnr_db", *REPORTED)}
    return bars, {**shares, "joint_difference_points": {"mean": mean, "interval": [low, high]}, "run": six}


def _vae(bench: Bench, prompt: Prompt, number: int) -> Row:
    from sixbit_diffusion.reference.render import render

    clip = render(sample_scenes(1, number, "held-out"), torch.device("cpu"))[0]
    vae, model = bench.model.pipeline.vae, bench.model
    with torch.inference_mode():
        video = clip.permute(3, 0, 1, 2)[None].to(model.device, model.dtype) / 127.5 - 1
        latents = vae.encode(video).latent_dist.mode().permute(0, 2, 1, 3, 4)
        frames = model.decode(latents * vae.config.scaling_factor, clip.shape[0])
    return compare_clips(frames, clip.numpy())


def _conclude_vae(rows: Sequence[Row]) -> tuple[dict[str, float], Row]:
    mean, low, high = bootstrap_mean([row["psnr_db"] for row in rows])
    return {"vae_psnr": mean}, {"psnr_db": {"mean": mean, "interval": [low, high]}}


def _weights(bench: Bench, prompt: Prompt, number: int) -> Row:
    held = weight_bytes(build_transformer(bench.facts, "search", torch.device("cpu"), torch.bfloat16))
    full = full_precision_bytes(bench.facts)
    return {
        "dtype": "bfloat16",  # of all that is not NVFP4, in the numerator of everything
        "weight_bytes": held,
        "weight_bytes_full_precision": full,
        "ratio": full / held,
    }


def _conclude_dmpq(rows: Sequence[Row]) -> tuple[dict[str, float], Row]:
    summary = _means(rows, tuple(UNSKIPPED | FIXED), ("psnr_db", "average_activation_bits"))
    summary |= {
        f"gamma - {name}": _paired(rows, "gamma", name) for name in ("random", "static", "static-time")
    }
    return {"dmpq_bits": summary["dmpq"]["average_activation_bits"]["mean"]}, summary


SKIPS = {
    "dmpq": UNSKIPPED["dmpq"],
    "dmpq+tdc": replace(BALANCED, purified_refresh=False),
    "dmpq+tdc+pdr": BALANCED,
    "w4a8": FIXED["w4a8"],
    "w4a8+tdc+pdr": Choice(precision="w4a8", preset="balanced"),
    "tdc alone": Choice(precision="full", preset="balanced"),
}


def _conclude_skip(rows: Sequence[Row]) -> tuple[dict[str, float], Row]:
    summary = _means(rows, tuple(SKIPS), ("psnr_db", *REPORTED))
    against = _paired(rows, "dmpq+tdc+pdr", "w4a8")
    summary |= {"skipping - w4a8": against, "skipping - dmpq": _paired(rows, "dmpq+tdc+pdr", "dmpq")}
    summary["w4a8 skipping - w4a8"] = _paired(rows, "w4a8+tdc+pdr", "w4a8")
    summary["pdr on - off"] = _paired(rows, "dmpq+tdc+pdr", "dmpq+tdc")
    bars = {
        "full_vs_w4a8_db": against["mean"],
        "full_vs_unskipped_db": summary["skipping - dmpq"]["mean"],
        "w4a8_skipping_db": summary["w4a8 skipping - w4a8"]["mean"],
        "full_skipped": summary["dmpq+tdc+pdr"]["skipped_fraction"]["mean"],
        "skip_alone_db": summary["tdc alone"]["psnr_db"]["mean"],
    }
    return bars, summary


TRAJECTORIES = {**UNSKIPPED, **FIXED, "w4a16 nearest": FIXED["w4a16"], "dmpq+tdc+pdr": BALANCED}


def _trajectory(bench: Bench, prompt: Prompt, number: int) -> Row:
    recording = record(bench.model, bench.clip(prompt, number))
    row: Row = {"prompt": prompt.text}
    made: dict[str, Row] = {}
    for name, choice in TRAJECTORIES.items():
        settings = bench.settings(choice, number)
        if name.endswith("nearest"):
            settings = replace(settings, weights="rtn")
        if _same(settings) not in made:
            error, report = trajectory_error(bench.model, settings, recording)
            made[_same(settings)] = {
                "error": error,
                "average_activation_bits": report.average_activation_bits,
            }
        row[name] = made[_same(settings)]
    return row


def _conclude_trajectory(rows: Sequence[Row]) -> tuple[dict[str, float], Row]:
    summary = _means(rows, tuple(TRAJECTORIES), ("error", "average_activation_bits"))
    error = {name: summary[name]["error"]["mean"] for name in TRAJECTORIES}
    summary |= {
        f"gamma / {name}": error["gamma"] / error[name] for name in ("random", "static", "static-time")
    }
    return {"search_trajectory_ratio": error["w4a16"] / error["w4a16 nearest"]}, summary


def _repeat(bench: Bench, prompt: Prompt, number: int) -> Row:
    clip, settings = bench.clip(prompt, number), bench.settings(BALANCED, number)
    first, second = (sample(bench.model, settings, clip) for _ in range(2))
    return {"equal": torch.equal(first.latents, second.latents) and first.report == second.report}


PARTS = {
    "accuracy": Part(256, _accuracy, _conclude_accuracy),
    "vae": Part(64, _vae, _conclude_vae),
    "weights": Part(1, _weights, lambda rows: ({"weights_ratio": rows[0]["ratio"]}, rows[0]), loads=False),
    "dmpq": Part(16, _clips({**UNSKIPPED, **FIXED}), _conclude_dmpq),
    "skip": Part(16, _clips(SKIPS), _conclude_skip),
    "trajectory": Part(4, _trajectory, _conclude_trajectory),
    "repeat": Part(2, _repeat, lambda rows: ({}, {"equal": all(row["equal"] for row in rows)})),
}
