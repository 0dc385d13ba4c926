"""Node: two clips side by side, in step, with how far apart they are and what each took."""

import json
from collections.abc import Callable
from typing import Any

import comfy.model_management
import comfy.utils
from comfy_api.latest import io

from .comparison import compare, side_by_side


class SixBitCompare(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        report = {
            "optional": True,
            "force_input": True,
            "tooltip": "Text of 6Bit Run Report: seconds.",
        }
        return io.Schema(
            node_id="SixBitCompare",
            display_name="Compare Clips",
            category="sixbit",
            description="Two clips side by side with PSNR, SSIM, seconds, and whether the composition held.",
            search_aliases=["cogvideo", "side by side", "psnr", "ssim", "before after"],
            inputs=[
                io.Image.Input("images_a", tooltip="The clip to compare with: full precision, or a draft."),
                io.Image.Input("images_b", tooltip="The other clip, of the same length and size."),
                io.String.Input("label_a", default="full precision", optional=True, tooltip="Its name."),
                io.String.Input("label_b", default="6-bit", optional=True, tooltip="Its name."),
                io.String.Input("report_a", **report),
                io.String.Input("report_b", **report),
            ],
            outputs=[io.Image.Output(), io.String.Output()],
        )

    @classmethod
    def execute(
        cls,
        images_a: Any,
        images_b: Any,
        label_a: str = "full precision",
        label_b: str = "6-bit",
        report_a: str = "",
        report_b: str = "",
    ) -> io.NodeOutput:
        labels, reports = (label_a, label_b), (report_a, report_b)
        found = compare((images_a, images_b), labels, reports, _progress(len(images_a)))
        text = found.line() + "\n" + json.dumps(found.to_dict(), sort_keys=True)
        return io.NodeOutput(side_by_side((images_a, images_b), found), text)


def _progress(frames: int) -> Callable[[int, int], None]:
    """What to call after each frame: the host's bar, and its way to cancel."""
    bar = comfy.utils.ProgressBar(frames)

    def on_frame(done: int, total: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update_absolute(done, total)

    return on_frame
