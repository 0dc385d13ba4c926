"""Sample one clip: diffusers' own pipeline call, under a `RunState`.

The noise is drawn in float32 on the CPU from the seed, so a CPU and a GPU start from the same clip.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from PIL import Image

from ..sixbit_core.delta_codecs import bytes_in_host_memory, bytes_needed, resolve_location
from ..sixbit_core.report import RunReport
from ..sixbit_core.run import RunState
from .attach import CONDITIONINGS, attached
from .facts import ModelFacts
from .finite import FiniteWatch
from .machine import free_bytes, free_host_bytes, synchronize
from .pipeline import LoadedModel, TextEmbeds, first_frame
from .schedule import plan
from .settings import RunSettings

OnStep = Callable[[int, int], None]  # (steps done, steps in all)


@dataclass(frozen=True)
class ClipSpec:
    """What to sample; checked by the caller against the model's facts.

    Attributes:
        size: height, width in pixels.
        image: first frame, for an image-to-video model.
    """

    prompt: str
    size: tuple[int, int]
    frames: int
    negative: str = ""
    steps: int = 50
    cfg: float = 6.0
    seed: int = 0
    image: Image.Image | None = None

    @property
    def guided(self) -> bool:
        return self.cfg > 1


@dataclass(frozen=True)
class Sampled:
    """One clip in latents, and how it came about.

    Attributes:
        latents: (1, latent frames, channels, h, w).
        report: what the run decided; None for plain diffusers.
        seconds: spent sampling.
    """

    latents: torch.Tensor
    report: RunReport | None
    seconds: float


def sample(
    model: LoadedModel,
    settings: RunSettings | None,
    clip: ClipSpec,
    embeds: TextEmbeds | None = None,
    on_step: OnStep | None = None,
) -> Sampled:
    """Sample a clip with the transformer that `settings` ask for.

    Args:
        settings: None for plain diffusers in full precision, with nothing attached.
        embeds: the encoded caption, where it is at hand.

    Raises:
        RuntimeError: at the first latent that is not finite, naming the step.
    """
    embeds = embeds or model.encode(clip.prompt, clip.negative, clip.guided)
    if settings is None:
        model.use("full")
        latents, seconds = _call(model, clip, embeds, on_step)
        return Sampled(latents, None, seconds)
    settings = place_cache(model, settings, clip)
    run = RunState(model.layout, settings.dmpq, settings.cache, settings.predictor)
    return sample_under(model, run, settings.weights, clip, embeds, on_step)


def place_cache(model: LoadedModel, settings: RunSettings, clip: ClipSpec) -> RunSettings:
    """Settings with cache location "auto" settled: up to half of what the GPU has free, to leave room to run,
    or of what host memory has.

    On a CPU it stays as it is.
    """
    free = free_bytes(model.device)
    if settings.cache is None or free is None:
        return settings
    size = cache_size(model.facts, clip, model.dtype)
    pinned = cache_size(model.facts, clip, model.dtype, bytes_in_host_memory)("host")
    fits_host = pinned <= free_host_bytes() // 2
    location = resolve_location(settings.cache.location, free // 2, size, fits_host)
    return replace(settings, cache=replace(settings.cache, location=location))


def cache_size(
    facts: ModelFacts, clip: ClipSpec, dtype: torch.dtype, count: Callable[..., int] = bytes_needed
) -> Callable[[str], int]:
    """Location -> bytes that a full delta cache takes there for a clip, or what else `count` counts of it."""
    tokens, blocks = facts.tokens(clip.size, clip.frames), facts.config["num_layers"]
    streams = 2 if clip.guided else 1
    return lambda location: count(location, tokens, facts.width, blocks, streams, dtype)


def sample_under(
    model: LoadedModel,
    run: RunState,
    weights: str,
    clip: ClipSpec,
    embeds: TextEmbeds,
    on_step: OnStep | None = None,
) -> Sampled:
    """Sample a clip under a run of one's own, which is closed at the end, whatever happens."""
    transformer = model.use(weights)
    evaluations = plan(model.pipeline.scheduler, clip.steps)
    conditionings = CONDITIONINGS[2 if clip.guided else 1]
    try:
        with attached(transformer, run, evaluations, model.facts.family, conditionings):
            latents, seconds = _call(model, clip, embeds, on_step)
            run.finish()
        return Sampled(latents, run.report(), seconds)
    finally:
        run.close()


def initial_noise(model: LoadedModel, clip: ClipSpec) -> torch.Tensor:
    """The noise that sampling starts from, (1, latent frames, channels, h, w) in the model's dtype.

    Drawn channels first, as ComfyUI draws it: one seed starts the same clip there and here.
    """
    facts = model.facts
    height, width = (side // facts.spatial for side in clip.size)
    shape = (1, facts.config["out_channels"], facts.latent_frames(clip.frames), height, width)
    noise = (
        torch.randn(shape, generator=torch.Generator().manual_seed(clip.seed)).transpose(1, 2).contiguous()
    )
    return noise.to(model.device, model.dtype)


def _call(
    model: LoadedModel, clip: ClipSpec, embeds: TextEmbeds, on_step: OnStep | None
) -> tuple[torch.Tensor, float]:
    """The pipeline's call, watched step by step: latents and seconds."""
    watch = FiniteWatch()

    def after_step(pipeline: object, index: int, timestep: object, tensors: dict) -> dict:
        watch.saw(index, tensors["latents"])
        if on_step:
            on_step(index + 1, clip.steps)
        return {}

    image = {} if clip.image is None else {"image": first_frame(clip.image, clip.size)}
    synchronize(model.device)
    start = time.perf_counter()
    latents = model.pipeline(
        **image,
        prompt_embeds=embeds.prompt,
        negative_prompt_embeds=embeds.negative,
        height=clip.size[0],
        width=clip.size[1],
        num_frames=clip.frames,
        num_inference_steps=clip.steps,
        guidance_scale=clip.cfg,
        generator=torch.Generator().manual_seed(clip.seed),
        latents=initial_noise(model, clip),
        output_type="latent",
        return_dict=False,
        callback_on_step_end=after_step,
        max_sequence_length=model.facts.text_length,
    )[0]
    watch.end()
    synchronize(model.device)
    return latents, time.perf_counter() - start


def sample_frames(
    model: LoadedModel, settings: RunSettings | None, clip: ClipSpec, embeds: TextEmbeds | None = None
) -> tuple[np.ndarray, Sampled]:
    """Sample and decode: (frames, H, W, 3) uint8, and the run."""
    sampled = sample(model, settings, clip, embeds)
    return model.decode(sampled.latents, clip.frames), sampled
