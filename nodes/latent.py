"""Node: an empty latent of a size and length that the model can make."""

from typing import Any

import comfy.model_management
import torch
from comfy_api.latest import io


class SixBitEmptyLatent(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitEmptyLatent",
            display_name="Empty CogVideoX Latent",
            category="sixbit",
            description="An empty latent of a size and length that the model can make.",
            inputs=[
                io.Model.Input("model"),
                io.Int.Input("width", default=720, min=16, max=4096, step=16),
                io.Int.Input("height", default=480, min=16, max=4096, step=16),
                io.Int.Input("frames", default=49, min=1, max=1025, step=4),
                io.Int.Input("batch_size", default=1, min=1, max=64),
            ],
            outputs=[io.Latent.Output()],
        )

    @classmethod
    def execute(cls, model: Any, width: int, height: int, frames: int, batch_size: int = 1) -> io.NodeOutput:
        from .bridge import facts_of

        facts = facts_of(model)
        if facts is None:
            raise ValueError("this node needs a model of Load 6Bit CogVideoX or Load 6Bit Reference")
        family = facts.checkpoint.family
        check_clip(family.label, width, height, frames, 8 * family.patch_size, family.frame_step)
        time_patch = family.patch_size_t or 1
        length = (frames - 1) // 4 + 1
        length += -length % time_patch
        shape = (batch_size, family.out_channels, length, height // 8, width // 8)
        samples = torch.zeros(shape, device=comfy.model_management.intermediate_device())
        return io.NodeOutput({"samples": samples, "downscale_ratio_spacial": 8})


def check_clip(label: str, width: int, height: int, frames: int, size_step: int, frame_step: int) -> None:
    """Refuse a clip that the model cannot make, naming the nearest it can. Raises ValueError."""
    near = [max(size_step, round(side / size_step) * size_step) for side in (width, height)]
    if near != [width, height]:
        raise ValueError(
            f"{label} takes width and height in multiples of {size_step}, got {width}x{height}; "
            f"the nearest is {near[0]}x{near[1]}"
        )
    if (frames - 1) % frame_step:
        low = (frames - 1) // frame_step * frame_step + 1
        raise ValueError(
            f"{label} takes {frame_step}N+1 frames, got {frames}; nearest are {low} and {low + frame_step}"
        )
