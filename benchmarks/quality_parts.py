"""What `quality.py` runs: a part's methods prompt by prompt, or a solution, and the bars made of the rows."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import quality_methods as table
from methods import Method
from parts import Bars, Bench, Job, Part, interval, means, paired, read_results, run_part, tied_to
from quality_calibrate import TEACACHE_FILE, calibrate_model, digest_files
from quality_measure import Sampled, frames_of, needed, solve
from quality_methods import Solvable
from reference_parts import conclude_accuracy
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.evaluate import score_frames
from sixbit_diffusion.engine.facts import REFERENCE, reference_folder
from sixbit_diffusion.engine.prompts import HELD_OUT_SEED, TRAIN_SEED, Prompt
from sixbit_diffusion.engine.report import compare_clips
from sixbit_diffusion.engine.rows import Row
from sixbit_diffusion.engine.sample import sample
from sixbit_diffusion.reference.world import sample_prompts
from sixbit_diffusion.sixbit_core.checkpoint import CheckpointError
from sixbit_diffusion.sixbit_core.predictor import load_predictor
from twins import write_twin

OUR_ROUTER, OUR_SKIP, WHOLE = "gamma", "error-budget", "whole"  # what ships as the default
VALUES = ("psnr_db", "ssim", "flicker", "error", "own_psnr_db", "cost")
VALUES += ("average_activation_bits", "effective_activation_bits", "skipped_fraction")
FULL = "full"
EQUAL = {  # part -> what its bars take to be equal, and of which methods
    "routers": ("average_activation_bits", (OUR_ROUTER, "random", "static")),
    "skips": ("skipped_fraction", (OUR_SKIP, "random", table.FEWER, table.EASY, table.TEA)),
}
UNEQUAL = 0.02  # bits, or share: a greater difference is not equal
Rows = Sequence[Mapping[str, Row]]
Conclude = Callable[[Rows], Bars]


def run(given: Namespace, program: Sequence[str], command: str) -> int:
    """Run the part that was asked for; the exit code."""
    given.work = given.work / f"s{given.twin}"
    try:
        if given.part == "picture":
            from quality_picture import draw

            draw(read_results(given.out), given.twin, given.steps, given.out.with_suffix(".png"))
            return 0
        if given.twin != 1:
            source = reference_folder() if given.model == REFERENCE else Path(given.model)
            given.model = str(write_twin(source, given.work / "pipeline", given.twin))
        training = given.part.startswith(("solve", "calibrate"))
        scenes = sample_prompts(given.prompts, TRAIN_SEED if training else HELD_OUT_SEED, not training)
        prompts = [Prompt(scene.caption, scene) for scene in scenes]
        if given.part == "calibrate":
            calibrate_model(given, prompts)
            return 0
        found = given.work / "predictor.json"
        given.predictor = found if found.is_file() else None
        part = PARTS[given.part](given)
        part = replace(part, identity=part.identity + digest_files(given.work))
        run_part(given, Job(_name(given, given.part), "quality", part, prompts, program, command))
    except (InputError, CheckpointError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2
    return 0


def _sampled(given: Namespace, methods: Sequence[Method], conclude: Conclude) -> Part:
    by_name = {method.name: method for method in methods}
    part = Sampled(by_name, given.followed)
    identity = repr((sorted(method.identity for method in methods), given.followed))

    def whole(rows: Rows) -> tuple[Bars, Row]:
        summary = means(rows, list(by_name), VALUES)
        if not _published(given):
            return {}, summary
        bars, unequal = conclude(rows), _unequal(given.part, rows)
        if unequal is None:
            return bars, summary
        print(f"\nquality: no bars for {given.part}, {unequal}", file=sys.stderr)
        return dict.fromkeys(bars), {**summary, "no bars": unequal}

    return Part(_numbers(given), list(by_name), part.measure, whole, identity)


def _solving(given: Namespace, solvables: Mapping[str, Solvable]) -> Part:
    def measure(bench: Bench, group: str, units: Sequence[str]) -> Iterator[tuple[str, Row]]:
        solvable = solvables[group]
        clips = [bench.clip(prompt, number) for number, prompt in enumerate(bench.prompts)]
        embeds = [bench.model.encode(clip.prompt, clip.negative, clip.guided) for clip in clips]

        def run_once(value: float) -> float:
            method = solvable.make(value)
            rows = [method.sample(bench, *pair)[1] for pair in zip(clips, embeds, strict=True)]
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
        full = frames_of(bench, clip, sample(bench.model, None, clip, embeds).latents)
        yield FULL, score_frames(prompt, full)
        latents, row = methods[WHOLE].sample(bench, clip, embeds)
        frames = frames_of(bench, clip, latents)
        yield WHOLE, {**row, **score_frames(prompt, frames), **compare_clips(frames, full)}

    def conclude(rows: Rows) -> tuple[Bars, Row]:
        bars, summary = conclude_accuracy([{"full": row[FULL], "six": row[WHOLE]} for row in rows])
        return ({"accuracy_low": bars["accuracy_low"]} if _published(given) else {}), summary

    return Part(_numbers(given), (FULL, WHOLE), measure, conclude, methods[WHOLE].identity)


def _weights(rows: Rows) -> Bars:
    return {
        "w4a16_trajectory_ratio": _error(rows, "w4a16 gptq") / _error(rows, "w4a16 rtn"),
        "w4a16_gain_db": paired(rows, "w4a16 gptq", "w4a16 rtn")["mean"],
    }


def _routers(rows: Rows) -> Bars:
    ours = _error(rows, OUR_ROUTER)
    return {f"router_vs_{name}": ours / _error(rows, name) for name in ("random", "static")}


def _skips(rows: Rows) -> Bars:
    def against(name: str) -> float:
        return paired(rows, OUR_SKIP, name)["mean"]

    return {
        "skip_alone_db": interval([row[OUR_SKIP]["psnr_db"] for row in rows])["mean"],
        "skip_vs_random_db": against("random"),
        "skip_vs_fewer_steps_db": against(table.FEWER),
        "skip_vs_step_cache_db": min(against(table.EASY), against(table.TEA)),
    }


def _unequal(part: str, rows: Rows) -> str | None:
    """Which of the methods that the bars compare are furthest apart, where that is too far."""
    what, names = EQUAL.get(part, ("", ()))
    found = {name: sum(row[name][what] for row in rows) / len(rows) for name in names}
    if not found:
        return None
    low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
    if round(found[high] - found[low], 6) <= UNEQUAL:
        return None
    return f"{what} is {found[low]:.3f} of {low} but {found[high]:.3f} of {high}, more than {UNEQUAL} apart"


def _error(rows: Rows, name: str) -> float:
    return interval([row[name]["error"] for row in rows if row[name].get("error") is not None])["mean"]


PARTS: dict[str, Callable[[Namespace], Part]] = {
    "solve-routers": lambda given: _solving(
        given, table.to_solve_routers(given.bits, load_predictor(needed(given.work / "predictor.json")))
    ),
    "solve-skips": lambda given: _solving(given, table.to_solve_skips(given.share, _teacache(given))),
    "weights": lambda given: _sampled(given, table.weights_methods(), _weights),
    "routers": lambda given: _sampled(
        given, table.router_methods(given.bits, _solved(given, "solve-routers")), _routers
    ),
    "skips": lambda given: _sampled(
        given, table.skip_methods(given.share, _solved(given, "solve-skips"), _teacache(given)), _skips
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
    return not given.trial and level == (1, 50, 6.0, 0.3)


def _numbers(given: Namespace) -> list[str]:
    return [str(number) for number in range(given.prompts)]


def _solved(given: Namespace, part: str) -> dict[str, float]:
    name = _name(given, part)
    found = read_results(given.out)["parts"].get(name)
    if found is None:
        raise InputError(f"{given.out} has no {name}; run --part {part} with the same options first")
    if found.get("of") != tied_to(given):
        raise InputError(f"{name} in {given.out} is of another model or predictor; run --part {part} again")
    return {method: row["value"] for method, row in found["summary"].items() if "value" in row}


def _teacache(given: Namespace) -> list[float]:
    return json.loads(needed(given.work / TEACACHE_FILE).read_text(encoding="utf-8"))
