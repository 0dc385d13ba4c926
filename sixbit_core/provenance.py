"""Where a checkpoint comes from: the name and licence that travel with a quantized copy."""

import re
from pathlib import Path

from .checkpoint import Checkpoint

_LICENCE_KEYS = ("sixbit_licence", "license", "licence", "modelspec.license")


def source_name(checkpoint: Checkpoint) -> str:
    """A name, never a path: the hub's, else `model_name` of the model card, else that of file or folder."""
    if stored := checkpoint.metadata.get("sixbit_source"):
        return stored
    path = checkpoint.path.resolve()
    if path.is_file() and path.name.endswith(".index.json"):
        path = path.parent
    if path.name == "transformer":
        path = path.parent
    if path.parent.name == "snapshots":  # <cache>/models--OWNER--NAME/snapshots/<hash>
        return path.parents[1].name.removeprefix("models--").replace("--", "/")
    return _told_by_card(checkpoint, "model_name") or path.name


def source_licence(checkpoint: Checkpoint) -> str:
    """Licence of the weights: from the file's metadata, else the model card beside them, else by family."""
    for key in _LICENCE_KEYS:
        if found := checkpoint.metadata.get(key, "").strip():
            return found
    return _told_by_card(checkpoint, "license_name", "license") or checkpoint.family.licence


def _told_by_card(checkpoint: Checkpoint, *keys: str) -> str | None:
    """The first of `keys` that a model card beside the weights tells; a single file has no card."""
    path = checkpoint.path.resolve()
    if not (path.is_dir() or path.name.endswith(".index.json")):
        return None
    folder = path if path.is_dir() else path.parent
    folders = [folder, folder.parent] if folder.name == "transformer" else [folder]
    for card in (f / "README.md" for f in folders):
        fields = _front_matter(card)
        if found := next((fields[key] for key in keys if key in fields), None):
            return found
    return None


def _front_matter(card: Path) -> dict[str, str]:
    """The fields of one line in a model card's front matter; none where there is no card."""
    if not card.is_file():
        return {}
    try:
        text = card.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    if not front:
        return {}
    return dict(re.findall(r"^(\w+):[ \t]*[\"']?([^\"'\n]+?)[\"']?[ \t]*$", front[1], re.M))
