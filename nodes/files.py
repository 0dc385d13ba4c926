"""What the model list shows, and where an entry lies. Paths are given in; this knows no host."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..sixbit_core.errors import one_line

REFERENCE = "bundled reference"
_INDEX = ".safetensors.index.json"
_WEIGHTS = (".safetensors", ".sft")
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
_QUANTIZED_MARK = "-6bit"
_UNFIT = re.compile(r'[/\\:*?"<>|]|^(con|prn|aux|nul|com\d|lpt\d)(\.|$)', re.IGNORECASE)  # Windows' own
_LONGEST = 200  # bytes of a name; systems take 255, and what is written first has a longer one


def reference_folder() -> Path:
    """Where the bundled reference pipeline lies."""
    return Path(__file__).resolve().parents[1] / "reference" / "pipeline"


def find_reference() -> Path:
    """The bundled reference pipeline. Raises ValueError where this copy of the pack has none."""
    folder = reference_folder()
    if not (folder / "model_index.json").is_file():
        raise ValueError(
            "this copy of the pack is without the bundled reference; copy the folder reference/pipeline of "
            f"the pack's repository to {folder}"
        )
    return folder


def list_models(roots: Sequence[Path]) -> list[str]:
    """Single files, sharded folders and pipelines as one entry each (ending in /), the bundled reference."""
    names = sorted({name for root in roots for name in _entries(root)})
    if (reference_folder() / "model_index.json").is_file():
        names.append(REFERENCE)
    return names


def _entries(root: Path) -> Iterator[str]:
    seen: set[str] = set()
    for place, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(place)
        folder = Path(place).relative_to(root)
        if real in seen:  # a link back up
            folders.clear()
            continue
        seen.add(real)
        indexes = [name for name in files if name.endswith(_INDEX)]
        if folder != Path():
            pipeline = "model_index.json" in files and "transformer" in folders
            if pipeline:
                folders.clear()
            if pipeline or indexes:
                yield f"{folder.as_posix()}/"
        else:
            yield from indexes
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            shard = indexes and _SHARD.search(name)
            if name.endswith(_WEIGHTS) and not name.startswith(".") and not shard:
                yield (folder / name).as_posix()


def find_model(name: str, roots: Sequence[Path]) -> Path:
    """Where an entry of the list lies. Raises ValueError if nowhere."""
    if name == REFERENCE:
        return find_reference()
    for root in roots:
        path = Path(os.path.normpath(root / name))
        if path.is_relative_to(os.path.normpath(root)) and os.path.exists(path):  # False for what is no name
            return path
    raise ValueError(
        one_line(f"there is no model {name} in the diffusion_models folders; choose one of the list")
    )


def entry_of(path: Path, roots: Sequence[Path]) -> str:
    """Name in the list of a file under one of the folders."""
    root = next(root for root in roots if path.is_relative_to(root))
    return path.relative_to(root).as_posix()


def quantized_copy(source: Path) -> Path:
    """Where the 6-bit copy of a file or folder goes: beside it, under a name that says so."""
    if source.name.endswith(_INDEX):
        stem = source.name.removesuffix(_INDEX)
    else:
        stem = source.name if source.is_dir() else source.stem
    return source.with_name(f"{stem}{_QUANTIZED_MARK}.safetensors")


def file_name(name: str, suffix: str) -> str:
    """The name of a file that someone typed, with its suffix. Raises ValueError if it names no plain file."""
    bare = name.strip().removesuffix(suffix)
    long = len(bare.encode("utf-8", "replace")) > _LONGEST
    if not bare or not bare.isprintable() or bare.startswith(".") or long or _UNFIT.search(bare):
        raise ValueError(
            one_line(f"name must be that of a file, without a folder, got {name!r}; take letters and digits")
        )
    return bare + suffix
