"""Results appear whole or not at all: written beside their target, then renamed."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it takes `path`'s place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinities are refused (ValueError)."""
    text = json.dumps(value, indent=1, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def check_target(path: Path, flag: str) -> None:
    """See, before any long work, that `path` can be written as a file. Raises InputError."""
    make_folder(path.parent)
    if path.is_dir():
        raise InputError(f"{flag} {path} is a folder; give a file name")


def make_folder(path: Path) -> Path:
    """Create `path` as a folder, before any long work. Raises InputError when that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be made a folder: {error.strerror}; choose another --out") from error
    return path
