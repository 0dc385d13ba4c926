"""Calibrate a MODEL by the host's own sampling: measure the errors of its linears, then solve thresholds.

W4A8 runs, one a prompt, record Γ and errors (`calibration_run`); then whole runs at trial thresholds solve θ
for `BITS`, without and with the delta cache (`calibrate`). The same request gives the same predictor.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sample
import comfy.utils
import torch
from comfy.patcher_extension import WrappersMP

from ..sixbit_core.calibrate import fit_predictor
from ..sixbit_core.calibration_run import BlockRecord, CalibrationRun, FullWeight, LinearRecord
from ..sixbit_core.checkpoint import Checkpoint
from ..sixbit_core.config import PRESETS, DMPQConfig
from ..sixbit_core.predictor import Predictor
from ..sixbit_core.run import RunState
from ..sixbit_core.thresholds import solve_thetas, trials
from .branches import KEY as LORAS
from .bridge import layout_of, settings_of, with_settings
from .reserve import running
from .run import RUN

BITS = (5.0, 6.0, 7.0)
_SOLVING_PROMPTS = 2  # that each threshold is tried on: whole runs, the longest part on a large model
_RUNS_PER_THRESHOLD = 5  # of at most 8, for the forecast
_MEASURING = 1.5  # times of a run that is measured beside one that is only run
_KEY = "sixbit_calibration"
_W4A8 = DMPQConfig(router="int8")
Patcher = comfy.model_patcher.ModelPatcher
OnStep = Callable[[], None]


@dataclass(frozen=True)
class Clips:
    """What is sampled: one clip for each positive conditioning, with seeds that count up.

    Attributes:
        latent: (B, C, T, H, W) that the sampler starts from.
        positives, negative: conditionings of the host.
    """

    latent: torch.Tensor
    positives: Sequence[Any]
    negative: Any
    steps: int
    cfg: float
    sampler_name: str
    scheduler: str
    seed: int

    def facts(self) -> dict[str, object]:
        """How it was calibrated, as predictor files say it."""
        frames, height, width = self.latent.shape[2:]
        return {
            "steps": self.steps,
            "scheduler": f"{self.sampler_name} {self.scheduler}",
            "cfg": self.cfg,
            "size": [8 * height, 8 * width],
            "frames": 4 * frames - 3,
            "seed": self.seed,
            "prompts": len(self.positives),
        }


def calibrate(model: Patcher, checkpoint: Checkpoint, clips: Clips) -> tuple[Predictor, list[LinearRecord]]:
    """The predictor of a 6-bit MODEL, and what it was fitted to. How long it takes is said first.

    Raises:
        ValueError: too few evaluations to fit, or a LoRA on the model.
    """
    if LORAS in model.model_options["transformer_options"]:
        raise ValueError("a predictor is of the weights alone; calibrate without Load CogVideoX LoRA")
    layout = layout_of(model)
    errors = ("excess",) if checkpoint.is_quantized else ("excess", "paper")
    thresholds = len(trials(BITS, errors))
    solving = thresholds * _RUNS_PER_THRESHOLD * min(_SOLVING_PROMPTS, len(clips.positives))
    logging.info(_forecast(model, clips, thresholds, solving))
    on_step, finish = _progress((len(clips.positives) + solving) * clips.steps)
    records: list[LinearRecord] = []
    blocks: list[BlockRecord] = []
    for index in range(len(clips.positives)):
        run = CalibrationRun(layout, None if checkpoint.is_quantized else _full_weight(checkpoint, model))
        _sample(_recorded(model, run), clips, index, on_step)
        records += run.records
        blocks += run.blocks
        logging.info(f"6Bit: measured clip {index + 1} of {len(clips.positives)}")
    family, fingerprint = checkpoint.family.name, checkpoint.fingerprint
    fitted = fit_predictor(records, layout, family, fingerprint, clips.facts(), blocks)
    solved = solve_thetas(fitted, records, partial(_bits, model, clips, fitted, on_step), BITS, errors)
    finish()
    return solved, records


def _bits(
    model: Patcher, clips: Clips, predictor: Predictor, on_step: OnStep, config: DMPQConfig, cache_on: bool
) -> float:
    """Average activation bits of whole runs at a trial threshold."""
    preset = PRESETS["paper" if config.error == "paper" else "balanced"]
    dmpq = replace(config, outlier_limit=preset.dmpq.outlier_limit)
    cache = preset.cache if cache_on else None
    routed = with_settings(model, dmpq=dmpq, cache=cache, predictor=predictor)
    bits = []
    for index in range(min(_SOLVING_PROMPTS, len(clips.positives))):
        _sample(routed, clips, index, on_step)
        bits.append(settings_of(routed).journal.last.report.average_activation_bits)
    mean = sum(bits) / len(bits)
    beside = " with cache" if cache_on else ""
    logging.info(f"6Bit: {mean:.2f} bits{beside} where {config.bits:g} are asked for")
    return mean


def _sample(model: Patcher, clips: Clips, index: int, on_step: OnStep, steps: int | None = None) -> None:
    latent = comfy.sample.fix_empty_latent_channels(model, clips.latent)
    comfy.sample.sample(
        model,
        comfy.sample.prepare_noise(latent, clips.seed + index),
        steps or clips.steps,
        clips.cfg,
        clips.sampler_name,
        clips.scheduler,
        clips.positives[index],
        clips.negative,
        latent,
        callback=lambda *_: on_step(),
        disable_pbar=True,
        seed=clips.seed + index,
    )


def _recorded(model: Patcher, state: RunState) -> Patcher:
    """A clone that samples once, under the state given; whatever it was set to is left aside."""
    clone = with_settings(model, dmpq=_W4A8, cache=None, predictor=None)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, _KEY, partial(_recording, state))
    return clone


def _recording(state: RunState, executor: Any, *args: Any, **kwargs: Any) -> Any:
    """OUTER_SAMPLE wrapper inside that of `run`: `state` takes the place of the run's own, and is closed."""
    guider = executor.class_obj
    original = guider.model_options
    options = comfy.model_patcher.create_model_options_clone(original)
    options["transformer_options"][RUN] = replace(options["transformer_options"][RUN], state=state)
    guider.model_options = options
    try:
        with running(None):  # every input is watched, so that blocks take more than in other runs
            result = executor(*args, **kwargs)
        state.finish()
        return result
    finally:
        state.close()
        guider.model_options = original


def _full_weight(checkpoint: Checkpoint, model: Patcher) -> FullWeight:
    return lambda block, kind: checkpoint.tensor(f"blocks.{block}.{kind}.weight").to(model.load_device)


def _progress(steps: int) -> tuple[OnStep, Callable[[], None]]:
    """What to call at each step, and at the end: the host's bar over about so many steps."""
    bar, done = comfy.utils.ProgressBar(steps), 0

    def on_step() -> None:
        nonlocal done
        comfy.model_management.throw_exception_if_processing_interrupted()
        done = min(done + 1, steps - 1)  # there may be more than were forecast
        bar.update_absolute(done)

    return on_step, lambda: bar.update_absolute(steps)


def _forecast(model: Patcher, clips: Clips, thresholds: int, solving: int) -> str:
    """How long it will take, from a step of the real thing after one that pays for loading."""
    times: list[float] = []

    def on_step() -> None:
        if model.load_device.type == "cuda":
            torch.cuda.synchronize(model.load_device)
        times.append(time.perf_counter())

    trial = with_settings(model, dmpq=_W4A8, cache=None, predictor=None)
    _sample(trial, clips, 0, on_step, steps=2)
    step = times[-1] - times[0]
    measured = len(clips.positives)
    minutes = (_MEASURING * measured + solving) * clips.steps * step / 60
    return (
        f"6Bit: calibration takes about {max(1, round(minutes))} min at {step:.2g} s a step: {measured} "
        f"clips are measured, then about {solving} more solve {thresholds} thresholds"
    )
