"""Triton is tried in a process that may die of it, and the verdict is kept."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from sixbit_diffusion.kernels import disk_cache, probe

pytest.importorskip("triton", reason="Triton is not installed")

DYING = Path(__file__).resolve().parent / "dying"


@pytest.fixture
def fate(monkeypatch):
    """`fate(word)`: how the first kernel of the next process ends."""
    monkeypatch.setenv("PYTHONPATH", str(DYING))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return lambda word: monkeypatch.setenv("FATE", word)


@pytest.mark.parametrize(
    "word, parts",
    [
        ("abort", ["a first kernel ended its process, exit code"]),
        ("headers", ["exit status 1", "fatal error: Python.h", "headers are missing: install them"]),
    ],
)
def test_a_process_of_its_own_tells(fate, word, parts, monkeypatch, tmp_path):
    fate(word)
    monkeypatch.chdir(tmp_path)
    found = probe.ask([sys.executable, "-c", probe.CHILD, "0"])
    assert "\n" not in found and all(part in found for part in parts)


@pytest.mark.parametrize(
    "code, found",
    [
        ("print('a library talks'); print('verdict:')", ""),
        ("raise MemoryError", None),  # of the moment
        ("print('verdict:no C compiler')", "no C compiler; install a C compiler"),
    ],
)
def test_what_it_says_is_read(code, found):
    assert probe.ask([sys.executable, "-c", code]) == found


@pytest.fixture
def grandchild():
    """Code that starts a process, which inherits its output, dials a listener and stays; and the listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(30)
        inner = f"import socket; socket.create_connection({listener.getsockname()}).recv(1)"
        yield f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}])", listener


def test_a_compiler_that_stays_does_not_keep_the_verdict(grandchild):
    code, listener = grandchild
    assert probe.ask([sys.executable, "-c", f"{code}; print('verdict:')"], seconds=20) == ""
    listener.accept()[0].close()


def test_one_that_hangs_is_ended_with_what_it_started(grandchild):
    code, listener = grandchild
    with pytest.raises(subprocess.TimeoutExpired):
        probe.ask([sys.executable, "-c", f"{code}; import time; time.sleep(60)"], seconds=4)
    line, _ = listener.accept()
    line.settimeout(30)
    with suppress(ConnectionResetError), line:
        assert line.recv(1) == b""  # nobody holds its other end


def test_a_python_that_does_not_start_tells_nothing(tmp_path):
    assert probe.ask([str(tmp_path / "no python")]) is None


@pytest.fixture
def asked(monkeypatch):
    """What `ask` is to say, and how often it was asked."""

    class Asked:
        says: str | None = ""
        times, late = 0, False

    def ask(command: list[str], seconds: float = 7) -> str | None:
        Asked.times += 1
        if Asked.late:
            raise subprocess.TimeoutExpired(command, seconds)
        return Asked.says

    monkeypatch.setattr(probe, "ask", ask)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    return Asked


@pytest.mark.parametrize("says", ["", "a first kernel ended its process"])
def test_a_verdict_is_kept_until_something_changes(asked, tmp_path, monkeypatch, says):
    file = tmp_path / "deep" / "probe.json"
    asked.says = says
    first, again = (probe.verdict(0, "3.9.0", file) for _ in range(2))
    assert asked.times == 1 and first == again == (f"{says} (to ask again, delete {file})" if says else "")
    (key,) = json.loads(file.read_text())
    assert "triton 3.9.0" in key and torch.__version__ in key and "capability 8.9" in key
    probe.verdict(0, "3.9.1", file)
    monkeypatch.setattr(probe.shutil, "which", lambda name: None)  # a compiler that is gone
    probe.verdict(0, "3.9.1", file)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: 13000, raising=False)
    probe.verdict(0, "3.9.1", file)
    assert asked.times == 4 and len(json.loads(file.read_text())) == 4


def test_no_verdict_is_not_kept(asked, tmp_path):
    asked.says = None
    assert [probe.verdict(0, "3.9.0", tmp_path / "probe.json") for _ in range(2)] == [None, None]
    assert asked.times == 2 and not (tmp_path / "probe.json").exists()


def test_slowness_is_told_and_not_kept(asked, tmp_path):
    asked.late, file = True, tmp_path / "probe.json"
    late = "a first kernel did not finish in 7 s (the next start tries again)"
    assert [probe.verdict(0, "3.9.0", file) for _ in range(2)] == [late] * 2
    assert asked.times == 2 and not file.exists()


def test_a_line_is_said_before_it_is_asked(asked, tmp_path, caplog, monkeypatch):
    said = []
    monkeypatch.setattr(probe, "ask", lambda command: said.extend(caplog.messages) or "")
    for _ in range(2):
        probe.verdict(0, "3.9.0", tmp_path / "probe.json")
    assert said == caplog.messages and len(said) == 1 and "up to 120 s" in said[0]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_verdict_turns_triton_off(monkeypatch):
    from sixbit_diffusion.kernels import support_triton

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(support_triton, "_probe", lambda device: pytest.fail("launched in this process"))
    monkeypatch.setattr(support_triton.probe, "verdict", lambda *_: "it died")
    reason = support_triton.reason_against.__wrapped__(0)  # past the cache
    assert reason.startswith("Triton ") and reason.endswith(" does not run here: it died")


def test_a_place_that_cannot_be_written_or_read_keeps_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "kept.json"
    disk_cache.keep(below, "key", 1)
    assert disk_cache.recall(below, "key") is None
    damaged = tmp_path / "damaged.json"
    for text in ("{", "[]", ""):
        damaged.write_text(text)
        assert disk_cache.recall(damaged, "key") is None
    disk_cache.keep(damaged, "key", {"a": 1})
    disk_cache.keep(damaged, "other", 2)
    assert disk_cache.recall(damaged, "key") == {"a": 1} and disk_cache.recall(damaged, "other") == 2
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []
