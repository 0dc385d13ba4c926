"""Finished clips of `sixbit verify`, kept so that a run which stops goes on where it was.

In FOLDER stand `settings.json`, what the clips were made with, and for each clip `PROMPT-METHOD.safetensors`:
its frames, and in the metadata its row. Each appears whole or not at all.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..sixbit_core.errors import CheckpointError
from ..sixbit_core.safetensors_file import StreamWriter, read_header, read_tensor
from .errors import InputError
from .facts import read_json
from .files import make_folder, write_json
from .rows import Row

Key = tuple[int, str]  # (number of the prompt, method)


class ClipStore:
    """Rows of the finished clips by key; their frames stay on disk.

    Args:
        folder: where they stand.
        what: what they are made with.
        force: remove clips that were made with something else; nothing but clips is removed.

    Raises:
        InputError: if such clips stand there, unless `force`; or if one is damaged.
    """

    def __init__(self, folder: Path, what: Row, force: bool = False) -> None:
        self.folder, settings = make_folder(folder), folder / "settings.json"
        self.rows: dict[Key, Row] = {}
        what = json.loads(json.dumps(what))
        found = read_json(settings)
        if force:
            self._clear()
        elif found is not None and found != what:
            raise InputError(
                f"{folder} holds clips of another run ({', '.join(_changed(found, what))} changed); "
                "choose another --out, or start anew with --force"
            )
        if found != what:
            write_json(settings, what)
        for path in self._files():
            number, method = path.stem.split("-", 1)
            self.rows[int(number), method] = self._row(path)

    def add(self, key: Key, row: Row, frames: np.ndarray) -> None:
        """Keep a clip of (T, H, W, 3) uint8, on disk when this returns."""
        tensor = torch.from_numpy(frames)
        entry = ("frames", tensor.dtype, tuple(tensor.shape))
        with StreamWriter(self._path(key), [entry], {"row": json.dumps(row, allow_nan=False)}) as writer:
            writer.write("frames", tensor)
        self.rows[key] = row

    def frames(self, key: Key) -> np.ndarray:
        """A kept clip, (T, H, W, 3) uint8."""
        path = self._path(key)
        try:
            return read_tensor(read_header(path)[0]["frames"]).numpy()
        except (CheckpointError, KeyError) as error:
            raise _damaged(path) from error

    def _path(self, key: Key) -> Path:
        return self.folder / f"{key[0]}-{key[1]}.safetensors"

    def _files(self) -> Sequence[Path]:
        return [
            p for p in self.folder.iterdir() if re.fullmatch(r"\d+-[a-z0-9-]+\.safetensors", p.name, re.A)
        ]

    def _clear(self) -> None:
        for path in self._files():
            path.unlink()

    def _row(self, path: Path) -> Row:
        try:
            return json.loads(read_header(path)[1]["row"])
        except (CheckpointError, KeyError, ValueError) as error:
            raise _damaged(path) from error


def _changed(found: Row, what: Row) -> list[str]:
    """Names of the settings in which two runs differ."""
    return sorted(name for name in found.keys() | what.keys() if found.get(name) != what.get(name))


def _damaged(path: Path) -> InputError:
    return InputError(f"{path} is damaged; delete it, and the clip is made again")
