"""Make the pack importable as `sixbit_diffusion` without installing it, and keep GPU tests off the CPU."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # on a GPU the kernels are compiled; compile-only tests use a subprocess
    os.environ.setdefault("TRITON_INTERPRET", "1")

if importlib.util.find_spec("sixbit_diffusion") is None:
    root = Path(__file__).resolve().parents[1]
    spec = importlib.util.spec_from_file_location(
        "sixbit_diffusion", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    sys.modules["sixbit_diffusion"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["sixbit_diffusion"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
