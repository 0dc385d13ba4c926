"""Stages `vae` and `encode`: train the autoencoder on rendered clips, then turn a data set into latents.

    loss = (1 - p) * L1 + (2 + 8 p) * L2 + 3e-5 * KL        (means; p = share of the time used)

L1 gives sharp edges early, L2 is what PSNR measures. The first part trains on crops of 64x64x9, the rest on
whole frames of 17, whose group statistics and chunked decoding are those of use.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX
from safetensors.torch import save_file

from .ema import EMA, Clock, rate_at
from .models import make_vae
from .render import render
from .tokenizer import load_tokenizer, token_ids
from .world import FRAMES, PAIR_SHARE, SIZE, SceneBatch, sample_scenes

PEAK_RATE = 1e-3
FLOOR_DB = 30.0  # below this something went wrong, and latents would be wasted time
KL_WEIGHT = 3e-5
CROPS_UNTIL = 0.55  # share of the time spent on crops
CAPTIONS_PER_CLIP = 4


@dataclass(frozen=True)
class EncodeSettings:
    """What the `encode` stage makes.

    Attributes:
        clips: at most this many.
        seconds: ends early after this time.
        vae: folder of the autoencoder to use; None: the one trained in the work folder.
        pair_share: share of the clips with two objects.
        seed: of the scenes.
        tiny: small batches, for tests.
    """

    clips: int
    seconds: float = math.inf
    vae: Path | None = None
    pair_share: float = PAIR_SHARE
    seed: int = 1
    tiny: bool = False


def to_signal(clips: torch.Tensor) -> torch.Tensor:
    """[B, T, H, W, 3] uint8 to [B, 3, T, H, W] float32 in [-1, 1]."""
    return clips.permute(0, 4, 1, 2, 3).float().div_(127.5).sub_(1.0)


def train_vae(work: Path, seconds: float, device: torch.device, seed: int = 0, tiny: bool = False) -> float:
    """Train, save to `work`/vae, and measure.

    Returns:
        mean PSNR in dB over whole held-out clips.

    Raises:
        RuntimeError: when that is below `FLOOR_DB`.
    """
    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    vae = make_vae(tiny).to(device)
    pool = _render_all(8 if tiny else 4000, seed, device)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_RATE, betas=(0.9, 0.99), weight_decay=1e-4)
    ema = EMA(vae, 0.998)
    clock, step, total = Clock(seconds), 0, torch.zeros((), device=device)
    while clock.progress < 1:
        p = clock.progress
        crops = p < CROPS_UNTIL
        window = (2 if tiny else 64, 9, SIZE // 2) if crops else (1 if tiny else 12, 17, SIZE)
        x = to_signal(_windows(pool, *window))
        optimizer.param_groups[0]["lr"] = rate_at(PEAK_RATE, p, step, 100)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            posterior = vae.encode(x).latent_dist
            error = vae.decode(posterior.sample()).sample.float() - x
        kl = posterior.kl().sum() / posterior.mean.numel()
        l2 = error.square().mean()
        loss = (1 - p) * error.abs().mean() + (2 + 8 * p) * l2 + KL_WEIGHT * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        ema.update(step)
        total += l2.detach()
        step += 1
        if step % 200 == 0:
            psnr = -10 * torch.log10(total / 200 / 4)
            print(
                f"vae step {step} {clock.elapsed:.0f} s train {psnr.item():.2f} dB kl {kl.item():.2f}",
                flush=True,
            )
            total.zero_()
    ema.copy_to(vae)
    vae.save_pretrained(work / "vae")
    del pool, optimizer
    psnr = measure_vae(vae, 4 if tiny else 128, device)
    print(
        f"vae: {step} steps, {sum(p.numel() for p in vae.parameters()) / 1e6:.2f} M parameters, {psnr:.2f} dB"
    )
    if not tiny and not psnr >= FLOOR_DB:  # also true for NaN
        raise RuntimeError(
            f"the vae needed {FLOOR_DB} dB, got {psnr:.2f}: train it longer or with another seed"
        )
    return psnr


@torch.inference_mode()
def measure_vae(vae: AutoencoderKLCogVideoX, clips: int, device: torch.device, batch: int = 16) -> float:
    """Mean PSNR in dB (peak 255) of whole held-out clips, encoded and decoded in the precision of use."""
    scenes = sample_scenes(clips, 12345, "held-out")
    dtype = compute_dtype(device)
    copy = AutoencoderKLCogVideoX.from_config(vae.config)
    copy.load_state_dict(vae.state_dict())
    copy = copy.to(device, dtype)
    values = []
    for start in range(0, clips, batch):
        x = to_signal(render(scenes.select(slice(start, start + batch)), device))
        y = copy.decode(copy.encode(x.to(dtype)).latent_dist.mode()).sample.float().clamp(-1, 1)
        error = (((y - x) * 127.5).round() / 255).square().mean(dim=(1, 2, 3, 4))
        values.append(-10 * torch.log10(error.clamp_min(1e-10)))
    return torch.cat(values).mean().item()


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU; float32 on a CPU, where bfloat16 convolutions take minutes."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@torch.inference_mode()
def encode_clips(work: Path, settings: EncodeSettings, device: torch.device) -> int:
    """Render training scenes, encode them, and write `work`/latents.safetensors.

    The file holds `latents` [N, 9, 16, 16, 16] bfloat16, scaled by the autoencoder's factor; `tokens`
    [N, 4, 32] int16, the token ids of four captions a clip; `count` and `motion` [N] uint8, the number of
    objects and the place in `MOTIONS`. An autoencoder without a factor gets the one of unit variance.

    Args:
        work: holds vae/, or gets it from `settings.vae`.
        settings: see there.
        device: where to render and encode.

    Returns:
        how many clips were encoded, a multiple of the batch.

    Raises:
        ValueError: for too few clips, or a folder without an autoencoder.
    """
    begin, batch = time.monotonic(), 4 if settings.tiny else 64
    torch.backends.cudnn.benchmark = True
    if settings.clips < batch:
        raise ValueError(f"encode needs {batch} clips or more, got {settings.clips}")
    if settings.vae is not None:
        if not (settings.vae / "config.json").exists():
            raise ValueError(f"--vae needs the folder of an autoencoder, got {settings.vae}")
        AutoencoderKLCogVideoX.from_pretrained(settings.vae).save_pretrained(work / "vae")
    vae = AutoencoderKLCogVideoX.from_pretrained(work / "vae").to(device, compute_dtype(device))
    scenes = sample_scenes(settings.clips, settings.seed, pair_share=settings.pair_share)
    parts: list[torch.Tensor] = []
    for start in range(0, settings.clips - settings.clips % batch, batch):
        x = to_signal(render(scenes.select(slice(start, start + batch)), device)).to(vae.dtype)
        parts.append(vae.encode(x).latent_dist.mode().permute(0, 2, 1, 3, 4).contiguous())
        if start % (batch * 16) == 0 and device.type == "cuda":
            torch.cuda.synchronize()  # else the queue runs ahead of the time limit
        if time.monotonic() - begin > settings.seconds:
            break
    latents = torch.cat(parts).bfloat16()
    if vae.config.scaling_factor == 1.0:  # as `make_vae` leaves it
        vae.register_to_config(scaling_factor=1.0 / latents[: 64 * 32].float().std().item())
        vae.save_config(work / "vae")
    latents.mul_(vae.config.scaling_factor)
    print(f"encode: {len(latents)} clips in {time.monotonic() - begin:.0f} s", flush=True)
    scenes = scenes.select(slice(0, len(latents)))
    data = {"latents": latents.cpu(), "tokens": caption_tokens(scenes)}
    data |= {name: torch.from_numpy(getattr(scenes, name)).to(torch.uint8) for name in ("count", "motion")}
    save_file(data, work / "latents.safetensors")
    print(f"encode: written after {time.monotonic() - begin:.0f} s", flush=True)
    return len(latents)


def caption_tokens(scenes: SceneBatch) -> torch.Tensor:
    """[N, 4, 32] int16 token ids of four captions of each scene."""
    captions = [
        scenes.caption(i, int(scenes.wording[i]) + k * 5)
        for i in range(len(scenes))
        for k in range(CAPTIONS_PER_CLIP)
    ]
    return token_ids(load_tokenizer(), captions).to(torch.int16).view(len(scenes), CAPTIONS_PER_CLIP, -1)


def _render_all(clips: int, seed: int, device: torch.device) -> torch.Tensor:
    """[clips, 33, 128, 128, 3] uint8 training clips."""
    scenes = sample_scenes(clips, seed)
    return torch.cat([render(scenes.select(slice(i, i + 50)), device) for i in range(0, clips, 50)])


def _windows(pool: torch.Tensor, batch: int, frames: int, size: int) -> torch.Tensor:
    """[batch, frames, size, size, 3] uint8 windows at random places of random clips."""

    def pick(limit: int) -> torch.Tensor:
        return torch.randint(limit, (batch, 1, 1, 1), device=pool.device)

    span = torch.arange(max(frames, size), device=pool.device)
    t = pick(FRAMES - frames + 1) + span[:frames].view(1, -1, 1, 1)
    y = pick(SIZE - size + 1) + span[:size].view(1, 1, -1, 1)
    x = pick(SIZE - size + 1) + span[:size].view(1, 1, 1, -1)
    return pool[pick(len(pool)), t, y, x]
