"""A real ComfyUI for tests: where it lies, scripts in its Python, a server of its own.

The host is COMFYUI_PATH, or the one this repository is installed in, or ~/comfy/ComfyUI; its Python is
COMFYUI_PYTHON, or `.venv` in it, or the running one.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
SCRIPTS = HERE / "scripts"
ABSENT = HERE / "absent"  # makes Triton and diffusers as if not installed


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


def host_or_skip() -> Host:
    found = find_host()
    if found is None:
        pytest.skip("no ComfyUI: set COMFYUI_PATH to its folder")
    return found


class Server:
    """A ComfyUI of its own, whose every folder lies under `base`."""

    def __init__(self, host, base: Path) -> None:
        (base / "custom_nodes").mkdir(parents=True, exist_ok=True)
        (base / "models" / "diffusion_models").mkdir(parents=True, exist_ok=True)
        (base / "custom_nodes" / "sixbit").symlink_to(ROOT, target_is_directory=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.base, self.log = base, (base / "log.txt").open("w")
        arguments = ["--cpu", "--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", base]
        self.process = subprocess.Popen(
            [
                host.python,
                "main.py",
                *arguments,
                "--disable-api-nodes",
                "--database-url",
                "sqlite:///:memory:",
            ],
            cwd=host.folder,
            env={**host.environment(), "PYTHONPATH": str(ABSENT)},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, path: str, body: dict | None = None) -> dict:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", data, timeout=30) as answer:
            return json.load(answer)

    def wait(self, seconds: float = 180) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                self.ask("system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, self.tail()
                time.sleep(0.5)
        pytest.fail(f"the server did not start: {self.tail()}")

    def execute(self, prompt: dict, seconds: float = 580) -> dict:
        """Outputs by node id of a prompt that must succeed."""
        done = self.outcome(prompt, seconds)
        assert done["status"]["status_str"] == "success", self.tail()
        return done["outputs"]

    def outcome(self, prompt: dict, seconds: float = 580) -> dict:
        """What the host keeps of a prompt that it must queue, once it has ended."""
        try:
            key = self.ask("prompt", {"prompt": prompt})["prompt_id"]
        except urllib.error.HTTPError as error:
            pytest.fail(f"the server refused the prompt: {error.read().decode()}")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            done = self.ask(f"history/{key}").get(key)
            if done:
                return done
            time.sleep(0.5)
        pytest.fail(f"the prompt did not end: {self.tail()}")

    def tail(self) -> str:
        return (self.base / "log.txt").read_text()[-4000:]

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        self.log.close()


@contextmanager
def running_server(
    host: Host,
    base: Path,
    make_models: Callable[[Path], None] | None = None,
    nodes: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """A server that has started.

    Args:
        make_models: writes into its folder of models.
        nodes: file name -> source of custom nodes beside ours.
    """
    for name, source in (nodes or {}).items():
        (base / "custom_nodes").mkdir(parents=True, exist_ok=True)
        (base / "custom_nodes" / name).write_text(source, encoding="utf-8")
    if make_models is not None:
        (base / "models" / "diffusion_models").mkdir(parents=True)
        make_models(base / "models")
    server = Server(host, base)
    try:
        server.wait()
        yield server
    finally:
        server.close()
