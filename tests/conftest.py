"""Make the pack importable as `sixbit_diffusion` without installing it, and keep GPU tests off the CPU."""

import importlib.util
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # on a GPU the kernels are compiled; compile-only tests use a subprocess
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("sixbit_diffusion") is None:
    spec = importlib.util.spec_from_file_location(
        "sixbit_diffusion", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
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


@pytest.fixture(scope="session")
def tracked() -> Callable[..., set[str]]:
    """`tracked(options)` -> paths of `git ls-files`; skips the test outside a checkout."""

    def listed(*options: str) -> set[str]:
        command = ["git", "ls-files", "-z", *options]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("needs a git checkout")
        return {name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()}

    return listed


@pytest.fixture(scope="session")
def archive(tracked: Callable[..., set[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ComfyUI's registry installs: what git tracks without what .comfyignore names, as a zip file."""
    path = tmp_path_factory.mktemp("archive") / "node.zip"
    ignored = tracked("--cached", "--ignored", "--exclude-from=.comfyignore")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in sorted(tracked() - ignored):
            file.write(ROOT / name, name)
    return path
