"""In a process's PYTHONPATH: the CPU counts as a GPU on which Triton imports, and dies at a launch.

How is told by FATE: abort, or headers that are missing.
"""

import os
import subprocess
import sys
from contextlib import nullcontext

import torch
import triton

empty = torch.empty


def launch(*args: object, **kwargs: object) -> None:
    if os.environ["FATE"] == "abort":
        os.abort()
    print("main.c:4:10: fatal error: Python.h: No such file or directory", file=sys.stderr)
    raise subprocess.CalledProcessError(1, ["gcc", "main.c"])


torch.cuda.device = lambda device: nullcontext()
torch.empty = lambda *args, **kwargs: empty(*args)
triton.runtime.jit.JITFunction.run = launch
