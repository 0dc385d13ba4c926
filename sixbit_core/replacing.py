"""Files appear whole or not at all: written beside their target, then renamed."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def remove_leftovers(target: Path, before: str, after: str = "") -> None:
    """Remove `before`PID`after` beside `target` where no such process lives, as after a power cut."""
    for path in target.parent.iterdir():
        found = re.fullmatch(f"{re.escape(before)}([0-9]+){re.escape(after)}", path.name)
        if found and not _alive(int(found[1])):
            path.unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    if os.name == "nt":  # where signal 0 is Ctrl-C: what cannot be asked is taken to live
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def beside(path: Path) -> Path:
    """The hidden path beside `path`, of its suffix, that `replacing` writes first."""
    return path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield `beside(path)`, which takes `path`'s place when the block ends well.

    On any error what was written is removed, and `path` stays what it was. The folder must exist.

    Raises:
        RuntimeError: the disk is full, the folder read-only, or the name too long.
    """
    temporary = beside(path)
    try:
        remove_leftovers(path, f".{path.stem}.tmp-", path.suffix)
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise RuntimeError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
