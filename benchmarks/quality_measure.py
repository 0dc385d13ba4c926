"""How `quality.py` measures: methods on a prompt beside full precision, and a number that meets a target."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from methods import Method, Ours
from parts import Bench
from quality_calibrate import GPTQ_FILE
from quality_clips import followed, full_latents, sampled
from quality_methods import GPTQ, Solvable
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.facts import read_facts
from sixbit_diffusion.engine.pipeline import TextEmbeds
from sixbit_diffusion.engine.report import compare_clips
from sixbit_diffusion.engine.rows import Row
from sixbit_diffusion.engine.sample import ClipSpec
from sixbit_diffusion.engine.trajectory import record
from sixbit_diffusion.engine.transformer import build_transformer
from sixbit_diffusion.sixbit_core.metrics import flicker, psnr

TRIES = 10  # runs that a solution may take


@dataclass(frozen=True)
class Sampled:
    """The units of a part whose rows are clips: methods, held against full precision and their baselines."""

    methods: Mapping[str, Method]
    followed: int

    def measure(self, bench: Bench, group: str, names: Sequence[str]) -> Iterator[tuple[str, Row]]:
        """The methods' rows of a prompt."""
        prompt, number = bench.prompts[int(group)], int(group)
        clip = bench.clip(prompt, number)
        embeds = bench.model.encode(clip.prompt, clip.negative, clip.guided)
        recorded = cache(partial(record, bench.model, clip, embeds)) if number < self.followed else None
        full, made = frames_of(bench, clip, full_latents(bench, clip, embeds, recorded)), {}
        ready = partial(self._clip, bench, clip, embeds, made)
        for name in names:
            method = self.methods[name]
            frames, row = ready(name)
            row = {**row, **compare_clips(frames, full), "flicker": flicker(*_tensors(frames, full))}
            if method.baseline is not None:
                row["own_psnr_db"] = psnr(*_tensors(frames, ready(method.baseline)[0]))
            if recorded is not None:
                row["error"] = followed(bench, method, clip, recorded)
            yield name, row

    def _clip(
        self,
        bench: Bench,
        clip: ClipSpec,
        embeds: TextEmbeds,
        made: dict[str, tuple[np.ndarray, Row]],
        name: str,
    ) -> tuple[np.ndarray, Row]:
        """Frames of a method and what its run told, made once."""
        if name not in made:
            _prepare(bench, self.methods[name])
            latents, row = sampled(bench, self.methods[name], clip, embeds)
            made[name] = (frames_of(bench, clip, latents), row)
        return made[name]


def solve(solvable: Solvable, run_once: Callable[[float], float]) -> Row:
    """Narrow an interval until the value is within its tolerance; the best number tried.

    Every second time the interval is not halved but cut where a line through its ends meets the target.

    Args:
        solvable: what is looked for, and where.
        run_once: number -> value.
    """
    to, back = (math.log, math.exp) if solvable.logarithmic else (float, float)
    ends = [(to(solvable.low), None), (to(solvable.high), None)]
    best: Row = {}
    runs = 0
    while runs < TRIES:
        where, runs = _between(ends, solvable.target, straight=runs % 2 == 1), runs + 1
        value = back(where)
        reached = run_once(value)
        if not best or abs(reached - solvable.target) < abs(best["reached"] - solvable.target):
            best = {"value": value, "reached": reached, "target": solvable.target}
        if abs(reached - solvable.target) <= solvable.tolerance:
            break
        ends[(reached < solvable.target) != solvable.rising] = (where, reached)
    return {**best, "runs": runs}


def _between(ends: Sequence[tuple[float, float | None]], target: float, straight: bool) -> float:
    """A place between two, whose values are known where they were tried."""
    (low, at_low), (high, at_high) = ends
    if not straight or at_low is None or at_high is None or at_low == at_high:
        return (low + high) / 2
    share = (target - at_low) / (at_high - at_low)
    return low + min(0.95, max(0.05, share)) * (high - low)


def needed(path: Path) -> Path:
    """The path. InputError unless calibration left a file there."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; run --part calibrate for this --twin and --work first")
    return path


def _prepare(bench: Bench, method: Method) -> None:
    """Load the GPTQ weights that calibration made, where the method runs by them."""
    if isinstance(method, Ours) and method.weights == GPTQ and GPTQ not in bench.model.transformers:
        facts = read_facts(str(needed(bench.given.work / GPTQ_FILE)), bench.facts.folder)
        built = build_transformer(facts, GPTQ, bench.model.device, bench.model.dtype)
        bench.model.transformers[GPTQ] = built


def frames_of(bench: Bench, clip: ClipSpec, latents: torch.Tensor) -> np.ndarray:
    """Latents decoded to (T, H, W, 3) uint8."""
    return bench.model.decode(latents, clip.frames)


def _tensors(*clips: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(clip) for clip in clips]
