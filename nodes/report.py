"""Node: what a run decided, as a picture and as text."""

import json
from typing import Any

import numpy as np
import torch
from comfy_api.latest import io

from ..sixbit_core.report import RunMemory, RunReport
from ..sixbit_core.report_image import render_run
from .settings import run_of


class SixBitRunReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitRunReport",
            display_name="6Bit Run Report",
            category="sixbit",
            description="Formats, skips, seconds and memory of the run that made this latent.",
            search_aliases=["cogvideo", "skipped blocks", "statistics"],
            inputs=[
                io.Model.Input("model", tooltip="The model that the sampler was given."),
                io.Latent.Input("latent", tooltip="What the sampler gave: the report waits for it."),
            ],
            outputs=[io.Latent.Output(), io.Image.Output(), io.String.Output()],
            hidden=[io.Hidden.prompt, io.Hidden.unique_id],
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model: Any, latent: dict) -> io.NodeOutput:
        from .bridge import settings_of

        runs, prompt = settings_of(model).journal.runs, cls.hidden.prompt or {}
        run = run_of(runs, prompt, cls.hidden.unique_id, latent["samples"])
        picture = render_run(run.report, run.memory)
        pixels = torch.from_numpy(np.array(picture, dtype=np.float32) / 255)[None]
        return io.NodeOutput(latent, pixels, report_text(run.report, run.memory))


def report_text(report: RunReport, memory: RunMemory) -> str:
    """A line for people, then the report as JSON."""
    seconds = sum(report.seconds_by_evaluation)
    words = [f"{report.evaluations} evaluations of {report.blocks} blocks in {seconds:.1f} s"]
    if report.average_activation_bits is not None:
        words.append(f"{report.average_activation_bits:.2f} activation bits")
    words.append(f"{100 * (report.skipped_fraction or 0):.0f} % of block evaluations skipped")
    took = {
        "weight_bytes": memory.weights,
        "weight_bytes_full_precision": memory.weights_16_bit,
        "peak_memory_bytes": memory.peak,
    }
    return ", ".join(words) + "\n" + json.dumps({**report.to_dict(), **took}, sort_keys=True)
