"""What `quality.py` runs: a part's methods prompt by prompt, or a solution, and the bars made of the rows."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import quality_methods as table
from methods import Method
from parts import Bars, Bench, Job, Part, interval, means, paired, read_results, run_part, tied_to
from quality_calibrate import PREDICTOR_FILE, TEACACHE_FILE, calibrate_model, digest_files
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

OUR_ROUTER, OUR_SKIP, WHOLE = "gamma", "error-budget", "whole"  # what ships as the default
VALUES = ("psnr_db", "ssim", "flicker", "error", "own_psnr_db", "cost")
VALUES += ("average_activation_bits", "effective_activation_bits", "skipped_fraction")
FULL = "full"
MOST = 256  # prompts of the part that has most
BITS, SHARE = "average_activation_bits", "skipped_fraction"
EQUAL = {  # bar -> what it takes to be equal, and of which methods
    "router_vs_random": (BITS, (OUR_ROUTER, "random")),
    "router_vs_static": (BITS, (OUR_ROUTER, "static")),
    "skip_vs_random_db": (SHARE, (OUR_SKIP, "random")),
    "skip_vs_fewer_steps_db": (SHARE, (OUR_SKIP, table.FEWER)),
    "skip_vs_step_cache_db": (SHARE, (OUR_SKIP, table.EASY, table.TEA)),
}
UNEQUAL = 0.02  # bits, or share: a greater difference is not equal
SKIPS_ENOUGH = {bar: OUR_SKIP for bar in ("skip_alone_db", *EQUAL) if bar.startswith("skip")}
SKIPS_ENOUGH["skip_cost_db"] = f"w4a8 {OUR_SKIP}"
ENOUGH = 0.45  # share that these bars speak of
SHORT = 0.01  # of the asked-for share, from which on a method is listed as short of it
OURS = {  # part -> the method that the others are held against in its summary
    "weights": "w4a16 gptq",
    "routers": OUR_ROUTER,
    "skips": OUR_SKIP,
    "cached": f"w4a8 {OUR_SKIP}",
    "rivals": "w4a8",
    "whole": WHOLE,
}
Rows = Sequence[Mapping[str, Row]]
Conclude = Callable[[Rows], Bars]


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
    """Draw what stands in the results."""
    from quality_picture import draw

    draw(read_results(given.out), given.twin, given.steps, given.out.with_suffix(".png"))


def _prompts(given: Namespace) -> list[Prompt]:
    """The first prompts of as many as any part has: all parts measure the same ones."""
    training = given.part.startswith(("solve", "calibrate"))
    scenes = sample_prompts(MOST, TRAIN_SEED if training else HELD_OUT_SEED, not training)
    return [Prompt(scene.caption, scene) for scene in scenes[: given.prompts]]


def _sampled(given: Namespace, methods: Sequence[Method], conclude: Conclude) -> Part:
    by_name = {method.name: method for method in methods}
    part = Sampled(by_name, given.followed)
    identity = repr((sorted(method.identity for method in methods), given.followed))

    def whole(rows: Rows) -> tuple[Bars, Row]:
        summary = means(rows, list(by_name), VALUES)
        summary["differences"] = _differences(rows, OURS[given.part], by_name)
        if given.part in ("skips", "cached"):
            summary["short of the share"] = _short(rows, given.share)
        if not _published(given):
            return {}, summary
        bars = conclude(rows)
        withheld = {bar: why for bar in bars if (why := _withheld(bar, rows)) is not None}
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


def _withheld(bar: str, rows: Rows) -> str | None:
    """Why a bar cannot be made of the rows: methods too far apart, or too little skipped."""
    what, names = EQUAL.get(bar, ("", ()))
    found = {name: _mean(rows, name, what) for name in names}
    if found:
        low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        if round(found[high] - found[low], 6) > UNEQUAL:
            apart = f"more than {UNEQUAL} apart"
            return f"{what} is {found[low]:.3f} of {low} but {found[high]:.3f} of {high}, {apart}"
    if bar in SKIPS_ENOUGH and (share := _mean(rows, SKIPS_ENOUGH[bar], SHARE)) < ENOUGH:
        return f"{SKIPS_ENOUGH[bar]} skips {share:.3f}, less than {ENOUGH}"
    return None


def _short(rows: Rows, share: float) -> Row:
    """Methods that skip less than was asked for, with the share that they had."""
    found = {name: _mean(rows, name, SHARE) for name in rows[0]}
    return {name: had for name, had in found.items() if 0 < had < share - SHORT}


def _differences(rows: Rows, ours: str, names: Iterable[str]) -> Row:
    """What `ours` is better or worse than each other method by, on the same prompts."""
    found: Row = {}
    for name in names:
        if name != ours:
            both = [row for row in rows if all(row[n].get("error") is not None for n in (ours, name))]
            error = {"error": paired(both, ours, name, "error")} if both else {}
            found[f"{ours} - {name}"] = {"psnr_db": paired(rows, ours, name)} | error
    return found


def _mean(rows: Rows, name: str, what: str) -> float:
    return sum(row[name][what] for row in rows) / len(rows)


def _error(rows: Rows, name: str) -> float:
    return interval([row[name]["error"] for row in rows if row[name].get("error") is not None])["mean"]


PARTS: dict[str, Callable[[Namespace], Part]] = {
    "solve-routers": lambda given: _solving(
        given, table.to_solve_routers(given.bits, load_predictor(needed(given.work / PREDICTOR_FILE)))
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
