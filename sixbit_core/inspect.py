"""Say what a checkpoint file or folder holds, for people and for programs. Reads headers only."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch

from .checkpoint import Checkpoint, open_checkpoint
from .provenance import source_licence, source_name
from .quantized import COMPANIONS, ROTATED_FORMAT

_BF16_BYTES = 2


def inspect_checkpoint(path: str | Path) -> dict[str, object]:
    """What is in a checkpoint.

    Returns:
        file, family, label, blocks, tensors, parameters, quantized,
        formats {name: {layers, tensors, bytes}}: layers are quantized Linears, the rest is counted by type,
        bytes, bf16_bytes (the same model in bf16), ratio (bf16_bytes / bytes),
        rotation {rotated, plain, blocks: {block size: layers}},
        source, licence, method, version (None where not quantized by this pack), fingerprint.

    Raises:
        CheckpointError: see `open_checkpoint`.
    """
    checkpoint = open_checkpoint(path)
    parameters = sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    marks = {**checkpoint.coded, **checkpoint.formats}
    rotated = Counter(
        int(mark["hadamard"]) for mark in checkpoint.formats.values() if mark.get("format") == ROTATED_FORMAT
    )
    return {
        "file": checkpoint.path.name,
        "family": checkpoint.family.name,
        "label": checkpoint.family.label,
        "blocks": checkpoint.family.layers,
        "tensors": len(checkpoint.keys()),
        "parameters": parameters,
        "quantized": bool(marks),
        "formats": _formats(checkpoint, marks),
        "bytes": checkpoint.nbytes,
        "bf16_bytes": parameters * _BF16_BYTES,
        "ratio": round(parameters * _BF16_BYTES / checkpoint.nbytes, 3),
        "rotation": {
            "rotated": rotated.total(),
            "plain": len(marks) - rotated.total(),
            "blocks": {str(size): count for size, count in sorted(rotated.items())},
        },
        "source": source_name(checkpoint),
        "licence": source_licence(checkpoint),
        "method": checkpoint.metadata.get("sixbit_method"),
        "version": checkpoint.metadata.get("sixbit_version"),
        "fingerprint": checkpoint.fingerprint,
    }


def _formats(checkpoint: Checkpoint, marks: Mapping[str, Mapping]) -> dict[str, dict[str, int]]:
    owner = {f"{layer}.{part}": layer for layer in marks for part in ("weight", *COMPANIONS)}
    formats: dict[str, dict[str, int]] = {}
    for name in checkpoint.infos:
        layer = owner.get(name)
        kind = str(marks[layer].get("format")) if layer else str(checkpoint.dtype(name))
        row = formats.setdefault(kind.removeprefix("torch."), {"layers": 0, "tensors": 0, "bytes": 0})
        row["layers"] += layer is not None and name.endswith(".weight")
        row["tensors"] += 1
        row["bytes"] += checkpoint.infos[name].nbytes
    return formats


def format_inspection(found: dict[str, object]) -> str:
    """A few aligned lines for people, from the dict of `inspect_checkpoint`."""
    rotation = found["rotation"]
    rows = [
        ("model", f"{found['label']} ({found['family']}), {found['blocks']} blocks"),
        ("parameters", f"{found['parameters'] / 1e6:,.1f} million in {found['tensors']} tensors"),
    ]
    for kind, row in found["formats"].items():
        what = f"{row['layers']} layers" if row["layers"] else f"{row['tensors']} tensors"
        rows.append((kind, f"{what}, {_size(row['bytes'])}"))
    rows.append(
        ("size", f"{_size(found['bytes'])}; in bf16 {_size(found['bf16_bytes'])}: {found['ratio']:.2f}x")
    )
    if found["quantized"]:
        rows.append(("rotation", f"{rotation['rotated']} layers rotated, {rotation['plain']} not"))
    for key in ("method", "source", "licence", "fingerprint"):
        if found[key]:
            rows.append((key, str(found[key])))
    rows = [(_printable(key), _printable(text)) for key, text in rows]
    width = max(len(key) for key, _ in rows)
    return "\n".join([_printable(str(found["file"])), *(f"  {key:<{width}}  {text}" for key, text in rows)])


def _printable(text: str) -> str:
    """Control characters escaped: a file's own words must not steer the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
