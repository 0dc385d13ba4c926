"""Node: calibrate the predictor of a 6-bit MODEL by the host's own sampling, and save it for Apply DMPQ."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..sixbit_core.predictor import load_predictor
from .dmpq import predictor_folder
from .files import file_name
from .fit_image import render_fit
from .host_contract import known_host, offered

_SUFFIX = ".json"
_MIN_STEPS = 4  # three evaluations with a Γ before them make a line
_PROMPTS = """A brown dog shakes off water on a pebble beach, drops flying in the low sun.
Rain runs down a train window while a city at night slides past outside.
The camera rises slowly over a terraced green hillside in morning mist.
An old clockmaker turns a tiny screw under a bright desk lamp."""


class SixBitCalibratePredictor(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitCalibratePredictor",
            display_name="Calibrate Predictor",
            category="sixbit",
            description="Measure a 6-bit model on some prompts and save the predictor for Apply DMPQ.",
            search_aliases=["6bit", "nvfp4", "cogvideo", "calibration"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="6-bit weights; what other 6Bit nodes set on it is left aside."
                ),
                io.Clip.Input("clip"),
                io.Latent.Input("latent", tooltip="An empty latent of the size and length to calibrate at."),
                io.String.Input("prompts", multiline=True, default=_PROMPTS, tooltip="One a line."),
                io.Int.Input("steps", default=50, min=_MIN_STEPS, max=1000),
                io.Float.Input("cfg", default=6.0, min=1.0, max=30.0, step=0.1),
                io.Combo.Input("sampler_name", options=offered(_samplers, ("euler",)), default="euler"),
                io.Combo.Input("scheduler", options=offered(_schedulers, ("simple",)), default="simple"),
                io.Int.Input(
                    "seed", default=0, min=0, max=2**63, tooltip="Of the first prompt; they count up."
                ),
                io.String.Input(
                    "name", default="predictor", tooltip="Of the file in models/sixbit_predictors."
                ),
            ],
            outputs=[io.String.Output(), io.Image.Output()],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(cls, name: str | None, prompts: str | None) -> bool | str:
        try:  # None where it comes from another node
            if name is not None:
                file_name(name, _SUFFIX)
            if prompts is not None:
                _lines(prompts)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        clip: Any,
        latent: dict,
        prompts: str,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        seed: int,
        name: str,
    ) -> io.NodeOutput:
        if not known_host():
            raise ValueError("this ComfyUI is not one this pack knows (see the log); use `sixbit calibrate`")
        from .bridge import facts_of
        from .calibration import Clips, calibrate

        facts = facts_of(model)
        if facts is None or not facts.quantized:
            raise ValueError(
                "Calibrate Predictor needs 6-bit weights; load the model with Load 6Bit CogVideoX"
            )
        if facts.checkpoint.family.image_to_video:
            raise ValueError(
                "Calibrate Predictor takes text-to-video models only; use a router without predictor"
            )
        target = _target(file_name(name, _SUFFIX), facts.checkpoint.fingerprint)
        positives = [_encoded(clip, line) for line in _lines(prompts)]
        clips = Clips(
            latent["samples"], positives, _encoded(clip, ""), steps, cfg, sampler_name, scheduler, seed
        )
        predictor, records = calibrate(model, facts.checkpoint, clips)
        picture = render_fit(predictor, records)
        predictor.save(target)
        line = _summary(target, predictor)
        logging.info(f"6Bit: {line}")
        image = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]
        return io.NodeOutput(target.name, image, ui=ui.PreviewText(line))


def _samplers() -> list[str]:
    from comfy.samplers import KSampler  # here, so that every node registers without it

    return KSampler.SAMPLERS


def _schedulers() -> list[str]:
    from comfy.samplers import KSampler

    return KSampler.SCHEDULERS


def _lines(prompts: str) -> list[str]:
    lines = [line.strip() for line in prompts.splitlines() if line.strip()]
    if not lines:
        raise ValueError("prompts holds no caption; write one a line")
    return lines


def _target(name: str, fingerprint: str) -> Path:
    """Where the predictor goes. Raises ValueError where that is another model's, or no folder can be."""
    target = predictor_folder() / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"{target.parent} cannot be made a folder: {error.strerror}") from error
    if target.exists():
        try:
            load_predictor(target, fingerprint)
        except ValueError as error:
            raise ValueError(f"{name} is taken; choose another name ({error})") from error
    return target


def _encoded(clip: Any, text: str) -> Any:
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def _summary(target: Path, predictor: Any) -> str:
    found, how = predictor.summary(), predictor.calibration
    return (
        f"{target.name}: median R² {found['median_r2']:.2f}, {found['positive_slopes']} of "
        f"{found['linears']} slopes up; valid for {predictor.family} {predictor.fingerprint[:12]}, "
        f"{how['steps']} steps, {how['size'][0]}x{how['size'][1]}, {how['frames']} frames"
    )
