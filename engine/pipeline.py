"""A loaded model: one diffusers pipeline, and its transformer in one or more precisions."""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXImageToVideoPipeline, CogVideoXPipeline
from PIL import Image
from safetensors import SafetensorError
from transformers import T5EncoderModel

from ..sixbit_core.checkpoint import CheckpointError
from ..sixbit_core.families import ModelFamily
from ..sixbit_core.layout import BlockLayout
from .errors import InputError
from .facts import ModelFacts, read_facts
from .machine import Machine, synchronize
from .schedule import ddim_trailing
from .transformer import FULL, build_transformer

WHOLE_PIXELS = (
    1 << 17
)  # frames up to this size are decoded whole; larger ones in overlapping tiles, for memory
PLAIN_SENTENCE = "a red star is moving right on a white background"  # any English vocabulary has words of it
PARK_BYTES = 1 << 30  # a text encoder larger than this leaves the GPU after the captions are encoded
LOADING_ERRORS = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    RuntimeError,
    SafetensorError,
)


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
        synchronize(self.device)  # a kernel may still read weights that wait in host memory
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
        """Latents of one clip to (frames, H, W, 3) uint8; latent frames that only pad are dropped first.

        Raises:
            RuntimeError: if a decoded frame is not finite.
        """
        kept = (frames - 1) // self.facts.temporal + 1
        pixels = latents.shape[-1] * latents.shape[-2] * self.facts.spatial**2
        vae = self.pipeline.vae
        vae.enable_tiling() if pixels > WHOLE_PIXELS else vae.disable_tiling()
        video = self.pipeline.decode_latents(latents[:, latents.shape[1] - kept :].to(self.dtype))
        if not torch.isfinite(video).all():
            raise RuntimeError(
                f"the VAE decoded frames that are not finite, in {str(self.dtype).removeprefix('torch.')}; "
                "its weights may be damaged: download them again"
            )
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
    with _as_input_error(facts.folder):
        transformer = build_transformer(facts, weights, machine.device, dtype)
    built = time.perf_counter() - start
    kind = _ImageToVideo if facts.needs_image else _TextToVideo
    with _as_input_error(facts.folder):
        loaded = {
            "text_encoder": _whole(T5EncoderModel, facts.folder / "text_encoder", dtype),
            "vae": _whole(AutoencoderKLCogVideoX, facts.folder / "vae", dtype),
        }
        parts = kind.from_pretrained(
            facts.folder, transformer=transformer, **loaded, torch_dtype=dtype, local_files_only=True
        )
        _check_tokenizer(parts.tokenizer, facts.folder)
        parts.scheduler = ddim_trailing(parts.scheduler.config)
    parts.set_progress_bar_config(disable=True)
    parts.vae.to(machine.device)
    rest = time.perf_counter() - start - built
    transformers, seconds = {weights: transformer}, {weights: built}
    return LoadedModel(facts, machine.device, dtype, parts, facts.layout, rest, transformers, seconds)


@contextmanager
def _as_input_error(folder: Path) -> Iterator[None]:
    """What the libraries raise over a damaged folder as an InputError that names it."""
    try:
        with warnings.catch_warnings():  # newer diffusers rename torch_dtype, older ones know no other name
            warnings.simplefilter("ignore", FutureWarning)
            yield
    except (InputError, CheckpointError, torch.OutOfMemoryError):
        raise
    except LOADING_ERRORS as error:
        why = f"{type(error).__name__}: {error}"
        raise InputError(f"{folder} cannot be loaded as a diffusers pipeline ({why})") from error


def _whole(kind: type, folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    """A part of the pipeline whose every tensor came from its files. Raises InputError."""
    part, told = kind.from_pretrained(
        folder, torch_dtype=dtype, use_safetensors=True, local_files_only=True, output_loading_info=True
    )
    lacking = sorted(told["missing_keys"])
    if lacking:
        raise InputError(
            f"{folder} lacks the tensor {lacking[0]} ({len(lacking)} in all); is the download whole?"
        )
    return part


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raise InputError for a tokenizer to which every word is unknown: every caption would be the same."""
    if not tokenizer.decode(tokenizer(PLAIN_SENTENCE).input_ids, skip_special_tokens=True).strip():
        raise InputError(f"{folder / 'tokenizer'} knows no English word; download it again")


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
