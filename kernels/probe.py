"""Whether Triton can compile and launch on a GPU, tried first in a process of its own.

Triton may import and then take the process with it at its first kernel, or never come back from its compiler
(on Windows, where Python's headers or a compiler are missing or do not fit). So a process that may die is
asked, once per versions, driver, GPU, Python and compiler, and its verdict is kept on disk. That it took too
long is no verdict to keep: a virus scanner or a slow disk may have been why.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import torch

from .disk_cache import keep, recall

SECONDS = 120  # a first import of torch and Triton and one tiny kernel, on a slow disk
END_SECONDS = 5  # for a process to be gone once it is killed
HERE = Path(__file__).resolve().parent
VERDICT = "verdict:"  # before what the process says, since libraries may print too
# This package by its place: the Python of ComfyUI for Windows imports from its own folders alone.
CHILD = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("kernels", {str(HERE / "__init__.py")!r})
sys.modules["kernels"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["kernels"])
from kernels.support_triton import failure
print({VERDICT!r} + failure(int(sys.argv[1])), flush=True)
"""
# Windows: no window of its own, and no Ctrl-C of ours.
FLAGS = getattr(subprocess, "CREATE_NO_WINDOW", 0) | getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
UNCAUGHT = 1  # exit code of a Python error, which says nothing lasting: memory or disk failed, or a bug
# Part of an error -> what helps.
CURES = (
    ("Python.h", "Python's headers are missing: install them (on Windows the folders include and libs)"),
    ("compiler", "install a C compiler"),
)

_log = logging.getLogger(__name__)


def verdict(device: int, triton: str, file: Path) -> str | None:
    """Why Triton is not to be used on this CUDA device, "" if it is fine, None if the process could not tell.

    Args:
        triton: its version.
        file: where verdicts are kept.
    """
    key = _key(device, triton)
    found = recall(file, key)
    if not isinstance(found, str):
        # As a warning, since a program that set no logging up shows nothing less.
        _log.warning(f"6Bit: trying Triton in a process of its own; this may take up to {SECONDS} s")
        try:
            found = ask([sys.executable, "-c", CHILD, str(device)])
        except subprocess.TimeoutExpired as late:
            return f"a first kernel did not finish in {late.timeout:g} s (the next start tries again)"
        if found is not None:
            keep(file, key, found)
    return f"{found} (to ask again, delete {file})" if found else found


def ask(command: list[str], seconds: float = SECONDS) -> str | None:
    """Run the process that tries a kernel: its verdict, as `verdict` without where it is kept.

    It writes into files: the end of a pipe comes only once every compiler that it started has ended, too.

    Raises:
        subprocess.TimeoutExpired: if it takes longer; it is ended, and what it started as well.
    """
    try:
        with TemporaryFile() as output, TemporaryFile() as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                start_new_session=True,
                creationflags=FLAGS,
            )
            try:
                code = process.wait(seconds)
            except BaseException:  # too late, or interrupted
                _end(process)
                raise
            stdout, stderr = (_text(file) for file in (output, errors))
    except OSError:
        return None
    said = [line[len(VERDICT) :] for line in stdout.splitlines() if line.startswith(VERDICT)]
    if said:
        return said[0] and _explained(said[0], stderr)
    if code == UNCAUGHT:
        return None
    return _explained(f"a first kernel ended its process, exit code {code}", stderr)


def _end(process: subprocess.Popen) -> None:
    """Kill a process and what it started, as far as the platform lets us; wait no longer than END_SECONDS."""
    with suppress(OSError, subprocess.TimeoutExpired):
        if os.name == "nt":
            tree = ["taskkill", "/T", "/F", "/PID", str(process.pid)]
            quiet = subprocess.DEVNULL
            subprocess.run(tree, stdout=quiet, stderr=quiet, timeout=END_SECONDS, creationflags=FLAGS)
        else:
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(OSError, subprocess.TimeoutExpired):
        process.kill()
        process.wait(END_SECONDS)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace")


def _explained(reason: str, stderr: str) -> str:
    """The reason, the first error that a compiler printed, and what helps, on one line."""
    lines = [line.strip() for line in stderr.splitlines() if "error" in line.lower()]
    words = [reason, *lines[:1]] if lines[:1] != [reason] else [reason]
    cure = next((cure for part, cure in CURES if part in f"{reason}\n{stderr}"), None)
    return "; ".join([*words, *([cure] if cure else [])])


def _key(device: int, triton: str) -> str:
    """Everything that the verdict rests on, as far as it can be read off."""
    major, minor = torch.cuda.get_device_capability(device)
    headers = (Path(sysconfig.get_path("include")) / "Python.h").exists()
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")  # the CUDA that it supports
    compilers = [name for name in ("cc", "gcc", "clang", "cl") if shutil.which(name)]
    return ", ".join(
        [
            f"triton {triton}",
            f"torch {torch.__version__}",
            f"driver {driver()}",
            f"python {platform.python_version()} {sys.executable}",
            f"compute capability {major}.{minor}",
            f"headers {'yes' if headers else 'no'}",
            f"compilers {' '.join(compilers) or 'none'}",
        ]
    )
