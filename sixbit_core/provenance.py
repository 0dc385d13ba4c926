"""Where a checkpoint comes from: the name and licence that travel with a quantized copy."""

import re
from pathlib import Path

from .checkpoint import Checkpoint

_LICENCE_KEYS = ("sixbit_licence", "license", "licence", "modelspec.license")


def source_name(checkpoint: Checkpoint) -> str:
    """Name of the file or folder, never a path; a repository's name for a hub's download folder."""
    if stored := checkpoint.metadata.get("sixbit_source"):
        return stored
    path = checkpoint.path.resolve()
    if path.is_file() and path.name.endswith(".index.json"):
        path = path.parent
    if path.name == "transformer":
        path = path.parent
    if path.parent.name == "snapshots":  # <cache>/models--OWNER--NAME/snapshots/<hash>
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return path.name


def source_licence(checkpoint: Checkpoint) -> str:
    """Licence of the weights: from the file's metadata, else the model card beside them, else by family."""
    for key in _LICENCE_KEYS:
        if found := checkpoint.metadata.get(key, "").strip():
            return found
    path = checkpoint.path.resolve()
    if path.is_dir() or path.name.endswith(".index.json"):
        folder = path if path.is_dir() else path.parent
        folders = [folder, folder.parent] if folder.name == "transformer" else [folder]
        for card in (f / "README.md" for f in folders):
            if found := _card_licence(card):
                return found
    return checkpoint.family.licence


def _card_licence(card: Path) -> str | None:
    """`license_name`, else `license`, of a model card's front matter."""
    if not card.is_file():
        return None
    try:
        text = card.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    if not front:
        return None
    fields = dict(re.findall(r"^(license(?:_name)?):[ \t]*[\"']?([^\"'\n]+?)[\"']?[ \t]*$", front[1], re.M))
    return fields.get("license_name") or fields.get("license")
