"""The line under a sampling node while it works: step, skipped share, bits, remaining time.

It goes through the host's own channel for such lines, to the node that executes. A step ends where the host
calls back for its preview; nothing waits for a GPU here. No more than one line in `SECONDS_BETWEEN` is sent,
so that with the one that ends the run no second sees more than five.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ..sixbit_core.run import RunState
from .host_contract import NODE_SEAMS, TEXT_SEAMS, mismatches

SECONDS_BETWEEN = 0.25
_RECENT = 12  # steps that the remaining time is judged by: skipping changes a run's pace as it goes
Send = Callable[[str], None]


def text_channel() -> Send | None:
    """Sends a line to the executing node. None where no server runs, no node executes, or the host has no
    such channel: text is an extra, and a host without it samples as ever."""
    if "server" not in sys.modules or mismatches(TEXT_SEAMS):
        return None
    from comfy_execution.utils import get_executing_context
    from server import PromptServer

    server, context = getattr(PromptServer, "instance", None), get_executing_context()
    client = getattr(server, "client_id", None)  # who queued it; without one the host would tell everybody
    if server is None or context is None or client is None:
        return None
    node = context.node_id
    return lambda text: server.send_progress_text(text, node, client)


def executing_node() -> str:
    """Id of the node that executes; "" where none does."""
    if mismatches(NODE_SEAMS):
        return ""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return "" if context is None else str(context.node_id)


class StepText:
    """Lines of one run.

    Args:
        state: of the run.
        send: from `text_channel`; None sends nothing.
        clock: seconds, as `time.perf_counter`.
    """

    def __init__(
        self, state: RunState, send: Send | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._state, self._send, self._clock = state, send, clock
        self._begin = clock()
        self._ends = deque([self._begin], maxlen=_RECENT + 1)
        self._sent = float("-inf")

    def after(self, callback: Callable | None) -> Callable | None:
        """The host's callback of a step, with the line after it; as it is where nothing is sent."""
        if self._send is None:
            return callback

        def stepped(step: int, denoised: Any, x: Any, total: int) -> Any:
            result = None if callback is None else callback(step, denoised, x, total)
            self.step(step + 1, total)
            return result

        return stepped

    def step(self, done: int, total: int) -> None:
        """A step has ended, the `done`-th of `total`."""
        now = self._clock()
        self._ends.append(now)
        if self._send is None or now - self._sent < SECONDS_BETWEEN:
            return
        pace = (now - self._ends[0]) / (len(self._ends) - 1)
        self._sent = now
        left = clock_time(pace * (total - done))
        self._send(" | ".join([f"step {done} of {total}", *self._shares(), f"{left} left"]))

    def end(self) -> None:
        """The run has ended: the line that stays."""
        self._last(" | ".join([f"{self._clock() - self._begin:.1f} s", *self._shares()]))

    def stop(self) -> None:
        """The run is over; one that has not ended was interrupted or failed, and its last line says so."""
        self._last("stopped")

    def _last(self, line: str) -> None:
        if self._send is not None:
            self._send(line)
            self._send = None

    def _shares(self) -> list[str]:
        skipped, bits = self._state.skipped_fraction, self._state.average_bits
        words = [] if skipped is None else [f"{100 * skipped:.0f} % of blocks skipped"]
        return words if bits is None else [*words, f"{bits:.1f} bits"]


def clock_time(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
