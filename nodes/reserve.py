"""What the host is told of a run where it asks how much memory a model needs, while a block lasts."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .demand import BlockMemory

_bytes: ContextVar[int] = ContextVar("sixbit_reserved", default=0)
_blocks: ContextVar[BlockMemory | None] = ContextVar("sixbit_blocks", default=None)


@contextmanager
def reserved(count: int) -> Iterator[None]:
    """Inside, `reserved_bytes` is `count`."""
    token = _bytes.set(count)
    try:
        yield
    finally:
        _bytes.reset(token)


def reserved_bytes() -> int:
    """What is to be left free beside the weights; 0 outside a block."""
    return _bytes.get()


@contextmanager
def running(blocks: BlockMemory | None) -> Iterator[None]:
    """Inside, `running_blocks` is `blocks`."""
    token = _blocks.set(blocks)
    try:
        yield
    finally:
        _blocks.reset(token)


def running_blocks() -> BlockMemory | None:
    """What is known of the memory of the run under way; None where its model runs as it is."""
    return _blocks.get()
