"""JSON results, and places for results that are seen to be writable before any long work."""

import json
import tempfile
from pathlib import Path
from typing import Any

from ..sixbit_core.replacing import beside, replacing
from .errors import InputError


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinities are refused (ValueError)."""
    text = json.dumps(value, indent=1, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8", newline="\n")


def check_target(path: Path, flag: str) -> None:
    """See, before any long work, that `path` can be written as a file. Raises InputError."""
    make_folder(path.parent)
    try:
        beside(path).lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a name too long
        raise InputError(f"{flag} {path} cannot be written: {error.strerror}") from error
    if path.is_dir():
        raise InputError(f"{flag} {path} is a folder; give a file name")


def make_folder(path: Path) -> Path:
    """Create `path` as a folder and see that files can be made in it, before any long work.

    Raises:
        InputError: when either cannot be.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{path} cannot be made a folder: {error.strerror}; choose another --out") from error
    try:
        with tempfile.NamedTemporaryFile(dir=path, prefix=".sixbit-"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written to: {error.strerror}; choose another --out") from error
    return path
