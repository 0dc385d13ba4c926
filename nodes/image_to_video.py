"""Node: the first frame of a clip, for the image-to-video models."""

from typing import Any

import comfy.model_management
import comfy.utils
import torch
from comfy_api.latest import io

from .clip import SPATIAL, ClipRules, check_fields
from .latent import rules_of, size_inputs


class SixBitImageToVideo(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitImageToVideo",
            display_name="CogVideoX Image to Video",
            category="sixbit",
            description="Put an image at the start of a clip; for the image-to-video models.",
            search_aliases=["6bit", "cogvideo", "i2v", "first frame"],
            inputs=[
                io.Conditioning.Input("positive"),
                io.Conditioning.Input("negative"),
                io.Vae.Input("vae"),
                io.Image.Input("image", tooltip="Cut about its middle and scaled to the clip's size."),
                *size_inputs(),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="Connected, size and frames are checked against it here, not by the sampler.",
                ),
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive"),
                io.Conditioning.Output(display_name="negative"),
                io.Latent.Output(),
            ],
        )

    @classmethod
    def validate_inputs(
        cls, width: int | None = None, height: int | None = None, frames: int | None = None
    ) -> bool | str:
        return check_fields(width, height, frames)

    @classmethod
    def execute(
        cls,
        positive: list,
        negative: list,
        vae: Any,
        image: torch.Tensor,
        width: int,
        height: int,
        frames: int,
        model: Any = None,
    ) -> io.NodeOutput:
        import node_helpers  # here, so that every node registers without it

        rules = ClipRules("image to video", vae.latent_channels) if model is None else rules_of(model)
        rules.check_clip(width, height, frames)
        first = {"concat_latent_image": vae.encode(first_frame(image, width, height))}
        shape = rules.latent_shape(width, height, frames)
        samples = torch.zeros(shape, device=comfy.model_management.intermediate_device())
        positive, negative = (node_helpers.conditioning_set_values(c, first) for c in (positive, negative))
        return io.NodeOutput(positive, negative, {"samples": samples, "downscale_ratio_spacial": SPATIAL})


def first_frame(images: torch.Tensor, width: int, height: int) -> torch.Tensor:
    """The first of some images (B, H, W, channels), cut and scaled to (1, height, width, 3)."""
    image = images[:1, :, :, :3]
    if image.shape[1:3] == (height, width):
        return image
    return comfy.utils.common_upscale(image.movedim(-1, 1), width, height, "lanczos", "center").movedim(1, -1)
