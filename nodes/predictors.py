"""Predictor files: the bundled one, and those that calibration saved."""

from pathlib import Path

from ..sixbit_core.predictor import Predictor, load_predictor
from .files import reference_folder

BUNDLED = "bundled"


def list_predictors(folder: Path) -> list[str]:
    """The bundled one first, then the saved ones by name."""
    return [BUNDLED, *sorted(path.name for path in folder.glob("*.json"))]


def find_predictor(name: str, folder: Path, fingerprint: str) -> Predictor | None:
    """The predictor of a name, for a model; None where the pack bundles none for it.

    Raises:
        ValueError: a saved one that is gone, damaged, or of another model.
    """
    if name != BUNDLED:
        return load_predictor(folder / name, fingerprint)
    path = reference_folder().parent / "predictor.json"
    found = load_predictor(path) if path.is_file() else None
    return found if found is not None and found.fingerprint == fingerprint else None
