"""How `quality.py` measures: methods on a prompt beside full precision, and a number that meets a target."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from methods import Method, Ours
from parts import Bench
from quality_calibrate import GPTQ_FILE
from quality_methods import GPTQ, Solvable
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.facts import read_facts
from sixbit_diffusion.engine.pipeline import TextEmbeds
from sixbit_diffusion.engine.report import compare_clips
from sixbit_diffusion.engine.rows import Row
from sixbit_diffusion.engine.sample import ClipSpec, sample
from sixbit_diffusion.engine.trajectory import record
from sixbit_diffusion.engine.transformer import build_transformer
from sixbit_diffusion.sixbit_core.metrics import flicker, psnr

TRIES = 12  # runs that a solution may take


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
        recording = record(bench.model, clip, embeds) if number < self.followed else None
        latents = sample(bench.model, None, clip, embeds).latents if recording is None else recording.latents
        full, made = frames_of(bench, clip, latents), {}
        ready = partial(self._clip, bench, clip, embeds, made)
        for name in names:
            method = self.methods[name]
            frames, row = ready(name)
            row = {**row, **compare_clips(frames, full), "flicker": flicker(*_tensors(frames, full))}
            if method.baseline is not None:
                row["own_psnr_db"] = psnr(*_tensors(frames, ready(method.baseline)[0]))
            if recording is not None:
                row["error"] = method.follow(bench, recording)
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
            latents, row = self.methods[name].sample(bench, clip, embeds)
            made[name] = (frames_of(bench, clip, latents), row)
        return made[name]


def solve(solvable: Solvable, run_once: Callable[[float], float]) -> Row:
    """Halve an interval until the value is within its tolerance; the best number tried.

    Args:
        solvable: what is looked for, and where.
        run_once: number -> value.
    """
    to, back = (math.log, math.exp) if solvable.logarithmic else (float, float)
    low, high = to(solvable.low), to(solvable.high)
    best: Row = {}
    runs = 0
    while runs < TRIES:
        middle, runs = (low + high) / 2, runs + 1
        value = back(middle)
        reached = run_once(value)
        if not best or abs(reached - solvable.target) < abs(best["reached"] - solvable.target):
            best = {"value": value, "reached": reached, "target": solvable.target}
        if abs(reached - solvable.target) <= solvable.tolerance:
            break
        if (reached < solvable.target) == solvable.rising:
            low = middle
        else:
            high = middle
    return {**best, "runs": runs}


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
