"""Node: an empty latent of a size and length that the model can make."""

from typing import Any

import comfy.model_management
import torch
from comfy_api.latest import io

from .clip import FRAMES, SIDES, SPATIAL, ClipRules, check_fields


def size_inputs() -> list[io.Input]:
    """Fields for the size and length of a clip."""
    return [
        io.Int.Input("width", default=720, min=SIDES[0], max=SIDES[-1], step=SIDES.step),
        io.Int.Input("height", default=480, min=SIDES[0], max=SIDES[-1], step=SIDES.step),
        io.Int.Input(
            "frames",
            default=49,
            min=FRAMES[0],
            max=FRAMES[-1],
            step=4,
            tooltip="8N+1; of a 1.5 model 16N+1.",
        ),
    ]


class SixBitEmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitEmptyLatent",
            display_name="Empty CogVideoX Latent",
            category="sixbit",
            description="An empty latent of a size and length that the model can make.",
            search_aliases=["6bit", "cogvideo", "video latent"],
            inputs=[
                io.Model.Input("model"),
                *size_inputs(),
                io.Int.Input("batch_size", default=1, min=1, max=64),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def validate_inputs(
        cls, width: int | None = None, height: int | None = None, frames: int | None = None
    ) -> bool | str:
        return check_fields(width, height, frames)

    @classmethod
    def execute(cls, model: Any, width: int, height: int, frames: int, batch_size: int = 1) -> io.NodeOutput:
        return io.NodeOutput(empty_latent(model, width, height, frames, batch_size))


def empty_latent(model: Any, width: int, height: int, frames: int, batch_size: int = 1) -> dict[str, Any]:
    """A latent of zeros for a clip. Raises ValueError where the model cannot make it."""
    rules = rules_of(model)
    rules.check_clip(width, height, frames)
    shape = rules.latent_shape(width, height, frames, batch_size)
    samples = torch.zeros(shape, device=comfy.model_management.intermediate_device())
    return {"samples": samples, "downscale_ratio_spacial": SPATIAL}


def rules_of(model: Any) -> ClipRules:
    """What a MODEL of this pack, or the host's own CogVideoX, can make. Raises ValueError for another."""
    network = getattr(model.model, "diffusion_model", None)
    if hasattr(model.model, "plan"):
        return model.model.plan.rules
    if type(network).__name__ != "CogVideoXTransformer3DModel":
        name = type(model.model).__name__
        raise ValueError(f"this node needs a CogVideoX model, got {name}; load one with Load 6Bit CogVideoX")
    return ClipRules("this CogVideoX", network.out_channels, network.patch_size, network.patch_size_t or 1)
