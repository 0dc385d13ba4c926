"""Signals that end a command: an exception where work is to be cleaned up, the end at once before that."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

BY_SIGNAL = 128  # and the signal's number is the exit code of what a signal ended
ENDING = ("SIGTERM", "SIGHUP")  # those that the system knows end a run as Ctrl-C does

Handler = Callable[[int, FrameType | None], None]


class Stopped(KeyboardInterrupt):
    """A signal asked the program to end; cleaning up goes on as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stopped_line(number: int) -> str:
    """What a run that signal `number` ended says."""
    return "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"


@contextmanager
def stoppable(came: list[int]) -> Iterator[None]:
    """Signals that would end the program at once raise: Ctrl-C KeyboardInterrupt, the others `Stopped`.

    Those that are ignored, or that the caller has a handler for, stay so.

    Args:
        came: gets the number of every signal that came, since a library may take the exception for an error
            of its own and raise another.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt

    def stop(number: int, frame: FrameType | None) -> None:
        for other in _numbers():  # a closing terminal sends more than one: cleaning up is not to be cut short
            if signal.getsignal(other) is stop:
                signal.signal(other, signal.SIG_IGN)
        came.append(number)
        raise Stopped(number)

    handlers: dict[int, Handler] = {}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        handlers[signal.SIGINT] = interrupt
    handlers |= {number: stop for number in _numbers() if signal.getsignal(number) == signal.SIG_DFL}
    with _handled(handlers):
        yield


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Signals end the program at once, with its line and code, while libraries are imported.

    Nothing is open yet that would have to be cleaned up, and an exception in the midst of an import is
    swallowed by some libraries, taken for a broken installation by others, and aborts in C++ code. Signals
    that are ignored stay so.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # past the buffers of sys.stderr, which may be in use just now
            os.write(sys.__stderr__.fileno(), f"sixbit: {stopped_line(number)}\n".encode())
        os._exit(BY_SIGNAL + number)

    numbers = [number for number in (signal.SIGINT, *_numbers()) if callable(signal.getsignal(number))]
    with _handled(dict.fromkeys(numbers, leave)):
        yield


def _numbers() -> list[int]:
    return [getattr(signal, name) for name in ENDING if hasattr(signal, name)]


@contextmanager
def _handled(handlers: dict[int, Handler]) -> Iterator[None]:
    """Handlers of signals, and afterwards those that were there before."""
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield
        return
    before = {number: signal.getsignal(number) for number in handlers}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
