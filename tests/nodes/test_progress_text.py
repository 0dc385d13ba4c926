"""The line under a sampling node, by a clock of the test's own; no host needed."""

from types import SimpleNamespace

import pytest
from sixbit_diffusion.nodes.progress_text import StepText, clock_time


def lines_of(step_seconds: float, steps: int = 20) -> list[tuple[float, str]]:
    """(second, line) of a run in which the last half of the blocks is skipped in the second half."""
    now, sent = [100.0], []
    state = SimpleNamespace(skipped_fraction=0.0, average_bits=6.25)
    text = StepText(state, lambda line: sent.append((now[0] - 100, line)), lambda: now[0])
    stepped = text.after(None)
    for step in range(steps):
        now[0] += step_seconds
        state.skipped_fraction = 0.25 * (step >= steps // 2)
        stepped(step, None, None, steps)
    text.end()
    return sent


def test_a_line_says_step_share_bits_and_what_is_left() -> None:
    sent = lines_of(2.0)
    assert sent[0] == (2, "step 1 of 20 | 0 % of blocks skipped | 6.2 bits | 0:38 left")
    assert sent[14][1] == "step 15 of 20 | 25 % of blocks skipped | 6.2 bits | 0:10 left"
    assert sent[-1] == (40, "40.0 s | 25 % of blocks skipped | 6.2 bits") and len(sent) == 21


@pytest.mark.parametrize("step_seconds", [0.001, 0.01, 0.07, 0.19, 0.2, 0.24])
def test_no_second_sees_more_than_five(step_seconds: float) -> None:
    times = [second for second, _ in lines_of(step_seconds, steps=300)]
    assert len(times) >= 2
    assert max(sum(start <= other < start + 1 for other in times) for start in times) <= 5


def test_what_is_left_follows_the_pace_of_late() -> None:
    now, sent = [0.0], []
    text = StepText(SimpleNamespace(skipped_fraction=None, average_bits=None), sent.append, lambda: now[0])
    for step, seconds in enumerate([60.0] + [1.0] * 30):
        now[0] += seconds
        text.step(step + 1, 41)
    assert sent[-1] == "step 31 of 41 | 0:10 left"


def test_the_hosts_callback_is_called_and_answered() -> None:
    calls = []
    callback = lambda *given: calls.append(given) or "answer"  # noqa: E731
    assert StepText(None, None).after(callback) is callback and StepText(None, None).after(None) is None
    state = SimpleNamespace(skipped_fraction=None, average_bits=None)
    assert StepText(state, lambda _: None).after(callback)(0, 1, 2, 3) == "answer" and calls == [(0, 1, 2, 3)]


def test_long_times_have_hours() -> None:
    assert [clock_time(s) for s in (0.4, 59.6, 3599, 3661)] == ["0:00", "1:00", "59:59", "1:01:01"]


def test_a_run_that_did_not_end_says_so_last() -> None:
    state, sent = SimpleNamespace(skipped_fraction=None, average_bits=None), []
    text = StepText(state, sent.append)
    text.step(1, 8)
    text.stop()
    assert sent[-1] == "stopped"
    ended = StepText(state, sent.append)
    ended.end()
    ended.stop()
    assert sent[-1] != "stopped"
