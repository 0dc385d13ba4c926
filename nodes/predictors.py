"""Predictor files: the bundled one, and those that calibration saved."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..sixbit_core.predictor import Predictor, load_predictor
from .files import file_name, reference_folder

BUNDLED = "bundled"


def list_predictors(folder: Path) -> list[str]:
    """The bundled one first, then the saved ones by name."""
    return [BUNDLED, *sorted(path.name for path in folder.glob("[!.]*.json"))]


def find_predictor(name: str, folder: Path, fingerprint: str) -> Predictor | None:
    """The predictor of a name, for a model; None where the pack bundles none for it.

    Raises:
        ValueError: a saved one that is gone, damaged, or of another model.
    """
    if name != BUNDLED:
        return load_predictor(folder / file_name(name, ".json"), fingerprint)
    path = reference_folder().parent / "predictor.json"
    found = load_predictor(path) if path.is_file() else None
    return found if found is not None and found.fingerprint == fingerprint else None


def mismatch(
    predictor: Predictor,
    steps: int,
    latent_shape: Sequence[int],
    cfg: float | None = None,
    scheduler: str | None = None,
) -> str | None:
    """What of a run is not as it was when the predictor was made, in one line; None where all is.

    Args:
        steps: of the run.
        latent_shape: (B, C, frames, height, width).
        cfg: None where the guider has none.
        scheduler: sampler and schedule in the file's words; None where they are not known.
    """
    frames, height, width = latent_shape[2:]
    how = predictor.calibration
    found = {"steps": steps, "scheduler": scheduler, "cfg": cfg}
    found |= {"size": [8 * height, 8 * width], "frames": 4 * frames - 3}
    known = {name: how.get(name) for name in found}
    if known["frames"] == found["frames"] - 4:  # the frame that 1.5 samples in front of a clip
        known["frames"] = found["frames"]
    other = [name for name in found if None not in (found[name], known[name]) and found[name] != known[name]]
    if not other:
        return None
    spelled = [", ".join(_spelled(name, values[name]) for name in other) for values in (known, found)]
    return (
        f"the predictor was calibrated at {spelled[0]}, this run has {spelled[1]}: the bits may come out "
        "otherwise than asked for"
    )


def _spelled(name: str, value: Any) -> str:
    if name == "size":
        return f"{value[0]}x{value[1]}"
    return {"scheduler": f"{value}", "cfg": f"CFG {value}"}.get(name, f"{value} {name}")
