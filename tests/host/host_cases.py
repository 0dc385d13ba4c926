"""Tiny random pipelines of every CogVideoX variant, and what diffusers makes of them. Needs diffusers."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from safetensors.torch import save_file

TEXT, TEXT_WIDTH, CHANNELS = 16, 32, 4
SIZES = ((64, 96), (48, 80))  # pixels, height and width; the first is the trained one
CFG = 6.0


@dataclass(frozen=True)
class Variant:
    """One kind of CogVideoX.

    Attributes:
        changes: to the transformer's configuration.
        shift, scale: snr_shift_scale and the VAE's factor.
        latents: (frames, height, width) of latents whose prediction is tried.
        sizes, lengths: of whole clips, in pixels and frames.
    """

    name: str
    changes: dict = field(default_factory=dict)
    shift: float = 1.0
    scale: float = 0.7
    latents: tuple[tuple[int, int, int], ...] = ((3, 8, 12), (2, 8, 12), (3, 6, 10), (4, 12, 8))
    sizes: tuple[tuple[int, int], ...] = SIZES
    lengths: tuple[int, int] = (9, 17)

    @property
    def image(self) -> bool:
        return self.changes.get("in_channels") == 2 * CHANNELS


@dataclass(frozen=True)
class Run:
    """One whole run through KSampler."""

    size: tuple[int, int]
    frames: int
    steps: int
    seed: int


_ROTARY = {"use_rotary_positional_embeddings": True}
_LATER = {"patch_size_t": 2, "sample_height": 20, "sample_width": 20, **_ROTARY, "patch_bias": False}
_LATER_CLIPS = {"latents": ((4, 8, 12), (2, 8, 12), (4, 6, 10), (6, 12, 8)), "lengths": (17, 33)}
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("2b", {}, 3.0, 1.15258426),
        Variant("5b", _ROTARY),
        Variant(
            "5b-i2v",
            {**_ROTARY, "in_channels": 8, "use_learned_positional_embeddings": True},
            latents=((3, 8, 12), (2, 8, 12)),
            sizes=SIZES[:1],
        ),
        Variant("1.5", _LATER, **_LATER_CLIPS),
        Variant("1.5-i2v", {**_LATER, "in_channels": 8, "ofs_embed_dim": 32}, **_LATER_CLIPS),
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


def make_vae(variant: Variant) -> AutoencoderKLCogVideoX:
    """A small VAE whose latents have no spread: diffusers draws them, the host takes their mean."""
    torch.manual_seed(1)
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(4, 4, 4, 4),
        latent_channels=CHANNELS,
        layers_per_block=1,
        norm_num_groups=2,
        scaling_factor=variant.scale,
        invert_scale_latents="ofs_embed_dim" in variant.changes,
    ).eval()
    with torch.no_grad():
        vae.encoder.conv_out.conv.weight[CHANNELS:] = 0
        vae.encoder.conv_out.conv.bias[CHANNELS:] = -100
    return vae


def make_pipeline(variant: Variant) -> CogVideoXPipeline | CogVideoXImageToVideoPipeline:
    """The variant as diffusers runs it; captions come encoded."""
    kind = CogVideoXImageToVideoPipeline if variant.image else CogVideoXPipeline
    parts = {"transformer": make_transformer(variant), "scheduler": make_scheduler(variant)}
    pipeline = kind(tokenizer=None, text_encoder=None, vae=make_vae(variant), **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def save_pipeline(variant: Variant, model: CogVideoXTransformer3DModel, folder: Path) -> None:
    """What the nodes read of a pipeline folder: transformer, scheduler and VAE."""
    model.save_pretrained(folder / "transformer")
    make_scheduler(variant).save_pretrained(folder / "scheduler")
    make_vae(variant).save_pretrained(folder / "vae")


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
def clip_latents(
    variant: Variant,
    pipeline: CogVideoXPipeline | CogVideoXImageToVideoPipeline,
    run: Run,
    texts: torch.Tensor,
    image: torch.Tensor | None,
) -> torch.Tensor:
    """Latents (1, C, frames, h, w) of diffusers' own call in the VAE's scale; without those that only pad.

    Args:
        texts: (2, tokens, width), negative and positive.
        image: (1, H, W, 3), of an image-to-video variant.
    """
    kept = (run.frames - 1) // 4 + 1
    frames = kept + kept % (pipeline.transformer.config.patch_size_t or 1)
    height, width = run.size
    shape = (1, CHANNELS, frames, height // 8, width // 8)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(run.seed))
    first = {} if image is None else {"image": image.movedim(-1, 1)}
    latents = pipeline(
        **first,
        prompt_embeds=texts[1:],
        negative_prompt_embeds=texts[:1],
        height=height,
        width=width,
        num_frames=run.frames,
        num_inference_steps=run.steps,
        guidance_scale=CFG,
        generator=torch.Generator().manual_seed(0),
        latents=noise.transpose(1, 2),
        output_type="latent",
        return_dict=False,
        max_sequence_length=TEXT,
    )[0]
    return latents[:, frames - kept :].transpose(1, 2) / variant.scale


def write_case(variant: Variant, folder: Path, runs: list[Run]) -> dict:
    """Write pipeline, inputs and diffusers' answers of a variant; returns what the host is to compute."""
    pipeline = make_pipeline(variant)
    model = pipeline.transformer
    save_pipeline(variant, model, folder)
    generator = torch.Generator().manual_seed(7)
    predictions, clips = [], []
    for index, size in enumerate(variant.latents):
        x = torch.randn((2, model.config.in_channels, *size), generator=generator)
        texts = torch.randn((2, TEXT, TEXT_WIDTH), generator=generator)
        with torch.no_grad():
            found = predict(model, x, texts, torch.tensor(501))
        predictions.append(_save(folder / f"prediction{index}", x=x, texts=texts, prediction=found))
    for index, run in enumerate(runs):
        texts = torch.randn((2, TEXT, TEXT_WIDTH), generator=generator)
        tensors = {"texts": texts}
        if variant.image:
            pixels = torch.randint(0, 256, (1, *run.size, 3), generator=generator)
            tensors["image"] = pixels / 255
        tensors["latents"] = clip_latents(variant, pipeline, run, texts, tensors.get("image"))
        clips.append({"path": _save(folder / f"run{index}", **tensors), **vars(run)})
    return {"predictions": predictions, "runs": clips}


def _save(path: Path, **tensors: torch.Tensor) -> str:
    path = path.with_suffix(".safetensors")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return str(path)
