"""What this machine was found to do, kept between processes: JSON files of key -> value.

A folder that cannot be read or written, or a damaged file, means that nothing is kept, and nothing else: the
next process finds it out again.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def entries(file: Path) -> dict[str, Any]:
    """All that was kept."""
    try:
        kept = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def recall(file: Path, key: str) -> Any:
    """What was kept under `key`; None where there is nothing."""
    return entries(file).get(key)


def keep(file: Path, key: str, value: Any) -> None:
    """Keep a value that JSON can hold. The file is written beside its place and renamed.

    Of two processes that write at the same moment the later one wins; the other's key is lost, not torn.
    """
    kept = {**entries(file), key: value}
    written = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, written = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".part")
        with os.fdopen(handle, "w", encoding="utf-8") as target:
            json.dump(kept, target, indent=1, sort_keys=True)
        os.replace(written, file)
    except OSError:
        if written is not None:
            Path(written).unlink(missing_ok=True)
