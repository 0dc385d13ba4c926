"""Node: route the activations of a 6-bit model between NVFP4 and INT8 (DMPQ), bf16 after skips (PDR)."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.model_management
import folder_paths
from comfy_api.latest import io

from ..sixbit_core.config import PRESETS, DMPQConfig, override
from ..sixbit_core.router import AUTO, ROUTERS
from .host_contract import known_host, offered
from .machine import COMPUTES, fit_to_machine, path_of
from .predictors import BUNDLED, find_predictor, list_predictors

CHOICES = ("balanced", "quality", "fast", "paper")
_BITS = 6.0


def predictor_folder() -> Path:
    """Where calibration saves predictors."""
    return Path(folder_paths.models_dir) / "sixbit_predictors"


class SixBitApplyDMPQ(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitApplyDMPQ",
            display_name="Apply DMPQ",
            category="sixbit",
            description="Choose the activation format of every linear, step by step.",
            search_aliases=["6bit", "nvfp4", "fp4", "int8", "cogvideo", "mixed precision", "faster video"],
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input(
                    "preset",
                    options=list(CHOICES),
                    default="balanced",
                    tooltip="quality: INT8, 16 bits at both ends. Sets the values below; one you move wins.",
                ),
                io.Combo.Input(
                    "predictor",
                    options=offered(lambda: list_predictors(predictor_folder()), (BUNDLED,)),
                    default=BUNDLED,
                    optional=True,
                    advanced=True,
                    tooltip="Of this very model: bundled for the reference, else of Calibrate Predictor.",
                ),
                io.Combo.Input(
                    "router",
                    options=[AUTO, *sorted(ROUTERS)],
                    default=AUTO,
                    optional=True,
                    advanced=True,
                    tooltip="auto: the preset's own, which is by predictor where there is one, else INT8.",
                ),
                io.Float.Input(
                    "activation_bits",
                    default=_BITS,
                    min=4.0,
                    max=8.0,
                    step=0.1,
                    optional=True,
                    advanced=True,
                    tooltip="Average bits of activations that routers with a predictor aim for.",
                ),
                io.Boolean.Input(
                    "purified_refresh",
                    default=True,
                    optional=True,
                    advanced=True,
                    tooltip="Linears with outliers run in 16 bits on the first step after a skip.",
                ),
                io.Combo.Input(
                    "compute",
                    options=list(COMPUTES),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="auto: what this GPU is fast at. emulate: NVFP4 numerics on any device.",
                ),
                io.Boolean.Input(
                    "tuning",
                    default=True,
                    optional=True,
                    advanced=True,
                    tooltip="A first run may time a few kernels, at most 20 s. The clip is the same.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(
        cls,
        model: Any,
        preset: str,
        predictor: str = BUNDLED,
        router: str = AUTO,
        activation_bits: float = _BITS,
        purified_refresh: bool = True,
        compute: str = "auto",
        tuning: bool = True,
    ) -> io.NodeOutput:
        if not known_host():
            return io.NodeOutput(model)
        from .bridge import facts_of, with_settings

        facts = facts_of(model)
        if facts is None or not facts.quantized:
            raise ValueError(
                "Apply DMPQ needs a model with 6-bit weights; load it with Load 6Bit CogVideoX, weights 6-bit"
            )
        config = replace(dmpq_config(preset, router, activation_bits, purified_refresh), tune=tuning)
        config, line = fit_to_machine(config, path_of(comfy.model_management.get_torch_device()), compute)
        found = find_predictor(predictor, predictor_folder(), facts.checkpoint.fingerprint)
        logging.info(f"6Bit: {line}")
        return io.NodeOutput(with_settings(model, dmpq=config, predictor=found))


def dmpq_config(preset: str, router: str, activation_bits: float, purified_refresh: bool) -> DMPQConfig:
    """The preset's values, with every one that was moved from its default in its place."""
    moved = {
        "router": None if router == AUTO else router,
        "bits": None if activation_bits == _BITS else activation_bits,
        "purified_refresh": None if purified_refresh else False,
    }
    return override(PRESETS[preset].dmpq, moved)
