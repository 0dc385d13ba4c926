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
    make_folder(path.parent, flag)
    try:
        beside(path).lstat()
    except FileNotFoundError:
        pass
    except OSError as error:  # a name too long
        raise InputError(f"{flag} {path} cannot be written: {error.strerror}") from error
    if path.is_dir():
        raise InputError(f"{flag} {path} is a folder; give a file name")


def make_folder(path: Path, flag: str = "--out") -> Path:
    """Create `path` as a folder and see that files can be made in it, before any long work.

    Raises:
        InputError: when either cannot be.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be made a folder: {error.strerror}; choose another {flag}"
        ) from error
    check_folder(path, flag)
    return path


def check_folder(path: Path, flag: str) -> None:
    """See that files can be made in the folder `path`, or in the one that it would be made in; makes nothing.

    Raises:
        InputError: when they cannot.
    """
    try:
        there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not there.is_dir():
            raise InputError(f"{path} cannot be made a folder: {there} is a file; choose another {flag}")
        with tempfile.NamedTemporaryFile(dir=there, prefix=".sixbit-"):
            pass
    except OSError as error:
        raise InputError(f"{path} cannot be written to: {error.strerror}; choose another {flag}") from error
