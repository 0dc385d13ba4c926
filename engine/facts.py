"""What can be said of a model before its weights load: sizes, lengths, and what a clip may ask of it.

A VAE makes T = (frames - 1) / 4 + 1 latent frames of H/8 x W/8; the transformer takes patches of 2x2 (and,
in 1.5, of 2 latent frames). So height and width are multiples of 16, and frames are 4N + 1, or of the coarser
form that a family was trained for.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..sixbit_core.checkpoint import Checkpoint, open_checkpoint
from ..sixbit_core.families import ModelFamily
from ..sixbit_core.layout import BlockLayout
from ..sixbit_core.safetensors_file import read_header
from .errors import InputError

REFERENCE = "reference"

# diffusers' own defaults of what tensors cannot tell, for a transformer that comes without config.json.
CLIP_DEFAULTS = {"sample_height": 60, "sample_width": 90, "sample_frames": 49, "max_text_seq_length": 226}
# What tensors tell and a configuration of the same model must repeat.
STRUCTURE = (
    "num_layers",
    "num_attention_heads",
    "attention_head_dim",
    "in_channels",
    "out_channels",
    "patch_size_t",
    "time_embed_dim",
    "text_embed_dim",
    "ofs_embed_dim",
)
SECTIONS = ("text_encoder", "tokenizer", "vae", "scheduler")
MAX_SIDE, MAX_FRAMES = 8192, 8193  # far above what any family was trained for
TOKENIZERS = ("tokenizer.json", "spiece.model")  # either holds the whole vocabulary


@dataclass(frozen=True)
class ModelFacts:
    """A model on disk.

    Attributes:
        name: as the user gave it, without folders.
        checkpoint: the opened transformer weights (headers only).
        folder: diffusers pipeline folder that holds everything but the transformer.
        config: arguments of the transformer's constructor.
        spatial, temporal: pixels per latent pixel, frames per latent frame.
    """

    name: str
    checkpoint: Checkpoint
    folder: Path
    config: dict[str, Any]
    spatial: int
    temporal: int

    @property
    def family(self) -> ModelFamily:
        return self.checkpoint.family

    @property
    def layout(self) -> BlockLayout:
        """Kinds and (out, in) shapes of every block's linears."""
        family, shapes = self.family, self.checkpoint.shapes
        blocks = range(family.layers)
        return BlockLayout(
            family.linears,
            tuple(
                {kind: shapes[f"{family.blocks}.{n}.{kind}.weight"] for kind in family.linears}
                for n in blocks
            ),
        )

    @property
    def needs_image(self) -> bool:
        """Whether it makes a clip from an image."""
        return self.config["in_channels"] == 2 * self.config["out_channels"]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width it was trained for."""
        own = (self.config["sample_height"] * self.spatial, self.config["sample_width"] * self.spatial)
        return self.family.size or own

    @property
    def frames(self) -> int:
        """Frames it was trained for."""
        return self.family.frames or self.config["sample_frames"]

    @property
    def fps(self) -> int:
        """Frames a second: a clip is a whole number of seconds and one frame."""
        return self.family.frame_step

    @property
    def size_step(self) -> int:
        """What height and width must be multiples of."""
        return self.spatial * self.config["patch_size"]

    @property
    def text_length(self) -> int:
        """Tokens of a caption, padding included."""
        return self.config["max_text_seq_length"]

    def latent_frames(self, frames: int) -> int:
        """Latent frames of a clip, those that only pad to whole patches included."""
        latent = (frames - 1) // self.temporal + 1
        return latent + -latent % (self.config.get("patch_size_t") or 1)

    def tokens(self, size: tuple[int, int], frames: int) -> int:
        """Video and text tokens of one stream of a clip."""
        patches = (size[0] // self.size_step) * (size[1] // self.size_step)
        return (
            self.latent_frames(frames) // (self.config.get("patch_size_t") or 1) * patches + self.text_length
        )

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.config["num_attention_heads"] * self.config["attention_head_dim"]

    @property
    def fixed_size(self) -> bool:
        """Whether a learned position table ties it to its own size and length."""
        return bool(self.config.get("use_learned_positional_embeddings"))


def reference_folder() -> Path:
    """Where the bundled reference pipeline lies."""
    return Path(__file__).resolve().parents[1] / "reference" / "pipeline"


def named_source(name: str) -> Path:
    """Where a checkpoint lies: that of the name "reference", and the path itself for any other.

    Raises:
        InputError: the reference is not in this copy of the pack.
    """
    if name != REFERENCE:
        return Path(name)
    source = reference_folder()
    if not (source / "model_index.json").is_file():
        raise InputError(
            "this copy of the pack is without the bundled reference; copy the folder reference/pipeline of "
            f"the pack's repository to {source}"
        )
    return source


def read_facts(model: str, pipeline: Path | None = None) -> ModelFacts:
    """Read what `--model` and `--pipeline` name, without loading weights.

    Args:
        model: "reference", a diffusers pipeline folder, or one safetensors file of a transformer.
        pipeline: with a file, the pipeline folder that holds VAE, text encoder, tokenizer and scheduler.

    Raises:
        InputError: if a part is missing, or the folder is of another model than the file.
        CheckpointError: if the transformer cannot be read.
    """
    try:
        source, folder = _find(model, pipeline)
    except OSError as error:  # a name too long, a folder that may not be read
        raise InputError(f"cannot read {error.filename}: {error.strerror}") from error
    checkpoint = open_checkpoint(source)
    try:
        return _facts(model, checkpoint, folder)
    except (TypeError, KeyError, AttributeError, OverflowError) as error:
        raise InputError(
            f"a configuration in {folder} is of another form than diffusers writes "
            f"({type(error).__name__}: {error}); download its .json files again"
        ) from error


def _find(model: str, pipeline: Path | None) -> tuple[Path, Path]:
    """Where transformer and pipeline folder are; every part is there, its files whole by their headers."""
    source = named_source(model)
    if not source.exists():
        raise InputError(f"--model {model} does not exist; give reference, a pipeline folder or a file")
    if pipeline is not None:
        pipeline = named_source(str(pipeline))
    elif source.is_file():
        open_checkpoint(source)  # what is no transformer at all is told so first
        raise InputError(
            f"--model {source.name} is a transformer alone; add --pipeline FOLDER with VAE and text encoder"
        )
    folder = pipeline or source
    if pipeline is not None and not pipeline.is_dir():
        state = "is no folder" if pipeline.exists() else "does not exist"
        raise InputError(f"--pipeline {pipeline} {state}; give a diffusers folder with VAE and text encoder")
    missing = [part for part in SECTIONS if not (folder / part).is_dir()]
    if missing:
        raise InputError(f"{folder} is not a whole diffusers pipeline: it lacks {', '.join(missing)}")
    for part in ("text_encoder", "vae"):
        files = sorted((folder / part).glob("*.safetensors"))
        if not files:
            raise InputError(f"{folder / part} holds no .safetensors weights; get that version of them")
        for file in files:
            read_header(file)
    if not any((folder / "tokenizer" / name).is_file() for name in TOKENIZERS):
        raise InputError(f"{folder / 'tokenizer'} holds none of {', '.join(TOKENIZERS)}; download it again")
    return source, folder


def check_clip(facts: ModelFacts, size: tuple[int, int], frames: int, image: Path | None) -> None:
    """Refuse a clip that the model cannot make, naming the nearest it can. Raises InputError."""
    if max(size) > MAX_SIDE:
        raise InputError(f"--size {size[0]}x{size[1]}: height and width must be {MAX_SIDE} or less")
    if frames > MAX_FRAMES:
        raise InputError(f"--frames must be {MAX_FRAMES} or less, got {frames}")
    step = facts.size_step
    near = tuple(max(step, round(side / step) * step) for side in size)
    if near != tuple(size):
        raise InputError(
            f"--size {size[0]}x{size[1]}: height and width must be multiples of {step}; "
            f"the nearest is {near[0]}x{near[1]}"
        )
    if facts.fixed_size and tuple(size) != facts.size:
        own = f"{facts.size[0]}x{facts.size[1]}"
        raise InputError(f"--size {size[0]}x{size[1]}: {facts.family.label} takes {own} only")
    step = facts.family.frame_step
    if frames < 1 or (frames - 1) % step:
        low = max(0, (frames - 1) // step) * step + 1
        near = f"the nearest are {low} and {low + step}"
        raise InputError(f"--frames {frames}: {facts.family.label} takes {step}N+1 frames; {near}")
    if facts.fixed_size and frames != facts.frames:
        raise InputError(f"--frames: {facts.family.label} takes {facts.frames} only, got {frames}")
    if facts.needs_image and image is None:
        raise InputError(f"{facts.family.label} makes a clip from an image: add --image FILE")
    if image is not None and not facts.needs_image:
        raise InputError(f"--image: {facts.family.label} makes clips from text alone; leave --image out")


def check_sampling(steps: int, cfg: float, seed: int) -> None:
    """Raise InputError for numbers that sampling cannot be given."""
    if not 1 <= steps <= 1000:
        raise InputError(f"--steps must lie between 1 and 1000, got {steps}")
    if not 0 <= cfg <= 100:
        raise InputError(f"--cfg must lie between 0 and 100, got {cfg:g}")
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed must be 0 or more and below 2^63, got {seed}")


def check_text_to_video(facts: ModelFacts, command: str) -> None:
    """Raise InputError for a model that `command` cannot give what it needs."""
    if facts.needs_image:
        raise InputError(
            f"{facts.family.label} makes clips from images; {command} takes text-to-video models only"
        )


def _facts(model: str, checkpoint: Checkpoint, folder: Path) -> ModelFacts:
    inferred = checkpoint.family.diffusers_config(checkpoint.shapes)
    beside = read_json(folder / "transformer" / "config.json") or {}
    own = checkpoint.config or {}
    told = {key: value for key, value in {**beside, **own}.items() if not key.startswith("_")}
    left_open = (*CLIP_DEFAULTS, "use_learned_positional_embeddings")  # a stored table may be a sincos one
    by_tensors = {key: value for key, value in inferred.items() if key not in left_open}
    config = {**CLIP_DEFAULTS, **inferred, **told, **by_tensors}
    for key in CLIP_DEFAULTS:
        if type(config[key]) is not int or config[key] < 1:
            raise InputError(f"the transformer's {key} must be a whole number, {folder} says {config[key]!r}")
    vae = read_json(folder / "vae" / "config.json")
    if vae is None:
        raise InputError(f"{folder / 'vae'} lacks config.json; {folder} is not a whole diffusers pipeline")
    _check_structure(checkpoint, inferred, own, "its configuration")
    _check_structure(checkpoint, inferred, beside, f"transformer/config.json of {folder}")
    check_parts(checkpoint, config, vae, folder)
    spatial = 2 ** (len(vae["block_out_channels"]) - 1)
    name = model if model == REFERENCE else Path(model).resolve().name
    return ModelFacts(
        name, checkpoint, folder, config, spatial, int(vae.get("temporal_compression_ratio", 4))
    )


def _check_structure(
    checkpoint: Checkpoint, inferred: dict[str, Any], told: dict[str, Any], where: str
) -> None:
    """Raise InputError where a configuration contradicts the tensors."""
    for key in STRUCTURE:
        if key in told and told[key] != inferred[key]:
            raise InputError(
                f"{checkpoint.path.name} is {checkpoint.family.label} with {key} {inferred[key]}, and "
                f"{where} says {told[key]}: give weights and pipeline folder of one model"
            )


def check_parts(checkpoint: Checkpoint, config: dict[str, Any], vae: dict[str, Any], folder: Path) -> None:
    """Raise InputError where text encoder, VAE or scheduler of the folder are another model's."""
    family = checkpoint.family
    encoder = read_json(folder / "text_encoder" / "config.json") or {}
    scheduler = read_json(folder / "scheduler" / "scheduler_config.json") or {}
    for what, found, needed in (
        ("a text encoder of width", encoder.get("d_model"), config["text_embed_dim"]),
        ("a VAE of latent channels", vae.get("latent_channels"), config["out_channels"]),
        ("a VAE scaling factor of", vae.get("scaling_factor"), family.vae_scaling_factor),
        ("a scheduler with snr_shift_scale", scheduler.get("snr_shift_scale"), family.snr_shift_scale),
    ):
        if None not in (found, needed) and not math.isclose(found, needed, rel_tol=1e-6):
            raise InputError(
                f"{checkpoint.path.name} is {family.label} and needs {what} {needed:g}; {folder} has "
                f"{found:g}: give the pipeline folder of the same model"
            )


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object from a file, None where there is no file. Raises InputError for anything else in it."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} holds no JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise InputError(f"{path} holds no JSON object; download it again")
    return value
