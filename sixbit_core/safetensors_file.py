"""Read and write safetensors files one tensor at a time, without mapping them into memory.

Layout (https://huggingface.co/docs/safetensors): 8 bytes little-endian header length n,
n bytes of JSON {name: {dtype, shape, data_offsets}, "__metadata__": {str: str}}, then
the data, gapless. Reading one tensor costs that tensor's memory and no more, and a
damaged file is told apart from a good one by its header before anything is read.
"""

import contextlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from .errors import CheckpointError
from .replacing import remove_leftovers

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", torch.uint8),  # scales of other formats; never read
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the limit of the format's own library
_LFS_MARK = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `start` and `stop` are absolute byte positions in `path`."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Tensors and metadata of a file; reads the header only.

    Raises:
        CheckpointError: not a safetensors file, or cut short, or damaged.
    """
    try:
        check_regular(path)
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if prefix and _LFS_MARK.startswith(prefix):
                raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run `git lfs pull`")
            if size < 8 or length > _MAX_HEADER or (size < 8 + length and file.read(1) not in (b"{", b"")):
                raise CheckpointError(f"{path} is not a safetensors file; give a .safetensors checkpoint")
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; give a file that can be read"
        ) from error
    if len(text) < length:
        raise CheckpointError(f"{path} is cut short in its header; download it again")
    return _parsed(path, text, 8 + length, size)


def check_regular(path: Path) -> None:
    """Raise CheckpointError for a pipe or device, which would be waited for or never end."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is no regular file; give a .safetensors checkpoint or its folder")


def _parsed(path: Path, text: bytes, base: int, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    try:
        header = json.loads(text, object_pairs_hook=_without_doubles)
        metadata = {str(k): str(v) for k, v in (header.pop("__metadata__", None) or {}).items()}
        rows = [(n, str(e["dtype"]), tuple(e["shape"]), *e["data_offsets"]) for n, e in header.items()]
        rows.sort(key=lambda row: row[3:])
        if any(len(row) != 5 for row in rows):
            raise ValueError("data_offsets must be two numbers")
        numbers_fit = all(isinstance(v, int) and v >= 0 for row in rows for v in (*row[2], *row[3:]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is no valid JSON") from error
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for name, kind, shape, start, stop in rows:
        if kind not in _DTYPES:
            raise CheckpointError(f"{path}: {name} has type {kind}; known are {', '.join(_DTYPES)}")
        dtype = _DTYPES[kind]
        if not numbers_fit or start != end or stop - start != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{path}: the place of {name} in the file is wrong; download it again")
        tensors[name] = TensorInfo(path, dtype, shape, base + start, base + stop)
        end = stop
    if base + end != size:
        last = next((n for n, info in tensors.items() if info.stop > size), None)
        what = f"cut short at {last}" if last else "longer than its header says"
        raise CheckpointError(f"{path} is {what} ({size} bytes, needs {base + end}); download it again")
    return tensors, metadata


def _without_doubles(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is there twice")
    return found


def read_bytes(info: TensorInfo, start: int = 0, stop: int | None = None) -> bytearray:
    """Bytes `start` to `stop` of a tensor's data."""
    stop = info.nbytes if stop is None else min(stop, info.nbytes)
    buffer = bytearray(max(stop - start, 0))
    try:
        with open(info.path, "rb", buffering=0) as file:
            file.seek(info.start + start)
            view, got = memoryview(buffer), 0
            while got < len(buffer) and (count := file.readinto(view[got:])):
                got += count
    except OSError as error:
        raise CheckpointError(f"cannot read {info.path}: {error.strerror or error}") from error
    if got < len(buffer):
        raise CheckpointError(f"{info.path} became shorter while it was read; download it again")
    return buffer


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor, on the CPU, in memory of its own."""
    if not info.nbytes:
        return torch.empty(info.shape, dtype=info.dtype)
    return torch.frombuffer(read_bytes(info), dtype=torch.uint8).view(info.dtype).reshape(info.shape)


class StreamWriter:
    """Write a safetensors file tensor by tensor; the target appears only when all is written.

    The header comes first, so names, types and shapes are given beforehand. The data go
    into a file beside the target, which is renamed at the end and removed on any error.
    Without `replace` a target that another process made meanwhile is an error and stays.

        with StreamWriter(path, [("a", torch.float32, (2,))], {"key": "value"}) as writer:
            writer.write("a", torch.zeros(2))
    """

    def __init__(
        self,
        target: Path,
        entries: Sequence[tuple[str, torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
        replace: bool = True,
    ):
        self.target = target
        self._replace = replace
        self._claimed = False
        self.temporary = target.with_name(f".{target.name}.tmp-{os.getpid()}")
        self._entries = list(entries)
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end = 0
        for name, dtype, shape in entries:
            start, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        self._header = text + b" " * (-len(text) % 8)
        self._written = 0
        self.nbytes = 8 + len(self._header) + end

    def __enter__(self) -> "StreamWriter":
        try:
            remove_leftovers(self.target, f".{self.target.name}.tmp-")
            self._file = open(self.temporary, "wb")
        except OSError as error:
            raise CheckpointError(
                f"cannot write {self.target}: {error.strerror or error}; choose another place or name"
            ) from error
        try:
            self._put(len(self._header).to_bytes(8, "little") + self._header)
        except BaseException:
            self._discard()
            raise
        return self

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next tensor of `entries`.

        Raises:
            ValueError: another name, type or shape than announced.
            CheckpointError: the disk refuses.
        """
        expected = self._entries[self._written] if self._written < len(self._entries) else None
        if (name, tensor.dtype, tuple(tensor.shape)) != expected:
            raise ValueError(f"got {name} {tensor.dtype} {tuple(tensor.shape)}, announced was {expected}")
        self._put(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        self._written += 1

    def _put(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.target}: {error.strerror or error}") from error

    def _discard(self) -> None:
        with contextlib.suppress(OSError):  # where the disk is full, closing flushes and fails again
            self._file.close()
        self.temporary.unlink(missing_ok=True)
        if self._claimed:
            self.target.unlink(missing_ok=True)

    def _claim(self) -> None:
        """Take the target's name, which fails where it exists, in one step on any file system."""
        try:
            os.close(os.open(self.target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        except FileExistsError as error:
            raise CheckpointError(
                f"{self.target} was made by another program meanwhile; choose another name, "
                "or replace it with --force"
            ) from error
        self._claimed = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            if self._written != len(self._entries):
                missing = self._entries[self._written][0]
                raise ValueError(f"{missing} was announced and never written")
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if not self._replace:
                self._claim()
            os.replace(self.temporary, self.target)
            self._claimed = False
        except OSError as failure:
            self._discard()
            raise CheckpointError(f"cannot write {self.target}: {failure.strerror or failure}") from failure
        except BaseException:
            self._discard()
            raise
