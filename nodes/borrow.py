"""Attributes of a host's modules, set for one call of its model and put back after.

The host may call clones of one model from several threads, and they share their modules: one lock, for
everything of this pack that is set on them.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

_lock = threading.RLock()


@contextmanager
def borrowed(changes: Iterable[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Set (module, attribute, value) in the module's own `__dict__` inside the block.

    Args:
        changes: taken one by one, so that each may build on what stands there after those before it. What
            stood there before comes back in the opposite order, also where the block or a change raises.
    """
    before: list[tuple[dict[str, Any], str, Any]] = []
    with _lock:
        try:
            for module, name, value in changes:
                own = module.__dict__
                before.append((own, name, own.get(name)))
                own[name] = value
            yield
        finally:
            for own, name, value in reversed(before):
                if value is None:
                    own.pop(name, None)
                else:
                    own[name] = value
