"""Captions to evaluate and calibrate with: the reference's own world, a file, or a few plain ones."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import InputError
from .facts import REFERENCE

if TYPE_CHECKING:
    from ..reference.world import Scene

MOST = 100_000
HELD_OUT_SEED, TRAIN_SEED = 7, 11
PLAIN = (
    "A golden retriever runs along a beach at sunset, waves rolling in behind it.",
    "Steam rises from a cup of coffee on a wooden table while rain falls outside the window.",
    "An aerial view of a winding river through an autumn forest, the camera moving slowly forward.",
    "A woman in a yellow raincoat walks through a crowded night market lit by paper lanterns.",
    "A red vintage car drives along a coastal road, seen from the side.",
    "Close-up of a hummingbird hovering at a purple flower, wings a blur.",
    "A potter shapes a clay bowl on a spinning wheel, hands wet and steady.",
    "Snow falls on a quiet mountain village as lights come on in the windows.",
)


@dataclass(frozen=True)
class Prompt:
    """A caption, and the scene it describes where the reference's world drew it."""

    text: str
    scene: "Scene | None" = None


def read_prompts(model: str, given: str | None, default: int, held_out: bool) -> tuple[Prompt, ...]:
    """What `--prompts` means.

    Args:
        model: "reference" draws from its world; any other model has captions of its own.
        given: a number, a file of captions one a line, or None.
        default: the number where none is given.
        held_out: whether the reference draws combinations that it was never trained on.

    Raises:
        InputError: for a file that is not there or empty, or a number that cannot be.
    """
    if given is not None and not re.fullmatch(r"[+-]?\d+", given, re.ASCII):
        return _from_file(Path(given))
    most = default if model == REFERENCE else min(default, len(PLAIN))
    count = most if given is None else int(given[:12])  # the longest number that is allowed is shorter
    if not 1 <= count <= MOST:
        raise InputError(f"--prompts must be between 1 and {MOST}, or a file, got {count}")
    if model == REFERENCE:
        from ..reference.world import sample_prompts

        seed = HELD_OUT_SEED if held_out else TRAIN_SEED
        return tuple(Prompt(scene.caption, scene) for scene in sample_prompts(count, seed, held_out))
    if count > len(PLAIN):
        raise InputError(
            f"--prompts {count}: {len(PLAIN)} captions come with the program; give a file of captions"
        )
    return tuple(Prompt(text) for text in PLAIN[:count])


def _from_file(path: Path) -> tuple[Prompt, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(
            f"--prompts {path} cannot be read as a text file: {reason}; give a file of captions, one a line, "
            "or how many"
        ) from error
    prompts = tuple(Prompt(line.strip()) for line in lines if line.strip())
    if not prompts:
        raise InputError(f"--prompts {path} holds no caption; write one a line")
    return prompts
