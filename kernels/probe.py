"""Whether Triton can compile and launch on a GPU, tried first in a process of its own.

Triton may import and then take the process with it at its first kernel, or never come back from its compiler
(on Windows, where Python's headers or a compiler are missing or do not fit). So a process that may die is
asked, once per versions, GPU, Python and compiler, and its verdict is kept on disk.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from .disk_cache import keep, recall

SECONDS = 120  # a first import of torch and Triton and one tiny kernel, on a slow disk
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
UNCAUGHT = 1  # exit code of a Python error, which says nothing lasting: memory or disk failed, or a bug
# Part of an error -> what helps.
CURES = (
    ("Python.h", "Python's headers are missing: install them (on Windows the folders include and libs)"),
    ("compiler", "install a C compiler"),
)


def verdict(device: int, triton: str, file: Path) -> str | None:
    """Why Triton is not to be used on this CUDA device, "" if it is fine, None if the process could not tell.

    Args:
        triton: its version.
        file: where verdicts are kept.
    """
    key = _key(device, triton)
    found = recall(file, key)
    if not isinstance(found, str):
        found = ask([sys.executable, "-c", CHILD, str(device)])
        if found is not None:
            keep(file, key, found)
    return f"{found} (to ask again, delete {file})" if found else found


def ask(command: list[str], seconds: float = SECONDS) -> str | None:
    """Run the process that tries a kernel: its verdict, as `verdict` without where it is kept."""
    hidden = getattr(subprocess, "CREATE_NO_WINDOW", 0)  # Windows
    try:
        ran = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=seconds,
            check=False,
            creationflags=hidden,
        )
    except subprocess.TimeoutExpired:
        return f"a first kernel did not finish in {seconds:g} s"
    except OSError:
        return None
    said = [line[len(VERDICT) :] for line in ran.stdout.splitlines() if line.startswith(VERDICT)]
    if said:
        return said[0] and _explained(said[0], ran.stderr)
    if ran.returncode == UNCAUGHT:
        return None
    return _explained(f"a first kernel ended its process, exit code {ran.returncode}", ran.stderr)


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
    compilers = [name for name in ("cc", "gcc", "clang", "cl") if shutil.which(name)]
    return ", ".join(
        [
            f"triton {triton}",
            f"torch {torch.__version__}",
            f"python {platform.python_version()} {sys.executable}",
            f"compute capability {major}.{minor}",
            f"headers {'yes' if headers else 'no'}",
            f"compilers {' '.join(compilers) or 'none'}",
        ]
    )
