"""What is handed out: metadata for ComfyUI's registry, its archive, the wheel in a fresh environment."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sixbit_diffusion.sixbit_core import VERSION

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it there

ROOT = Path(__file__).resolve().parents[1]
Tracked = Callable[..., set[str]]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
# The registry's rules: docs.comfy.org/registry/specifications and, where that is silent, its client.
SYSTEMS = ("Microsoft", "POSIX", "MacOS", "OS Independent")
ACCELERATORS = {
    "GPU :: NVIDIA CUDA",
    "GPU :: AMD ROCm",
    "GPU :: Intel Arc",
    "NPU :: Huawei Ascend",
    "GPU :: Apple Metal",
}
NAME = r"[a-z](?:[-_.]?[a-z0-9])*"
HTTPS = r"https://\S+"
FIELDS = {
    "project.name": NAME,
    "project.version": r"\d+\.\d+\.\d+",
    "project.description": r".{20,200}",
    "project.license": r"Apache-2\.0",
    "project.requires-python": r">=3\.10,<3\.14",
    "tool.comfy.DisplayName": r"\S.{0,98}\S",
    "tool.comfy.requires-comfyui": r">=\d+\.\d+\.\d+(?:,<\d+\.\d+\.\d+)?",
}
LEFT_TO_THE_PUBLISHER = {
    "tool.comfy.PublisherId": NAME,
    "tool.comfy.Icon": HTTPS,
    "tool.comfy.Banner": HTTPS,
    "project.urls.Repository": HTTPS,
}


def value_of(path: str) -> Any:
    """What stands at a dotted path of pyproject.toml; "" for nothing."""
    found: Any = PROJECT
    for key in path.split("."):
        found = found.get(key, {})
    return found or ""


@pytest.mark.parametrize("path", FIELDS)
def test_registry_takes_the_field(path: str) -> None:
    assert re.fullmatch(FIELDS[path], value_of(path)), value_of(path)


@pytest.mark.parametrize("path", LEFT_TO_THE_PUBLISHER)
def test_publishers_field_is_empty_or_right(path: str) -> None:
    assert re.fullmatch(f"(?:{LEFT_TO_THE_PUBLISHER[path]})?", value_of(path)), value_of(path)


def test_registry_knows_the_name_and_every_classifier() -> None:
    name = value_of("project.name")
    assert len(name) < 100 and "comfyui" not in name
    parts = [line.partition(" :: ") for line in value_of("project.classifiers")]
    systems = [rest for first, _, rest in parts if first == "Operating System"]
    assert systems and all(rest.startswith(SYSTEMS) for rest in systems)
    accelerators = {rest for first, _, rest in parts if first == "Environment"}
    assert accelerators and accelerators <= ACCELERATORS
    assert set(PROJECT["tool"]["comfy"]) <= {
        "PublisherId",
        "DisplayName",
        "Icon",
        "Banner",
        "requires-comfyui",
    }


def test_nothing_is_installed_into_comfyui() -> None:
    assert PROJECT["project"]["dependencies"] == []
    assert not list(ROOT.glob("requirements*.txt")) and not (ROOT / "install.py").exists()


def test_version_is_the_same_everywhere() -> None:
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert VERSION == PROJECT["project"]["version"] == re.search(r"^## (\S+)", changes, re.M)[1]
    assert list((ROOT / "tests" / "host" / "golden" / VERSION / "api").glob("*.json"))


def test_a_tag_is_published_after_its_tests() -> None:
    publish, tests = (
        (ROOT / ".github" / "workflows" / f"{name}.yml").read_text() for name in ("publish", "tests")
    )
    called, job = re.search(r"^  (\w+):\n    uses: \./\.github/workflows/(\w+)\.yml", publish, re.M).groups()
    assert job == "tests" and re.search(r"^  workflow_call:", tests, re.M)
    assert re.search(rf"^  registry:\n    needs: {called}$", publish, re.M)


def test_what_the_usual_run_leaves_out_runs_weekly() -> None:
    """Slow tests by their folder; those of tests/core write files too large for the runner."""
    weekly = (ROOT / ".github" / "workflows" / "weekly.yml").read_text(encoding="utf-8")
    assert re.search(r'^  schedule:\n    - cron: "\d+ \d+ \* \* \d"', weekly, re.M)
    runs = re.findall(r"^ +- run: python -m pytest (.*?)(?: #.*)?$", weekly, re.M)
    slow = {
        path.relative_to(ROOT).parent.as_posix()
        for path in (ROOT / "tests").glob("*/test_*.py")
        if "pytest.mark.slow" in path.read_text(encoding="utf-8")
    }
    asked = {folder for run in runs for folder in run.split() if folder.startswith("tests/")}
    assert slow - asked == {"tests/core"} and len(runs) == 2 and runs[0].startswith("-m slow ")


def test_archive_of_the_registry(archive: Path, tracked: Tracked) -> None:
    with zipfile.ZipFile(archive) as file:
        members = file.namelist()
    roots = {name.partition("/")[0] for name in members}
    assert roots == {
        *("nodes", "kernels", "sixbit_core", "engine", "web", "workflows", "docs"),
        *("__init__.py", "__main__.py", "pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE"),
    }
    for layer in ("nodes", "kernels", "sixbit_core", "engine", "web", "workflows", "docs"):
        assert {n for n in members if n.startswith(f"{layer}/")} == tracked(layer), layer
    assert not [name for name in members if name.endswith((".safetensors", ".model", ".bin", ".so", ".exe"))]
    assert archive.stat().st_size < 1_500_000


def fresh(*command: object) -> str:
    """Output of a program that sees nothing of this checkout."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, cwd=Path(sys.prefix), env=clean
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tracked: Tracked, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive of what git tracks, and the wheel built from that archive."""
    pytest.importorskip("build")
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, source / name)
    fresh(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source)
    return out


def test_wheel_holds_the_package_alone(built: Path, tracked: Tracked) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as file:
        members = file.namelist()
    assert {name.partition("/")[0] for name in members} == {
        "sixbit_diffusion",
        f"sixbit_diffusion-{VERSION}.dist-info",
    }
    modules = {name.removeprefix("sixbit_diffusion/") for name in members if name.endswith(".py")}
    layers = ("nodes", "kernels", "sixbit_core", "engine", "reference")
    assert modules == {n for n in tracked(*layers, "__init__.py", "__main__.py") if n.endswith(".py")}
    assert not [name for name in members if name.endswith((".safetensors", ".json", ".model"))]


def test_wheel_runs_in_a_fresh_environment(built: Path, tmp_path: Path) -> None:
    """Installed offline, without dependencies; torch is then lent by this environment."""
    venv.create(tmp_path / "env", symlinks=os.name != "nt")
    scripts = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    python, suffix = scripts / ("python" + (".exe" if os.name == "nt" else "")), ".exe" * (os.name == "nt")
    wheel = next(built.glob("*.whl"))
    fresh(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps", wheel)
    place = Path(fresh(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    assert {path.name for path in place.iterdir()} == {
        "sixbit_diffusion",
        f"sixbit_diffusion-{VERSION}.dist-info",
    }
    assert "generate" in fresh(scripts / f"sixbit{suffix}", "--help")
    (place / "lent.pth").write_text(str(Path(torch.__file__).parents[1]), encoding="utf-8")
    program = "import sixbit_diffusion.sixbit_core.quantize as m, torch; print(m.__file__, torch.__version__)"
    said = fresh(python, "-c", program)
    assert said.startswith(str(place)) and torch.__version__ in said
    assert "example:" in fresh(scripts / f"sixbit{suffix}", "quantize", "--help")
