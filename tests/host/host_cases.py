"""Tiny random checkpoints of every CogVideoX variant, and what diffusers makes of them. Needs diffusers."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import CogVideoXDDIMScheduler, CogVideoXPipeline, CogVideoXTransformer3DModel
from safetensors.torch import save_file

TEXT, TEXT_WIDTH, CHANNELS = 16, 32, 4


@dataclass(frozen=True)
class Variant:
    """One kind of CogVideoX.

    Attributes:
        changes: to the transformer's configuration.
        shift, scale: snr_shift_scale and the VAE's factor.
        sizes: latent (frames, height, width) that are tried; the first is the trained one.
    """

    name: str
    changes: dict = field(default_factory=dict)
    shift: float = 1.0
    scale: float = 0.7
    sizes: tuple[tuple[int, int, int], ...] = ((3, 8, 12), (2, 8, 12), (3, 6, 10), (4, 12, 8))

    @property
    def image(self) -> bool:
        return self.changes.get("in_channels") == 2 * CHANNELS


_ROTARY = {"use_rotary_positional_embeddings": True}
_LATER = {"patch_size_t": 2, "sample_height": 20, "sample_width": 20, **_ROTARY, "patch_bias": False}
_LATER_SIZES = ((4, 8, 12), (2, 8, 12), (4, 6, 10), (6, 12, 8))
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("2b", {}, 3.0, 1.15258426),
        Variant("5b", _ROTARY),
        Variant(
            "5b-i2v",
            {**_ROTARY, "in_channels": 8, "use_learned_positional_embeddings": True},
            sizes=((3, 8, 12),),
        ),
        Variant("1.5", _LATER, sizes=_LATER_SIZES),
        Variant("1.5-i2v", {**_LATER, "in_channels": 8, "ofs_embed_dim": 32}, sizes=_LATER_SIZES),
    )
}


def make_transformer(variant: Variant) -> CogVideoXTransformer3DModel:
    """Two blocks of one head, with weights that leave no part idle."""
    torch.manual_seed(0)
    config = {
        "num_attention_heads": 1,
        "attention_head_dim": 64,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "time_embed_dim": 32,
        "text_embed_dim": TEXT_WIDTH,
        "num_layers": 2,
        "sample_width": 12,
        "sample_height": 8,
        "sample_frames": 9,
        "max_text_seq_length": TEXT,
    }
    model = CogVideoXTransformer3DModel(**{**config, **variant.changes}).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("norm.weight") or "norm_q.weight" in name or "norm_k.weight" in name:
                tensor.copy_(1 + 0.1 * torch.randn_like(tensor))
            elif tensor.ndim == 1:
                tensor.copy_(0.1 * torch.randn_like(tensor))
        if variant.changes.get("use_learned_positional_embeddings"):
            model.patch_embed.pos_embedding.normal_(std=0.5)
    return model


def make_scheduler(variant: Variant) -> CogVideoXDDIMScheduler:
    return CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        snr_shift_scale=variant.shift,
    )


def save_pipeline(variant: Variant, model: CogVideoXTransformer3DModel, folder: Path) -> None:
    """What the loader reads of a pipeline folder: transformer, scheduler and the VAE's configuration."""
    model.save_pretrained(folder / "transformer")
    make_scheduler(variant).save_pretrained(folder / "scheduler")
    (folder / "vae").mkdir()
    (folder / "vae" / "config.json").write_text(json.dumps({"scaling_factor": variant.scale}))


def rotary(model: CogVideoXTransformer3DModel, grid: tuple[int, int, int]) -> object:
    """Tables as diffusers' pipeline makes them, for latents (frames, height, width)."""
    if not model.config.use_rotary_positional_embeddings:
        return None
    maker = CogVideoXPipeline.__new__(CogVideoXPipeline)
    object.__setattr__(maker, "vae_scale_factor_spatial", 8)
    object.__setattr__(maker, "transformer", model)
    frames, height, width = grid
    make = CogVideoXPipeline._prepare_rotary_positional_embeddings
    return make(maker, height * 8, width * 8, frames, torch.device("cpu"))


def predict(
    model: CogVideoXTransformer3DModel, x: torch.Tensor, text: torch.Tensor, step: torch.Tensor
) -> torch.Tensor:
    """One call of diffusers' transformer on latents (B, C, T, H, W), result in the same order."""
    grid = tuple(x.shape[2:])
    ofs = torch.full((1,), 2.0) if model.config.ofs_embed_dim else None
    out = model(
        x.transpose(1, 2),
        text,
        step.expand(x.shape[0]),
        ofs=ofs,
        image_rotary_emb=rotary(model, grid),
        return_dict=False,
    )[0]
    return out.transpose(1, 2)


@torch.no_grad()
def sample(
    variant: Variant,
    model: CogVideoXTransformer3DModel,
    noise: torch.Tensor,
    texts: tuple[torch.Tensor, torch.Tensor],
    image: torch.Tensor | None,
    steps: int,
    cfg: float,
) -> torch.Tensor:
    """A run as diffusers' pipelines do it; (negative, positive) texts, `image` in the VAE's own latents."""
    scheduler = make_scheduler(variant)
    scheduler.set_timesteps(steps)
    latents = noise.transpose(1, 2)
    beside = None
    if image is not None:
        factor = 1 / variant.scale if model.config.ofs_embed_dim else variant.scale
        beside = (factor * image).expand(2, -1, -1, -1, -1)
    for step in scheduler.timesteps:
        x = latents.expand(2, -1, -1, -1, -1).transpose(1, 2)
        x = x if beside is None else torch.cat([x, beside], dim=1)
        plain, guided = predict(model, x, torch.cat(texts), step).transpose(1, 2).chunk(2)
        guess = plain + cfg * (guided - plain)
        latents = scheduler.step(guess, step, latents, return_dict=False)[0]
    return latents.transpose(1, 2)


def write_case(variant: Variant, folder: Path, run_steps: tuple[int, ...] = (10, 50)) -> list[dict]:
    """Write pipeline, inputs and diffusers' answers of a variant; returns what the host is to compute."""
    model = make_transformer(variant)
    save_pipeline(variant, model, folder)
    generator = torch.Generator().manual_seed(7)
    jobs: list[dict] = []
    for index, size in enumerate(variant.sizes):
        x = torch.randn((2, model.config.in_channels, *size), generator=generator)
        texts = torch.randn((2, TEXT, TEXT_WIDTH), generator=generator)
        step = torch.tensor(501)
        tensors = {"x": x, "texts": texts}
        with torch.no_grad():
            tensors["prediction"] = predict(model, x, texts, step)
        if variant.image:
            tensors["image"] = torch.randn((1, CHANNELS, *size), generator=generator)
        steps = run_steps[index] if index < len(run_steps) else 0
        if steps:
            noise = torch.randn((1, CHANNELS, *size), generator=torch.manual_seed(index))
            halves = (texts[:1], texts[1:])
            out = sample(variant, model, noise, halves, tensors.get("image"), steps, 6.0)
            tensors["latents"] = out / variant.scale
        path = folder / f"case{index}.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        jobs.append({"path": str(path), "seed": index, "steps": steps})
    return jobs
