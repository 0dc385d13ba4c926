"""Bytes that the host is to leave free beside the weights it loads, for the duration of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_bytes: ContextVar[int] = ContextVar("sixbit_reserved", default=0)


@contextmanager
def reserved(count: int) -> Iterator[None]:
    """Inside, `reserved_bytes` is `count`."""
    token = _bytes.set(count)
    try:
        yield
    finally:
        _bytes.reset(token)


def reserved_bytes() -> int:
    """What is reserved now; 0 outside a block."""
    return _bytes.get()
