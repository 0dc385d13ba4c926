"""What a pipeline says beside its transformer's weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..sixbit_core.checkpoint import Checkpoint


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
    """From the pipeline folder a checkpoint lies in, else of its published family, else 1.0 and 0.7."""
    family = checkpoint.family
    scheduler = _read(checkpoint.path / "scheduler" / "scheduler_config.json")
    vae = _read(checkpoint.path / "vae" / "config.json")
    return Scales(
        scheduler.get("snr_shift_scale") or family.snr_shift_scale or 1.0,
        vae.get("scaling_factor") or family.vae_scaling_factor or 0.7,
    )


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
