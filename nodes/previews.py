"""Colours of live previews: the host multiplies a latent by these factors at every step.

    rgb = latent · factors + bias,  in [-1, 1], latents in the scale of the sampler

Each checkpoint gets those of its own VAE. For the published CogVideoX they are the ones of
kijai/ComfyUI-CogVideoXWrapper (latent_preview.py), which has one set for every variant and does not say how
it was found; its own previews use them, and here they are unchecked, since no published VAE was at hand. For
the bundled reference they were fitted (`reference/preview.py`). Any other model has none, and no preview.
"""

import json
from dataclasses import dataclass

from ..sixbit_core.checkpoint import Checkpoint
from ..sixbit_core.families.cogvideox import PUBLISHED
from .files import reference_folder


@dataclass(frozen=True)
class PreviewColours:
    """Of a VAE: a row (r, g, b) for each latent channel, and what is added to them."""

    factors: tuple[tuple[float, ...], ...]
    bias: tuple[float, ...] = (0.0, 0.0, 0.0)


_PUBLISHED = PreviewColours(
    (
        (0.11946, 0.09919, -0.00483),
        (-0.00120, 0.05497, 0.02132),
        (-0.01409, -0.00870, -0.02099),
        (0.03064, 0.12186, 0.01396),
        (0.09274, 0.03029, 0.05083),
        (0.03791, 0.04935, 0.05856),
        (0.01775, 0.00884, 0.03601),
        (0.10610, 0.02340, 0.05715),
        (0.12736, -0.01096, 0.04327),
        (-0.01874, 0.08221, 0.10613),
        (0.00843, 0.07624, 0.09296),
        (0.12938, 0.12360, 0.04479),
        (0.04566, 0.04106, -0.01770),
        (0.00019, -0.01397, 0.05330),
        (0.08082, 0.11548, -0.02146),
        (-0.01518, -0.00580, 0.07217),
    )
)


def preview_colours(checkpoint: Checkpoint) -> PreviewColours | None:
    """Those of the VAE that a checkpoint was trained on; None where they are unknown."""
    if checkpoint.family.name in {family.name for family in PUBLISHED}:
        return _PUBLISHED
    path = reference_folder().parent / "preview.json"
    if not path.is_file():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))
    if found["fingerprint"] != checkpoint.fingerprint:
        return None
    return PreviewColours(tuple(map(tuple, found["factors"])), tuple(found["bias"]))
