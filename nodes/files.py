"""What the model list shows, and where an entry lies. Paths are given in; this knows no host."""

from collections.abc import Sequence
from pathlib import Path

REFERENCE = "bundled reference"
_INDEX = ".safetensors.index.json"
_QUANTIZED_MARK = "-6bit"


def reference_folder() -> Path:
    """Where the bundled reference pipeline lies."""
    return Path(__file__).resolve().parents[1] / "reference" / "pipeline"


def list_models(roots: Sequence[Path]) -> list[str]:
    """Single safetensors files, sharded folders as one entry each, the bundled reference."""
    found: set[str] = set()
    for root in roots:
        indexes = [path for path in root.rglob(f"*{_INDEX}") if path.parent != root]
        sharded = {path.parent for path in indexes}
        found |= {f"{folder.relative_to(root).as_posix()}/" for folder in sharded}
        for path in root.rglob("*.safetensors"):
            if path.parent not in sharded:
                found.add(path.relative_to(root).as_posix())
    names = sorted(found)
    if (reference_folder() / "model_index.json").is_file():
        names.append(REFERENCE)
    return names


def find_model(name: str, roots: Sequence[Path]) -> Path:
    """Where an entry of the list lies. Raises ValueError if nowhere."""
    if name == REFERENCE:
        return reference_folder()
    for root in roots:
        path = (root / name.rstrip("/")).resolve()
        if path.exists():
            return path
    raise ValueError(f"there is no model {name} in the diffusion_models folders; choose one of the list")


def quantized_copy(source: Path) -> Path:
    """Where the 6-bit copy of a file or folder goes: beside it, under a name that says so."""
    stem = source.name if source.is_dir() else source.stem
    return source.with_name(f"{stem}{_QUANTIZED_MARK}.safetensors")
