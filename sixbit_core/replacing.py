"""Files appear whole or not at all: written beside their target, then renamed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a hidden path beside `path`, of its suffix, that takes `path`'s place when the block ends well.

    On any error what was written is removed, and `path` stays what it was. The folder must exist.
    """
    beside = path.with_name(f".{path.stem}.tmp-{os.getpid()}{path.suffix}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
