"""The reference workflow's nodes by the path that a machine has: Triton, comfy-kitchen, or neither.

    PYTHONPATH=COMFYUI python tests/host/scripts/paths.py '{"cpu": false, "absent": ["triton"]}'

Arguments, a JSON object: "cpu" (true), "absent" (modules to run without), "kitchen" (true; false: its INT8
products are not there), "steps" (50), "prompt". The last line printed is the JSON answer: what was said
before sampling, seconds of the second of two runs, share skipped, whether the runs were equal, and decibels
of the clip against full precision on the same machine.
"""

from boot import ARGUMENTS, answer, pack  # isort: split

import unfound  # noqa: F401  # isort: split
from early import STOOD_IN  # isort: split

import math
import time

import comfy.model_management
import torch

import nodes

PROMPT = "a red star moves right on a white background"
RUN, BRIDGE = pack("nodes.run"), pack("nodes.bridge")


def psnr_db(a: torch.Tensor, b: torch.Tensor) -> float:
    """Of frames in [0, 1]."""
    return -10 * math.log10(float((a.float() - b.float()).square().mean()))


@torch.inference_mode()
def main() -> None:
    if not ARGUMENTS.get("kitchen", True):
        pack("kernels.linear_torch").kitchen_multiplies = lambda backend="cuda": False
    load = pack("nodes.reference").SixBitLoadReference.execute
    (model, clip, vae), (full, *_) = load("6-bit").args, load("as stored").args
    texts = [
        clip.encode_from_tokens_scheduled(clip.tokenize(text))
        for text in (ARGUMENTS.get("prompt", PROMPT), "")
    ]
    empty = pack("nodes.latent").SixBitEmptyLatent.execute(model, 128, 128, 33).args[0]
    said: list[str] = []
    status = RUN.status_line
    RUN.status_line = lambda *args: said.append(status(*args)) or said[-1]

    def sampled(model: object) -> tuple[torch.Tensor, float]:
        start = time.perf_counter()
        steps = ARGUMENTS.get("steps", 50)
        latents = nodes.common_ksampler(model, 0, steps, 6.0, "euler", "simple", *texts, empty)[0]["samples"]
        return latents, time.perf_counter() - start

    exact = vae.decode(sampled(full)[0])
    cached = pack("nodes.delta_cache").SixBitTemporalDeltaCache.execute(model, "balanced").args[0]
    first, _ = sampled(cached)
    again, seconds = sampled(cached)
    device = comfy.model_management.get_torch_device()
    answer(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch=torch.__version__,
        arguments=ARGUMENTS,
        stood_in=STOOD_IN,
        said=said[-1],
        seconds=round(seconds, 3),
        skipped=round(BRIDGE.settings_of(cached).journal.last.report.skipped_fraction, 4),
        equal=torch.equal(first, again),
        psnr_db=round(psnr_db(vae.decode(again), exact), 2),
    )


main()
