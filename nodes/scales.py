"""What a pipeline says beside its transformer's weights, seen to be of the form that diffusers writes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..sixbit_core.checkpoint import Checkpoint, CheckpointError
from ..sixbit_core.locate import read_json

# diffusers' own defaults of what tensors cannot tell, for weights that come without config.json.
_DEFAULTS = {"sample_height": 60, "sample_width": 90, "sample_frames": 49, "max_text_seq_length": 226}
_SCALES = ("spatial_interpolation_scale", "temporal_interpolation_scale")
_OPEN = (*_DEFAULTS, "use_learned_positional_embeddings")  # a stored table may be a sincos one


@dataclass(frozen=True)
class Scales:
    """Two numbers of a pipeline.

    Attributes:
        snr_shift_scale: of the noise schedule.
        vae: factor between the VAE's latents and the model's.
    """

    snr_shift_scale: float
    vae: float


def scales_of(checkpoint: Checkpoint) -> Scales:
    """From the pipeline folder a checkpoint lies in, else of its published family, else 1.0 and 0.7.

    Raises:
        CheckpointError: a file there is damaged.
    """
    family = checkpoint.family
    scheduler = _read(checkpoint.path / "scheduler" / "scheduler_config.json", "snr_shift_scale")
    vae = _read(checkpoint.path / "vae" / "config.json", "scaling_factor")
    return Scales(scheduler or family.snr_shift_scale or 1.0, vae or family.vae_scaling_factor or 0.7)


def transformer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The diffusers transformer's arguments: defaults, what the file says, what the tensors tell.

    Raises:
        CheckpointError: the file says what cannot be.
    """
    told = {key: value for key, value in (checkpoint.config or {}).items() if not key.startswith("_")}
    for key in _DEFAULTS:
        if key in told and (type(told[key]) is not int or told[key] < 1):
            raise _odd(checkpoint.path, key, told)
    for key in _SCALES:
        _number(checkpoint.path, key, told)
    inferred = checkpoint.family.diffusers_config(checkpoint.shapes)
    sure = {key: value for key, value in inferred.items() if key not in _OPEN}
    return {**_DEFAULTS, **inferred, **told, **sure}


def _read(path: Path, key: str) -> float | None:
    return _number(path, key, read_json(path)) if path.is_file() else None


def _number(path: Path, key: str, told: Mapping[str, Any]) -> float | None:
    value = told.get(key)
    if value is not None and not (type(value) in (int, float) and 0 < value < math.inf):
        raise _odd(path, key, told)
    return value


def _odd(path: Path, key: str, told: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(f"{path} says {key} {told[key]!r}, needed is a number above 0; download it again")
