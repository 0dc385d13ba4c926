"""Stage `sample`: generate clips for held-out prompts, read them, and count what is right.

Each share comes with its 95 % Wilson interval; prompts with one and with two objects are counted apart, since
a prompt with two objects is right only where both are.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import CogVideoXPipeline
from PIL import Image, ImageDraw

from .evaluator import KINDS, Reading, prepare, read_clip, score
from .tokenizer import MAX_TOKENS
from .train_vae import compute_dtype
from .world import Scene, sample_prompts


def generate(
    folder: Path,
    captions: list[str],
    device: torch.device,
    steps: int = 50,
    guidance: float = 6.0,
    seed: int = 0,
) -> np.ndarray:
    """Clips of the pipeline in `folder`, in bfloat16 on a GPU.

    Returns:
        [N, 33, 128, 128, 3] uint8.
    """
    pipeline = CogVideoXPipeline.from_pretrained(folder, torch_dtype=compute_dtype(device)).to(device)
    pipeline.set_progress_bar_config(disable=True)
    latents = pipeline(
        captions,
        num_inference_steps=steps,
        guidance_scale=guidance,
        max_sequence_length=MAX_TOKENS,
        generator=torch.Generator("cpu").manual_seed(seed),
        output_type="latent",
    ).frames
    clips = []
    with torch.inference_mode():
        for part in latents.split(16):
            video = pipeline.decode_latents(part).float().clamp(-1, 1)
            clips.append(((video + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 4, 1).cpu())
    return torch.cat(clips).numpy()


def evaluate_pipeline(
    folder: Path, prompts: int, device: torch.device, out: Path, steps: int = 50, seed: int = 7
) -> dict:
    """Generate, score and print; write `out`/sample.json and `out`/sample.png.

    Args:
        folder: a pipeline folder.
        prompts: how many held-out prompts.
        device: where to generate.
        out: folder for the results.
        steps: DDIM steps.
        seed: of prompts and noise.

    Returns:
        shares by kind, for "all", "one" and "two" objects.
    """
    scenes = sample_prompts(prompts, seed)
    begin = time.monotonic()
    clips = generate(folder, [scene.caption for scene in scenes], device, steps, seed=seed)
    print(f"sample: {prompts} clips in {time.monotonic() - begin:.0f} s", flush=True)
    readings = read_all(clips)
    result = accuracy(scenes, readings)
    for group, shares in result.items():
        for kind, (right, n, low, high) in shares.items():
            print(
                f"{group:4} {kind:10} {right}/{n} = {right / max(n, 1):.3f} [{low:.3f}, {high:.3f}]",
                flush=True,
            )
    out.mkdir(parents=True, exist_ok=True)
    rows = [
        {"caption": s.caption, "read": r.words(), "right": score(s, r)}
        for s, r in zip(scenes, readings, strict=True)
    ]
    (out / "sample.json").write_text(json.dumps({"accuracy": result, "rows": rows}, indent=1) + "\n")
    contact_sheet(clips[:30], scenes[:30], readings[:30]).save(out / "sample.png")
    return result


def read_all(clips: np.ndarray) -> list[Reading]:
    """`read_clip` of every clip, on all cores."""
    prepare()
    with multiprocessing.get_context("fork").Pool(min(16, multiprocessing.cpu_count())) as pool:
        return pool.map(read_clip, list(clips), chunksize=2)


def accuracy(
    scenes: list[Scene], readings: list[Reading]
) -> dict[str, dict[str, tuple[int, int, float, float]]]:
    """group ("all", "one", "two" objects) -> kind -> (right, of, low, high)."""
    groups = {"all": (1, 2), "one": (1,), "two": (2,)}
    result = {}
    for group, counts in groups.items():
        marks = [score(s, r) for s, r in zip(scenes, readings, strict=True) if len(s.objects) in counts]
        result[group] = {}
        for kind in KINDS:
            right = sum(mark[kind] for mark in marks)
            result[group][kind] = (right, len(marks), *wilson(right, len(marks)))
    return result


def wilson(right: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Bounds of the 95 % Wilson interval of a share."""
    if n == 0:
        return 0.0, 1.0
    share = right / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))


def contact_sheet(
    clips: np.ndarray, scenes: list[Scene], readings: list[Reading], columns: int = 3
) -> Image.Image:
    """First, middle and last frame of each clip above its caption; wrong kinds are named in red."""
    height, width = 128 + 26, 3 * 128 + 8
    rows = -(-len(clips) // columns)
    sheet = Image.new("RGB", (columns * width, rows * height), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (clip, scene, reading) in enumerate(zip(clips, scenes, readings, strict=True)):
        x, y = (i % columns) * width, (i // columns) * height
        for j, frame in enumerate((0, 16, 32)):
            sheet.paste(Image.fromarray(clip[frame]), (x + j * 128, y))
        wrong = [kind for kind, right in score(scene, reading).items() if not right]
        draw.text((x + 2, y + 128), scene.caption[:64], fill="black")
        draw.text(
            (x + 2, y + 139),
            f"wrong: {', '.join(wrong)}" if wrong else "right",
            fill="red" if wrong else "green",
        )
    return sheet
