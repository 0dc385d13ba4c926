"""A loaded model: one diffusers pipeline, and its transformer in one or more precisions."""

import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from diffusers import CogVideoXImageToVideoPipeline, CogVideoXPipeline
from PIL import Image
from safetensors import SafetensorError

from ..sixbit_core.families import ModelFamily
from ..sixbit_core.layout import BlockLayout
from .errors import InputError
from .facts import ModelFacts, read_facts
from .machine import Machine
from .schedule import ddim_trailing
from .transformer import FULL, build_transformer

WHOLE_PIXELS = (
    1 << 17
)  # frames up to this size are decoded whole; larger ones in overlapping tiles, for memory
PARK_BYTES = 1 << 30  # a text encoder larger than this leaves the GPU after the captions are encoded


class _TextToVideo(CogVideoXPipeline):
    """diffusers' pipeline, running where its transformer is: its other parts may be parked."""

    _execution_device = property(lambda self: self.transformer.device)


class _ImageToVideo(CogVideoXImageToVideoPipeline):
    """diffusers' pipeline, running where its transformer is: its other parts may be parked."""

    _execution_device = property(lambda self: self.transformer.device)


@dataclass(frozen=True)
class TextEmbeds:
    """Encoded captions, (1, tokens, width) each; `negative` is None without guidance."""

    prompt: torch.Tensor
    negative: torch.Tensor | None


@dataclass
class LoadedModel:
    """Everything needed to sample.

    Attributes:
        facts: what is on disk.
        device, dtype: where and in what it computes.
        pipeline: the diffusers pipeline; `use` puts a transformer into it.
        layout: shapes of the block linears.
        parts_seconds: spent loading everything but transformers.
        build_seconds: spent on each transformer, by its weights.
    """

    facts: ModelFacts
    device: torch.device
    dtype: torch.dtype
    pipeline: CogVideoXPipeline | CogVideoXImageToVideoPipeline
    layout: BlockLayout
    parts_seconds: float = 0.0
    transformers: dict[str, torch.nn.Module] = field(default_factory=dict)
    build_seconds: dict[str, float] = field(default_factory=dict)

    def use(self, weights: str) -> torch.nn.Module:
        """The transformer with `weights` ("full", "search", "rtn"), loaded once, put into the pipeline."""
        if weights not in self.transformers:
            start = time.perf_counter()
            self.transformers[weights] = build_transformer(self.facts, weights, self.device, self.dtype)
            self.build_seconds[weights] = time.perf_counter() - start
        self.pipeline.register_modules(transformer=self.transformers[weights])
        return self.transformers[weights]

    def load_seconds(self, weights: str) -> float:
        """Seconds that loading takes where only these weights are wanted."""
        return self.parts_seconds + self.build_seconds[weights]

    def drop(self, weights: str) -> None:
        """Free a transformer that will not be used again."""
        self.transformers.pop(weights, None)

    @torch.inference_mode()
    def encode(self, prompt: str, negative: str = "", guided: bool = True) -> TextEmbeds:
        """Encode a caption at the length the transformer was trained for."""
        encoder = self.pipeline.text_encoder.to(self.device)
        embeds = self.pipeline.encode_prompt(
            prompt,
            negative,
            do_classifier_free_guidance=guided,
            max_sequence_length=self.facts.text_length,
            device=self.device,
        )
        if sum(p.nbytes for p in encoder.parameters()) > PARK_BYTES:
            encoder.to("cpu")
        return TextEmbeds(embeds[0], embeds[1] if guided else None)

    @torch.inference_mode()
    def decode(self, latents: torch.Tensor, frames: int) -> np.ndarray:
        """Latents of one clip to (frames, H, W, 3) uint8; latent frames that only pad are dropped first."""
        kept = (frames - 1) // self.facts.temporal + 1
        pixels = latents.shape[-1] * latents.shape[-2] * self.facts.spatial**2
        vae = self.pipeline.vae
        vae.enable_tiling() if pixels > WHOLE_PIXELS else vae.disable_tiling()
        video = self.pipeline.decode_latents(latents[:, latents.shape[1] - kept :].to(self.dtype))
        video = (video[0].float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
        return video.permute(1, 2, 3, 0).cpu().numpy()


def compute_dtype(family: ModelFamily, machine: Machine) -> torch.dtype:
    """float32 on a CPU; on a GPU the 16-bit type the weights were published in."""
    return torch.float32 if machine.device.type == "cpu" else getattr(torch, family.native_dtype)


def check_dtype(family: ModelFamily, dtype: torch.dtype) -> None:
    """Refuse float16 where it overflows (a black clip, seen only at the end). Raises InputError."""
    if dtype == torch.float16 and family.native_dtype != "float16":
        raise InputError(f"{family.label} overflows in float16 and gives a black clip; run it in bfloat16")


def load_model(
    model: str,
    pipeline: Path | None,
    weights: str,
    machine: Machine,
    dtype: torch.dtype | None = None,
    facts: ModelFacts | None = None,
) -> LoadedModel:
    """Load a model.

    Args:
        model, pipeline: as in `read_facts`.
        weights: "full", "search" or "rtn", see `build_transformer`.
        machine: where to run.
        dtype: None for the one that fits family and machine.
        facts: what `read_facts` gave, where it was called already.

    Raises:
        InputError, CheckpointError: with one line for the user.
    """
    start = time.perf_counter()
    facts = facts or read_facts(model, pipeline)
    dtype = dtype or compute_dtype(facts.family, machine)
    check_dtype(facts.family, dtype)
    transformer = build_transformer(facts, weights, machine.device, dtype)
    built = time.perf_counter() - start
    kind = _ImageToVideo if facts.needs_image else _TextToVideo
    options = {"torch_dtype": dtype, "use_safetensors": True, "local_files_only": True}
    try:
        with warnings.catch_warnings():  # newer diffusers rename torch_dtype, older ones know no other name
            warnings.simplefilter("ignore", FutureWarning)
            parts = kind.from_pretrained(facts.folder, transformer=transformer, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"{facts.folder} cannot be loaded as a diffusers pipeline: {error}") from error
    parts.scheduler = ddim_trailing(parts.scheduler.config)
    parts.set_progress_bar_config(disable=True)
    parts.vae.to(machine.device)
    rest = time.perf_counter() - start - built
    transformers, seconds = {weights: transformer}, {weights: built}
    return LoadedModel(facts, machine.device, dtype, parts, facts.layout, rest, transformers, seconds)


def first_frame(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The image cut to the clip's shape about its middle, and scaled to it; (height, width)."""
    height, width = size
    scale = max(height / image.height, width / image.width)
    resized = image.resize(
        (round(image.width * scale), round(image.height * scale)), Image.Resampling.LANCZOS
    )
    left, top = (resized.width - width) // 2, (resized.height - height) // 2
    return resized.crop((left, top, left + width, top + height))


__all__ = ["FULL", "LoadedModel", "TextEmbeds", "check_dtype", "compute_dtype", "first_frame", "load_model"]
