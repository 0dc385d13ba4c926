"""Choose, per call, the fastest implementation of an op that can take the arguments.

An `Op` is a float32 reference in plain PyTorch, which is the contract, and any number of twins of the
same signature. Nothing falls back silently: a twin says beforehand, in `when`, what it can take, and a
twin that raises is a bug that is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any

REFERENCE = "reference"

_forced: list[str] = []


class Op:
    """A reference function and its faster twins, which share its signature.

    A call runs the first twin, in order of registration, whose `when(*args)` is true, else the
    reference. Inside `use_backend(name)` it runs that backend whatever `when` says.
    """

    def __init__(self, reference: Callable[..., Any]) -> None:
        self.implementations: dict[str, tuple[Callable[..., Any], Callable[..., bool]]] = {
            REFERENCE: (reference, lambda *args, **kwargs: True)
        }
        update_wrapper(self, reference)

    def register(self, backend: str, when: Callable[..., bool]) -> Callable[[Callable], Callable]:
        """Decorator: attach a twin for `backend`, used where `when(*args)` holds."""

        def attach(twin: Callable) -> Callable:
            self.implementations[backend] = (twin, when)
            return twin

        return attach

    def select(self, *args: Any, **kwargs: Any) -> str:
        """Name of the backend that would run this call.

        Raises:
            ValueError: if `use_backend` names a backend that this op does not have.
        """
        if _forced:
            if _forced[-1] not in self.implementations:
                known = ", ".join(self.implementations)
                raise ValueError(f"{self.__name__} has no backend {_forced[-1]!r}; it has {known}")
            return _forced[-1]
        twins = [name for name in self.implementations if name != REFERENCE]
        return next((name for name in twins if self.implementations[name][1](*args, **kwargs)), REFERENCE)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        implementation, _ = self.implementations[self.select(*args, **kwargs)]
        return implementation(*args, **kwargs)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run every op inside the block on one named backend (tests, benchmarks)."""
    _forced.append(name)
    try:
        yield
    finally:
        _forced.pop()
