"""Rows of a long measurement, kept as they come, so that a run which stops goes on where it was.

Beside FILE stand `FILE.partial` (or `FILE.partial-I` of process I): JSON lines, the first of them what is
measured, each other one row with its key. They go when FILE is written.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from .errors import InputError

Row = dict[str, Any]
Shard = tuple[int, int]  # (which, of how many)


class RowStore:
    """Rows of one measurement by key.

    Args:
        path: the file that will hold the result.
        what: what is measured; partial files of something else are refused.
        shard: the part of the work that this process does, None for all of it.

    Raises:
        InputError: if partial rows of another measurement stand there.
    """

    def __init__(self, path: Path, what: Row, shard: Shard | None = None) -> None:
        self._path, self._what = path, json.loads(json.dumps(what))
        self._own = path.with_name(f"{path.name}.partial" + ("" if shard is None else f"-{shard[0]}"))
        self.rows: dict[str, Row] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.load()

    def load(self) -> None:
        """Read what any process has finished."""
        for file in self.partials():
            try:
                lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line]
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{file} cannot be read ({error}); move it away") from error
            if not lines or (len(lines) == 1 and json.dumps(self._what).startswith(lines[0])):
                if file == self._own and (not lines or _parsed(lines[0]) is None):
                    file.unlink()  # cut short before there was a row; another process's is being begun
                continue
            entries = [entry for entry in map(_parsed, lines) if entry is not None]
            if not entries or entries[0] != self._what:
                raise InputError(f"{file} is of another measurement; delete it or choose another --out")
            if not all(isinstance(entry, dict) and {"key", "row"} <= entry.keys() for entry in entries[1:]):
                raise InputError(f"{file} is damaged; delete it or choose another --out")
            self.rows.update({entry["key"]: entry["row"] for entry in entries[1:]})

    def add(self, key: str, row: Row) -> None:
        """Keep a row, on disk when this returns."""
        head = [] if self._own.exists() and self._own.stat().st_size else [self._what]
        with self._own.open("a", encoding="utf-8", newline="\n") as file:
            for entry in (*head, {"key": key, "row": row}):
                file.write("\n" + json.dumps(entry, allow_nan=False))  # a line cut short ends here
            file.flush()
            os.fsync(file.fileno())
        self.rows[key] = row

    def partials(self) -> list[Path]:
        """The partial files that stand there."""
        ours = re.compile(re.escape(self._path.name) + r"\.partial(-\d+)?", re.ASCII)
        return sorted(file for file in self._path.parent.iterdir() if ours.fullmatch(file.name))

    def clear(self) -> None:
        """Remove the partial files, once the result is written."""
        for file in self.partials():
            file.unlink()


def digest(*texts: str) -> str:
    """A short name for texts too long to keep."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def mine(keys: Sequence[str], shard: Shard | None) -> list[str]:
    """The keys that fall to a process."""
    return list(keys) if shard is None else list(keys[shard[0] :: shard[1]])


def run_workers(program: Sequence[str], count: int, watch: Callable[[], None]) -> None:
    """Run `program` in `count` processes, each told `--shard I/count` and given one GPU; wait for all.

    Args:
        watch: called twice a second, to show how far they are.

    Raises:
        RuntimeError: if one fails, with the last line it said.
    """
    environments = worker_environments(count)
    with ExitStack() as open_files:
        said = [open_files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        workers: list[subprocess.Popen] = []
        try:
            for index, file in enumerate(said):
                command = [*program, "--shard", f"{index}/{count}"]
                worker = subprocess.Popen(
                    command, env=environments[index], stdout=subprocess.DEVNULL, stderr=file
                )
                workers.append(worker)
            while any(worker.poll() is None for worker in workers):
                if any(worker.poll() not in (None, 0) for worker in workers):
                    break
                watch()
                time.sleep(0.5)
            for worker, file in zip(workers, said, strict=True):
                if worker.poll() not in (None, 0):
                    file.seek(0)
                    lines = file.read().strip().splitlines()
                    raise RuntimeError(f"a worker failed: {lines[-1] if lines else worker.returncode}")
            watch()
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.terminate()
            for worker in workers:
                worker.wait()


def worker_environments(count: int) -> list[dict[str, str]]:
    """The environment of each of `count` processes: its share of the cores, and one GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // count)), **os.environ}
    gpus = _visible_gpus()
    alone = [{} if len(gpus) < 2 else {"CUDA_VISIBLE_DEVICES": gpus[i % len(gpus)]} for i in range(count)]
    return [environment | mine_alone for mine_alone in alone]


def _visible_gpus() -> list[str]:
    """The GPUs that workers share, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(index) for index in range(torch.cuda.device_count())]


def own_program() -> list[str]:
    """How to start this program anew, installed or not."""
    return [shutil.which(sys.executable) or sys.executable, str(Path(__file__).resolve().parents[1])]


def _parsed(line: str) -> Row | None:
    """One line as JSON, None where writing it was cut short."""
    try:
        return json.loads(line)
    except ValueError:
        return None
