"""Tests on a real ComfyUI, each in that host's own Python; skipped with one line where there is none.

The host is COMFYUI_PATH, or the one this repository is installed in, or ~/comfy/ComfyUI; its Python is
COMFYUI_PYTHON, or `.venv` in it, or the running one.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
sys.path.append(str(HERE))  # the tests of this folder share host_cases


@dataclass(frozen=True)
class Host:
    """A ComfyUI folder, and the Python that runs it.

    Attributes:
        digests: of one and the same run, from every process that made it.
    """

    folder: Path
    python: Path
    digests: list[str] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "SIXBIT_ROOT": str(ROOT),
        }

    def run(self, script: str, **arguments: object) -> dict:
        """Run scripts/<script>.py inside the host and return the JSON object it prints last."""
        done = subprocess.run(
            [self.python, SCRIPTS / f"{script}.py", json.dumps(arguments, default=str)],
            cwd=self.folder,
            env={**self.environment(), "PYTHONPATH": os.pathsep.join([str(self.folder), str(SCRIPTS)])},
            capture_output=True,
            text=True,
            timeout=600,
        )
        if done.returncode:
            pytest.fail(f"{script} failed in the host:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
        return {**json.loads(done.stdout.strip().splitlines()[-1]), "log": done.stderr}


def find_host() -> Host | None:
    inside = ROOT.parent.parent if ROOT.parent.name == "custom_nodes" else None
    given = os.environ.get("COMFYUI_PATH")
    folder = Path(given) if given else inside or Path.home() / "comfy" / "ComfyUI"
    if not (folder / "main.py").is_file():
        return None
    own = folder / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    return Host(folder, Path(os.environ.get("COMFYUI_PYTHON") or (own if own.exists() else sys.executable)))


@pytest.fixture(scope="session")
def host() -> Host:
    found = find_host()
    if found is None:
        pytest.skip("no ComfyUI: set COMFYUI_PATH to its folder")
    return found
