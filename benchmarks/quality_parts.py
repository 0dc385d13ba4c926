"""What `quality.py` runs: a part's methods prompt by prompt, or a solution, and the bars made of the rows."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import quality_bars as told
import quality_methods as table
from methods import Method
from parts import Bars, Bench, Job, Part, interval, means, paired, read_results, run_part, tied_to
from quality_bars import OUR_SKIP, OURS, WHOLE, Conclude, Rows
from quality_calibrate import GPTQ_FILE, PREDICTOR_FILE, TEACACHE_FILE, calibrate_model, digest_files
from quality_clips import full_latents, sampled
from quality_measure import Sampled, frames_of, needed, solve
from quality_methods import Solvable
from reference_parts import conclude_accuracy
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.evaluate import score_frames
from sixbit_diffusion.engine.facts import REFERENCE, reference_folder
from sixbit_diffusion.engine.prompts import HELD_OUT_SEED, TRAIN_SEED, Prompt
from sixbit_diffusion.engine.report import compare_clips
from sixbit_diffusion.engine.rows import Row, digest
from sixbit_diffusion.reference.world import sample_prompts
from sixbit_diffusion.sixbit_core.checkpoint import CheckpointError
from sixbit_diffusion.sixbit_core.predictor import load_predictor
from twins import write_twin

VALUES = ("psnr_db", "ssim", "flicker", "error", "own_psnr_db", "cost")
VALUES += ("average_activation_bits", "effective_activation_bits", "skipped_fraction")
FULL = "full"
MOST = 256  # prompts of the part that has most


class NotSolvedError(InputError):
    """A part's thresholds are not there yet."""


def run(given: Namespace, program: Sequence[str], command: str) -> int:
    """Run the part that was asked for; the exit code."""
    try:
        prepare(given)
        if given.part == "picture":
            draw_picture(given)
        elif given.part == "calibrate":
            calibrate_model(given, _prompts(given))
        else:
            run_part(given, make_job(given, program, command))
    except (InputError, CheckpointError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(given: Namespace) -> None:
    """Point `work` to the twin's own folder and `model` to the twin, which is written unless it is there."""
    given.work = given.work / f"s{given.twin}"
    if given.twin != 1 and given.part != "picture":
        source = reference_folder() if given.model == REFERENCE else Path(given.model)
        given.model = str(write_twin(source, given.work / "pipeline", given.twin))


def make_job(given: Namespace, program: Sequence[str], command: str) -> Job:
    """A part of a prepared command line. NotSolvedError where it needs thresholds that are not there."""
    found = given.work / PREDICTOR_FILE
    given.predictor = found if found.is_file() else None
    part, files = PARTS[given.part](given), digest_files(given.work)
    given.tied = repr((files, given.predictor and digest(found.read_text(encoding="utf-8"))))
    part = replace(part, identity=part.identity + files)
    return Job(_name(given, given.part), "quality", part, _prompts(given), program, command)


def draw_picture(given: Namespace) -> None:
    """Draw what stands in the results. InputError where there is nothing to draw, or nothing to draw with."""
    try:
        from quality_picture import draw
    except ModuleNotFoundError as error:
        raise InputError(f"the picture needs {error.name}; draw it elsewhere by --part picture") from error
    draw(read_results(given.out), given.twin, given.steps, given.out.with_suffix(".png"))


def _prompts(given: Namespace) -> list[Prompt]:
    """The first prompts of as many as any part has: all parts measure the same ones."""
    training = given.part.startswith(("solve", "calibrate"))
    scenes = sample_prompts(MOST, TRAIN_SEED if training else HELD_OUT_SEED, not training)
    return [Prompt(scene.caption, scene) for scene in scenes[: given.prompts]]


def _sampled(given: Namespace, methods: Sequence[Method], conclude: Conclude) -> Part:
    by_name = {method.name: method for method in methods}
    if any(getattr(method, "weights", None) == table.GPTQ for method in methods):
        needed(given.work / GPTQ_FILE)  # the last that calibration writes: none begins beside it
    part = Sampled(by_name, given.followed)
    identity = repr((sorted(method.identity for method in methods), given.followed))

    def whole(rows: Rows) -> tuple[Bars, Row]:
        summary = means(rows, list(by_name), VALUES)
        summary["differences"] = told.differences(rows, OURS[given.part], by_name)
        if given.part in ("skips", "cached"):
            summary["short of the share"] = told.short(rows, given.share)
        if not _published(given):
            return {}, summary
        bars = conclude(rows)
        withheld = {bar: why for bar in bars if (why := told.withheld(bar, rows)) is not None}
        for bar, why in withheld.items():
            print(f"\nquality: no bar {bar}, {why}", file=sys.stderr)
        return {**bars, **dict.fromkeys(withheld)}, {**summary, "no bars": withheld}

    return Part(_numbers(given), list(by_name), part.measure, whole, identity)


def _solving(given: Namespace, solvables: Mapping[str, Solvable]) -> Part:
    def measure(bench: Bench, group: str, units: Sequence[str]) -> Iterator[tuple[str, Row]]:
        solvable = solvables[group]
        clips = [bench.clip(prompt, number) for number, prompt in enumerate(bench.prompts)]
        embeds = [bench.model.encode(clip.prompt, clip.negative, clip.guided) for clip in clips]

        def run_once(value: float) -> float:
            method = solvable.make(value)
            rows = [sampled(bench, method, *pair)[1] for pair in zip(clips, embeds, strict=True)]
            return sum(row[solvable.what] for row in rows) / len(rows)

        yield "", solve(solvable, run_once) | {"method": group}

    def conclude(rows: Rows) -> tuple[Bars, Row]:
        return {}, {row[""]["method"]: row[""] for row in rows}

    targets = {name: (one.target, one.low, one.high, one.tolerance) for name, one in solvables.items()}
    return Part(list(solvables), ("",), measure, conclude, repr(targets))


def _accuracy(given: Namespace) -> Part:
    methods = {method.name: method for method in table.whole_methods()}

    def measure(bench: Bench, group: str, names: Sequence[str]) -> Iterator[tuple[str, Row]]:
        prompt, number = bench.prompts[int(group)], int(group)
        clip = bench.clip(prompt, number)
        embeds = bench.model.encode(clip.prompt, clip.negative, clip.guided)
        full = frames_of(bench, clip, full_latents(bench, clip, embeds))
        yield FULL, score_frames(prompt, full)
        latents, row = sampled(bench, methods[WHOLE], clip, embeds)
        frames = frames_of(bench, clip, latents)
        yield WHOLE, {**row, **score_frames(prompt, frames), **compare_clips(frames, full)}

    def conclude(rows: Rows) -> tuple[Bars, Row]:
        bars, summary = conclude_accuracy([{"full": row[FULL], "six": row[WHOLE]} for row in rows])
        return ({"accuracy_low": bars["accuracy_low"]} if _published(given) else {}), summary

    return Part(_numbers(given), (FULL, WHOLE), measure, conclude, methods[WHOLE].identity)


PARTS: dict[str, Callable[[Namespace], Part]] = {
    "solve-routers": lambda given: _solving(
        given, table.to_solve_routers(given.bits, load_predictor(needed(given.work / PREDICTOR_FILE)))
    ),
    "solve-skips": lambda given: _solving(given, table.to_solve_skips(given.share, _teacache(given))),
    "weights": lambda given: _sampled(given, table.weights_methods(), told.weights),
    "routers": lambda given: _sampled(
        given, table.router_methods(given.bits, _solved(given, "solve-routers")), told.routers
    ),
    "skips": lambda given: _sampled(
        given, table.skip_methods(given.share, _solved(given, "solve-skips"), _teacache(given)), told.skips
    ),
    "cached": lambda given: _sampled(
        given,
        table.cached_methods(_solved(given, "solve-skips")),
        lambda rows: {"skip_cost_db": paired(rows, f"w4a8 {OUR_SKIP}", "w4a8")["mean"]},
    ),
    "rivals": lambda given: _sampled(given, table.rival_methods(given.work), lambda rows: {}),
    "whole": lambda given: _sampled(
        given,
        table.whole_methods(),
        lambda rows: {"cost": interval([r[WHOLE]["cost"] for r in rows])["mean"]},
    ),
    "accuracy": _accuracy,
}
SOLVED_BY = {  # part -> the part that solves its thresholds
    **dict.fromkeys(PARTS),
    "routers": "solve-routers",
    "skips": "solve-skips",
    "cached": "solve-skips",
}
LEVELS = {
    "solve-routers": "bits",
    "routers": "bits",
    "solve-skips": "share",
    "skips": "share",
    "cached": "share",
}


def _name(given: Namespace, part: str) -> str:
    """A part's name in the results: with the twin, the steps and, where it has one, the level."""
    level = f"-{getattr(given, LEVELS[part]):g}" if part in LEVELS else ""
    return f"{part}-s{given.twin}-{given.steps}{level}"


def _published(given: Namespace) -> bool:
    """Whether it is the set-up that the bars are defined on."""
    level = (given.twin, given.steps, given.bits, given.share)
    return not given.trial and level == (1, 50, 6.0, 0.46)


def _numbers(given: Namespace) -> list[str]:
    return [str(number) for number in range(given.prompts)]


def _solved(given: Namespace, part: str) -> dict[str, float]:
    name = _name(given, part)
    found = read_results(given.out)["parts"].get(name)
    if found is None:
        raise NotSolvedError(f"{given.out} has no {name}; run --part {part} with the same options first")
    if found.get("of") != tied_to(given):
        raise NotSolvedError(
            f"{name} in {given.out} is of another model or predictor; run --part {part} again"
        )
    return {method: row["value"] for method, row in found["summary"].items() if "value" in row}


def _teacache(given: Namespace) -> list[float]:
    return json.loads(needed(given.work / TEACACHE_FILE).read_text(encoding="utf-8"))
