"""What `reference.py` measures: configurations run prompt by prompt, and the bars made of their rows."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from parts import BALANCED, FIXED, Bars, Bench, Job, Part, interval, means, paired, run_part
from sixbit_diffusion.engine.evaluate import KINDS, score_frames
from sixbit_diffusion.engine.intervals import bootstrap_mean, wilson
from sixbit_diffusion.engine.prompts import HELD_OUT_SEED, Prompt
from sixbit_diffusion.engine.report import compare_clips
from sixbit_diffusion.engine.rows import Row
from sixbit_diffusion.engine.sample import ClipSpec, sample, sample_frames
from sixbit_diffusion.engine.settings import Choice, RunSettings
from sixbit_diffusion.engine.trajectory import record, trajectory_error
from sixbit_diffusion.engine.transformer import build_transformer, full_precision_bytes, weight_bytes
from sixbit_diffusion.reference.world import sample_prompts, sample_scenes

REPORTED = ("average_activation_bits", "effective_activation_bits", "skipped_fraction")
ROUTED = {name: replace(BALANCED, router=name) for name in ("gamma", "static", "static-time", "random")}
UNSKIPPED = {name: replace(choice, cache="off") for name, choice in {"dmpq": BALANCED, **ROUTED}.items()}


def run(given: Namespace, program: Sequence[str], command: str) -> None:
    """Run the part that was asked for."""
    count, part = given.prompts or PROMPTS[given.part], PARTS[given.part]
    prompts = [Prompt(scene.caption, scene) for scene in sample_prompts(count, HELD_OUT_SEED)]
    part = replace(part, groups=[str(number) for number in range(count)])
    run_part(given, Job(given.part, "reference", part, prompts, program, command))


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


def _accuracy(bench: Bench, prompt: Prompt, number: int) -> Row:
    clip = bench.clip(prompt, number)
    full = sample_frames(bench.model, None, clip)[0]
    frames, row = _run(bench, bench.settings(BALANCED, number), clip, full)
    return {
        "prompt": prompt.text,
        "full": score_frames(prompt, full),
        "six": score_frames(prompt, frames) | row,
    }


def conclude_accuracy(rows: Sequence[Row]) -> tuple[Bars, Row]:
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
    six = {key: interval([row["six"][key] for row in rows]) for key in ("psnr_db", *REPORTED)}
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


def _conclude_vae(rows: Sequence[Row]) -> tuple[Bars, Row]:
    found = interval([row["psnr_db"] for row in rows])
    return {"vae_psnr": found["mean"]}, {"psnr_db": found}


def _weights(bench: Bench, prompt: Prompt, number: int) -> Row:
    held = weight_bytes(build_transformer(bench.facts, "search", torch.device("cpu"), torch.bfloat16))
    full = full_precision_bytes(bench.facts)
    return {
        "dtype": "bfloat16",  # of all that is not NVFP4, in the numerator of everything
        "weight_bytes": held,
        "weight_bytes_full_precision": full,
        "ratio": full / held,
    }


def _conclude_dmpq(rows: Sequence[Row]) -> tuple[Bars, Row]:
    summary = means(rows, tuple(UNSKIPPED | FIXED), ("psnr_db", "average_activation_bits"))
    summary |= {
        f"gamma - {name}": paired(rows, "gamma", name) for name in ("random", "static", "static-time")
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


def _conclude_skip(rows: Sequence[Row]) -> tuple[Bars, Row]:
    summary = means(rows, tuple(SKIPS), ("psnr_db", *REPORTED))
    against = paired(rows, "dmpq+tdc+pdr", "w4a8")
    summary |= {"skipping - w4a8": against, "skipping - dmpq": paired(rows, "dmpq+tdc+pdr", "dmpq")}
    summary["w4a8 skipping - w4a8"] = paired(rows, "w4a8+tdc+pdr", "w4a8")
    summary["pdr on - off"] = paired(rows, "dmpq+tdc+pdr", "dmpq+tdc")
    bars = {
        "full_vs_w4a8_db": against["mean"],
        "full_vs_unskipped_db": summary["skipping - dmpq"]["mean"],
        "w4a8_skipping_db": summary["w4a8 skipping - w4a8"]["mean"],
        "full_skipped": summary["dmpq+tdc+pdr"]["skipped_fraction"]["mean"],
        "skip_alone_db": summary["tdc alone"]["psnr_db"]["mean"],
    }
    return bars, summary


PLACES = ("gpu", "gpu-int8", "gpu-nvfp4")
CACHES = {
    f"{precision}, {place}": Choice(precision=precision, preset="balanced", cache_location=place)
    for precision in ("w4a8", "full")
    for place in PLACES
}


def _conclude_cache(rows: Sequence[Row]) -> tuple[Bars, Row]:
    summary = means(rows, tuple(CACHES), ("psnr_db", "skipped_fraction"))
    for precision in ("w4a8", "full"):
        for place in PLACES[1:]:
            name = f"{precision}, {place}"
            summary[f"{name} - gpu"] = paired(rows, name, f"{precision}, gpu")
    return {}, summary


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


def _conclude_trajectory(rows: Sequence[Row]) -> tuple[Bars, Row]:
    summary = means(rows, tuple(TRAJECTORIES), ("error", "average_activation_bits"))
    error = {name: summary[name]["error"]["mean"] for name in TRAJECTORIES}
    summary |= {
        f"gamma / {name}": error["gamma"] / error[name] for name in ("random", "static", "static-time")
    }
    return {"search_trajectory_ratio": error["w4a16"] / error["w4a16 nearest"]}, summary


def _repeat(bench: Bench, prompt: Prompt, number: int) -> Row:
    clip, settings = bench.clip(prompt, number), bench.settings(BALANCED, number)
    first, second = (sample(bench.model, settings, clip) for _ in range(2))
    return {"equal": torch.equal(first.latents, second.latents) and first.report == second.report}


def _part(
    measure: Callable[[Bench, Prompt, int], Row],
    conclude: Callable[[Sequence[Row]], tuple[Bars, Row]],
    loads: bool = True,
) -> Part:
    """A part with one row a prompt."""

    def only(bench: Bench, group: str, units: Sequence[str]) -> Iterator[tuple[str, Row]]:
        yield "", measure(bench, bench.prompts[int(group)], int(group))

    def plainly(rows: Sequence[Mapping[str, Row]]) -> tuple[Bars, Row]:
        return conclude([row[""] for row in rows])

    return Part((), ("",), only, plainly, repr((UNSKIPPED, FIXED, SKIPS, CACHES, TRAJECTORIES)), loads)


PARTS = {
    "accuracy": _part(_accuracy, conclude_accuracy),
    "vae": _part(_vae, _conclude_vae),
    "weights": _part(_weights, lambda rows: ({"weights_ratio": rows[0]["ratio"]}, rows[0]), loads=False),
    "dmpq": _part(_clips({**UNSKIPPED, **FIXED}), _conclude_dmpq),
    "skip": _part(_clips(SKIPS), _conclude_skip),
    "cache": _part(_clips(CACHES), _conclude_cache),
    "trajectory": _part(_trajectory, _conclude_trajectory),
    "repeat": _part(_repeat, lambda rows: ({}, {"equal": all(row["equal"] for row in rows)})),
}
PROMPTS = {
    "accuracy": 256,
    "vae": 64,
    "weights": 1,
    "dmpq": 16,
    "skip": 16,
    "cache": 8,
    "trajectory": 4,
    "repeat": 2,
}
"""How many the bars are defined on."""
