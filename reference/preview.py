"""Stage `preview`: the linear map from a latent to the colours it stands for, for live previews.

    rgb = latent · factors + bias,   least squares over every latent pixel of rendered clips

A latent pixel stands for 8x8 pixels: of the first frame, then of four frames each. Its colour is their mean,
in [-1, 1]; latents are in the scale of the sampler, multiplied by the autoencoder's factor.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX

from ..sixbit_core.checkpoint import open_checkpoint
from .render import render
from .train_vae import to_signal
from .world import sample_scenes

PATH = Path(__file__).parent / "preview.json"


def fit(latents: torch.Tensor, colours: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Least squares of colours (N, 3) by latents (N, C).

    Returns:
        factors (C, 3), bias (3,), and the share of the colours' variance that they explain.
    """
    ones = torch.ones(len(latents), 1, dtype=torch.float64)
    known = torch.cat([latents.double(), ones], 1)
    solved = torch.linalg.lstsq(known, colours.double()).solution
    rest = (colours - known @ solved).var(0, correction=0).sum()
    return solved[:-1], solved[-1], (1 - rest / colours.double().var(0, correction=0).sum()).item()


def latent_colours(signal: torch.Tensor) -> torch.Tensor:
    """[B, 3, 4n+1, 8h, 8w] to the mean colours [B, 3, n+1, h, w] that latents stand for."""
    first = F.avg_pool3d(signal[:, :, :1], (1, 8, 8))
    return torch.cat([first, F.avg_pool3d(signal[:, :, 1:], (4, 8, 8))], 2)


@torch.inference_mode()
def write_preview(folder: Path, clips: int, seed: int, path: Path = PATH) -> float:
    """Fit on rendered clips and write the factors.

    Args:
        folder: of the pipeline.
        clips: how many; a second as many are kept for the figure that is returned.

    Returns:
        share of the variance explained on clips that were not fitted.
    """
    vae = AutoencoderKLCogVideoX.from_pretrained(folder / "vae")
    scenes = sample_scenes(2 * clips, seed)
    latents, colours = [], []
    for start in range(0, 2 * clips, 4):
        signal = to_signal(render(scenes.select(slice(start, start + 4)), torch.device("cpu")))
        encoded = vae.encode(signal).latent_dist.mode() * vae.config.scaling_factor
        latents.append(encoded.movedim(1, -1).flatten(0, -2))
        colours.append(latent_colours(signal).movedim(1, -1).flatten(0, -2))
    half = len(latents) // 2
    factors, bias, _ = fit(torch.cat(latents[:half]), torch.cat(colours[:half]))
    x, y = torch.cat(latents[half:]).double(), torch.cat(colours[half:]).double()
    explained = 1 - (y - x @ factors - bias).var(0).sum() / y.var(0).sum()
    found = {
        "fingerprint": open_checkpoint(folder).fingerprint,
        "how": f"least squares on {clips} rendered clips, seed {seed}: reference/preview.py",
        "explained": round(explained.item(), 4),
        "factors": [[round(value, 5) for value in row] for row in factors.tolist()],
        "bias": [round(value, 5) for value in bias.tolist()],
    }
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found["explained"]
