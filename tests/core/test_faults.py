"""Bad files: loader, quantizer and predictor answer each with one line, and damage nothing.

A row is a name, what makes the bad input, and what the line says.
"""

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sixbit_diffusion.kernels import quantize_nvfp4
from sixbit_diffusion.sixbit_core import quantize as quantize_module
from sixbit_diffusion.sixbit_core import safetensors_file
from sixbit_diffusion.sixbit_core.checkpoint import CheckpointError, open_checkpoint
from sixbit_diffusion.sixbit_core.fits import MAGNITUDES, BlockFit, Line, LinearFit, Plane
from sixbit_diffusion.sixbit_core.predictor import Predictor, load_predictor
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint, quantize_linear
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight
from sixbit_diffusion.sixbit_core.replacing import replacing

FAST = QuantizeConfig(method="rtn")
ROOT = Path(__file__).resolve().parents[2]
LONGEST = 1200  # characters of a line, a long path among them
State = dict[str, torch.Tensor]
Change = Callable[[State], object]


def ids(row: object) -> str | None:
    return row if isinstance(row, str) else None


def check_line(error: BaseException) -> str:
    """The message of an error, which is one line that a terminal can show."""
    line = str(error)
    assert line.isprintable() and 0 < len(line) <= LONGEST, line[:2000]
    return line


def says(error: BaseException, said: str) -> bool:
    """Whether the one line holds one of the alternatives (Python's versions differ over long names)."""
    line = check_line(error)
    return any(words in line for words in said.split(" | "))


# Files of bytes that are no checkpoint. The header's length stands before it.
def header(text: bytes, data: bytes = b"x", length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(kind: str = '"U8"', shape: str = "[1]", place: str = "[0, 1]", name: str = "a") -> bytes:
    return header(f'{{"{name}": {{"dtype": {kind}, "shape": {shape}, "data_offsets": {place}}}}}'.encode())


PLACE = "the place of a in the file is wrong"
NO_JSON = "its header is no valid JSON"
BYTES = {
    "nothing": (b"", "not a safetensors file"),
    "one byte": (b"\x01", "not a safetensors file"),
    "random bytes": (bytes(range(97, 256)) * 9, "not a safetensors file"),
    "text": (b"hello, this is not a checkpoint", "not a safetensors file"),
    "a zip, as torch.save writes": (b"PK\x03\x04" + bytes(99), "not a safetensors file"),
    "Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    "header of length 0": (header(b"", b""), NO_JSON),
    "header of length 2^63": (header(b"{}", length=2**63), "not a safetensors file"),
    "header of length 2^64-1": (header(b"{}", length=2**64 - 1), "not a safetensors file"),
    "header beyond the end": (header(b"{}", length=99_999), "cut short in its header"),
    "header empty": (header(b"{}", b""), "no model this pack knows"),
    "header a list": (header(b"[]"), "not a safetensors file"),
    "header half": (header(b"{"), NO_JSON),
    "header no UTF-8": (header(b"{\xff\xfe"), NO_JSON),
    "header nested deep": (header(b'{"a":' * 100_000), NO_JSON),
    "entry a number": (header(b'{"a": 1}'), NO_JSON),
    "entry null": (header(b'{"a": null}'), NO_JSON),
    "entry without offsets": (header(b'{"a": {"dtype": "U8", "shape": [1]}}'), NO_JSON),
    "a name twice": (
        header(b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, ' + entry()[9:-1]),
        NO_JSON,
    ),
    "type a list": (entry(kind="[]"), "a has type [];"),
    "type unknown": (entry(kind='"F4"'), "a has type F4; known are"),
    "shape a number": (entry(shape="1"), NO_JSON),
    "shape of text": (entry(shape='["1"]'), PLACE),
    "shape of floats": (entry(shape="[1.0]"), PLACE),
    "shape NaN": (entry(shape="[NaN]"), PLACE),
    "shape negative": (entry(shape="[-1]"), PLACE),
    "shape twice negative": (entry(shape="[-1, -1]"), PLACE),
    "shape beyond 2^64": (entry(shape=f"[{2**70}]"), PLACE),
    "shape of many digits": (entry(shape="[" + "9" * 5000 + "]"), NO_JSON),
    "shape whose product wraps": (entry(shape=f"[{2**32}, {2**32}, 1]"), PLACE),
    "offsets one": (entry(place="[0]"), NO_JSON),
    "offsets three": (entry(place="[0, 1, 1]"), NO_JSON),
    "offsets of text": (entry(place='[0, "1"]'), PLACE),
    "offsets infinite": (entry(place="[0, Infinity]"), PLACE),
    "offsets negative": (entry(place="[-1, 0]"), PLACE),
    "offsets backwards": (entry(place="[1, 0]"), PLACE),
    "offsets beyond the end": (entry(shape="[9999]", place="[0, 9999]"), "cut short at a"),
    "offsets overlap": (
        header(entry()[8:-2] + b', "b": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}'),
        "the place of b in the file is wrong",
    ),
    "offsets leave a gap": (entry(place="[1, 2]"), PLACE),
    "more data than said": (entry() + b"y", "longer than its header says"),
    "metadata a number": (header(entry()[8:-2] + b', "__metadata__": 3}'), NO_JSON),
    "a name of two lines and a bell": (
        entry(name="a\\n\\u0007\\u001b[31m", place="[1, 2]"),
        "the place of a",
    ),
    "a name of a million letters": (entry(name="a" * 1_000_000, place="[1, 2]"), "the place of a"),
}


@pytest.mark.parametrize("name", BYTES)
def test_bytes_that_are_no_checkpoint(tmp_path: Path, name: str) -> None:
    content, said = BYTES[name]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert said in check_line(caught.value) and path.read_bytes() == content


def test_a_checkpoint_cut_anywhere(native_file) -> None:
    path = native_file()
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    ends = [*range(64), *range(64, end + 8, 211), end - 1, end, len(whole) // 2, len(whole) - 1]
    for length in ends:
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(path)
        assert str(path) in check_line(caught.value), length


def test_bits_that_fell_over(native_file) -> None:
    path = native_file()
    whole = bytearray(path.read_bytes())
    end = 8 + int.from_bytes(whole[:8], "little")
    for position in torch.randint(0, end, (150,), generator=torch.Generator().manual_seed(0)).tolist():
        damaged = bytearray(whole)
        damaged[position] ^= 1 << (position % 8)
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except CheckpointError as error:  # a flip that only changes metadata may pass
            check_line(error)


# Whole safetensors files whose tensors are not those of a model.
def drop(name: str) -> Change:
    return lambda state: state.pop(name)


def set_to(name: str, value: torch.Tensor) -> Change:
    return lambda state: state.update({name: value})


def retype(name: str, dtype: torch.dtype) -> Change:
    return lambda state: state.update({name: state[name].to(dtype)})


def reshape(name: str, *shape: int) -> Change:
    return set_to(name, torch.zeros(shape, dtype=torch.bfloat16))


def empty(name: str) -> Change:
    return lambda state: state.update({name: state[name][..., :0].contiguous()})


def in_nvfp4(*changes: Change) -> Change:
    """One layer in NVFP4, rotated by 128, then changed."""

    def quantize(state: State) -> None:
        weight = state.pop("blocks.0.q.weight")
        layer = QuantizedWeight(*quantize_nvfp4(weight), *weight.shape, hadamard=128)
        state.update(layer.state_dict("blocks.0.q"))
        for change in changes:
            change(state)

    return quantize


def in_int8(*changes: Change) -> Change:
    """blocks.0.q as the host quantizes to INT8, with a scale per row."""

    def quantize(state: State) -> None:
        state[Q] = torch.zeros(128, 128, dtype=torch.int8)
        state[SCALES] = torch.ones(128, 1)
        mark(b'{"format": "int8_tensorwise"}')(state)
        for change in changes:
            change(state)

    return quantize


def mark(text: bytes) -> Change:
    return set_to("blocks.0.q.comfy_quant", torch.tensor(list(text), dtype=torch.uint8))


def rotated_by(size: bytes) -> Change:
    return in_nvfp4(mark(b'{"format": "sixbit_nvfp4", "hadamard": %s}' % size))


Q, SCALE, SCALES = "blocks.0.q.weight", "blocks.0.q.weight_scale_2", "blocks.0.q.weight_scale"
TENSORS: dict[str, tuple[Change, str]] = {
    "a weight missing": (drop("blocks.1.ff_out.weight"), "blocks.1.ff_out.weight is missing"),
    "an adaLN weight missing": (drop("blocks.0.norm1.linear.weight"), "norm1.linear.weight is missing"),
    "a bias missing": (drop("blocks.1.v.bias"), "blocks.1.v.bias is missing"),
    "the first bias missing": (drop("patch_embed.proj.bias"), "patch_embed.proj.bias is missing"),
    "the last weight missing": (drop("proj_out.weight"), "proj_out.weight is missing"),
    "a weight of another shape": (reshape("blocks.0.k.weight", 128, 64), "needs [128, 128]"),
    "a norm of another shape": (reshape("norm_final.weight", 127), "norm_final.weight is [127]"),
    "a weight without dimensions": (reshape(Q), "blocks.0.q.weight is []"),
    "a weight of 5 dimensions": (reshape(Q, 1, 1, 1, 128, 128), "q.weight is [1, 1, 1, 128, 128]"),
    "a tensor that is none of the model's": (reshape("blocks.0.lora.weight", 4), "is not part of"),
    "a block of number 30 million": (
        set_to("transformer_blocks.30000000.attn1.to_q.weight", torch.zeros(1)),
        "blocks.30000000 cannot be among",
    ),
    "a tensor under both its names": (
        set_to("transformer_blocks.0.attn1.to_q.weight", torch.zeros(128, 128)),
        "blocks.0.q.weight is there twice",
    ),
    "a norm without a value": (empty("blocks.0.norm_q.weight"), "which holds no value"),
    "a weight without a value": (empty("patch_embed.proj.weight"), "which holds no value"),
    **{
        f"{name} in {dtype}": (retype(name, dtype), f"{name} is {str(dtype)[6:]}; needed is")
        for dtype in (torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.float64)
        for name in (Q, "norm_final.bias")
    },
    **{
        f"rotated by {size.decode()}": (rotated_by(size), "power of two from 2 to 128")
        for size in (b"256", b"1", b"96", b"16.0", b'"16"', b"true", b"NaN", b"-2")
    },
    "a mark nested deep": (rotated_by(b"[" * 100_000), "quantization entries are damaged"),
    "a mark of random bytes": (in_nvfp4(mark(bytes(range(128, 192)))), "entries are damaged"),
    "a mark that is a list": (in_nvfp4(mark(b'["nvfp4"]')), "entries are damaged"),
    "a mark of a megabyte": (in_nvfp4(mark(b'{"format": "nvfp4"}'.ljust(1 << 20))), "entries are damaged"),
    "a mark of no known format": (in_nvfp4(mark(b'{"format": ["nvfp4"]}')), "blocks.0.q is in the format"),
    "a mark without a format": (in_nvfp4(mark(b"{}")), "blocks.0.q is in the format None, which this pack"),
    **{
        f"in {shown}": (
            in_int8(mark(text)),
            f"format '{shown}', which this pack does not read; take a file in bf16",
        )
        for text, shown in (
            (b'{"format": "mxfp8"}', "mxfp8"),
            (b'{"format": "int8_tensorwise", "convrot": true}', "int8_tensorwise with convrot"),
            (b'{"format": "int8_tensorwise", "params": {"convrot": 1}}', "int8_tensorwise with convrot"),
        )
    },
    "in int8 without its weight": (in_int8(drop(Q)), "blocks.0.q.weight is missing"),
    "in int8 without its scale": (in_int8(drop(SCALES)), "weight_scale is missing, needs one float32"),
    "in int8 with a scale a column": (
        in_int8(set_to(SCALES, torch.ones(1, 128))),
        "weight_scale is float32 [1, 128]",
    ),
    "in int8 with scales in one dimension": (
        in_int8(set_to(SCALES, torch.ones(128))),
        "weight_scale is [128], by which ComfyUI multiplies columns; this pack reads one scale, or one a row "
        "as [128, 1]: store them in that shape",
    ),
    "in int8 with scales in bf16": (in_int8(retype(SCALES, torch.bfloat16)), "weight_scale is bfloat16"),
    "in int8, but bf16": (in_int8(retype(Q, torch.bfloat16)), "bfloat16 [128, 128], int8_tensorwise needs"),
    "scales in bf16": (in_nvfp4(retype(SCALES, torch.bfloat16)), "weight_scale is bfloat16"),
    "scales of another shape": (in_nvfp4(reshape(SCALES, 8)), "weight_scale is (8,), needs (128, 8)"),
    "scales missing": (in_nvfp4(drop(SCALES)), "weight_scale is missing"),
    "codes in floats": (in_nvfp4(reshape(Q, 128, 64)), "must be 2-D uint8"),
    "a global scale in fp16": (in_nvfp4(retype(SCALE, torch.float16)), "is float16 [], needs one float32"),
    "two global scales": (in_nvfp4(set_to(SCALE, torch.ones(2))), "weight_scale_2 is float32 [2]"),
    "a global scale NaN": (in_nvfp4(set_to(SCALE, torch.tensor(math.nan))), "weight_scale_2 is nan"),
    "a global scale infinite": (in_nvfp4(set_to(SCALE, torch.tensor(math.inf))), "weight_scale_2 is inf"),
    "a global scale negative": (in_nvfp4(set_to(SCALE, torch.tensor(-1.0))), "weight_scale_2 is -1.0"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_are_no_model(native_file, name: str) -> None:
    change, said = TENSORS[name]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(native_file(change=change))
    assert said in check_line(caught.value)


def test_the_rows_above_change_a_file_that_opens(native_file) -> None:
    assert open_checkpoint(native_file(change=in_nvfp4())).is_quantized


METADATA = {
    "configuration half": ({"sixbit_config": "{"}, "sixbit_config is no JSON"),
    "configuration a list": ({"sixbit_config": "[1]"}, "sixbit_config is no JSON object"),
    "configuration a number": ({"sixbit_config": "3"}, "sixbit_config is no JSON object"),
    "configuration nested deep": ({"sixbit_config": "[" * 100_000}, "sixbit_config is no JSON"),
    "formats half": ({"_quantization_metadata": "{"}, "quantization entries are damaged"),
    "formats a list": ({"_quantization_metadata": "[]"}, "quantization entries are damaged"),
    "formats nested deep": ({"_quantization_metadata": '{"layers":' * 100_000}, "entries are damaged"),
    "formats of layers in text": (
        {"_quantization_metadata": '{"layers": {"blocks.0.q": "nvfp4"}}'},
        "quantization entries are damaged",
    ),
    "a format of a layer that is not there": (
        {"_quantization_metadata": '{"layers": {"blocks.9.q": {"format": "nvfp4"}}}'},
        "blocks.9.q.weight is missing",
    ),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_is_damaged(native_file, name: str) -> None:
    metadata, said = METADATA[name]
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(native_file(metadata=metadata))
    assert said in check_line(caught.value)


# Folders that are not whole.
def index_of(folder: Path) -> Path:
    return next(folder.glob("*.index.json"))


def shard(folder: Path, number: int) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (index_of(folder) if name == "index" else folder / name).write_text(text)


def only_pickles(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"PK")


def nothing(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def rename_shards(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        index = index_of(folder)
        found = json.loads(index.read_text())
        found["weight_map"] = dict.fromkeys(found["weight_map"], name)
        index.write_text(json.dumps(found))

    return change


def linked_to_itself(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = index_of(folder) if name == "index" else folder / name
        path.unlink(missing_ok=True)
        path.symlink_to(path.name)

    return change


def pipe(name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        if not hasattr(os, "mkfifo"):
            pytest.skip("needs pipes with names")
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a shard missing": (lambda folder: shard(folder, 1).unlink(), "is missing; download it"),
    "a shard cut": (lambda f: shard(f, 0).write_bytes(shard(f, 0).read_bytes()[:-1]), "is cut short at"),
    "a shard of others": (
        lambda f: save_file({"x": torch.zeros(1)}, shard(f, 0)),
        "is missing, which",
    ),
    "shards without index": (lambda folder: index_of(folder).unlink(), "files and no index"),
    "index without weight_map": (write("index", "{}"), "no weight_map"),
    "index whose weight_map is a list": (write("index", '{"weight_map": [1]}'), "no weight_map"),
    "index half": (write("index", '{"metadata": {'), "index.json is no readable JSON"),
    "index nested deep": (write("index", "[" * 100_000), "index.json is no readable JSON"),
    "index a list": (write("index", "[]"), "index.json holds no JSON object"),
    "index linked to itself": (linked_to_itself("index"), "index.json"),
    "index with a shard of a long name": (
        rename_shards("1" * 300),
        "name too long | is missing; download it",
    ),
    "index with a shard outside": (rename_shards("../../etc/passwd"), "passwd is missing; download it"),
    "index with a shard that is the folder": (rename_shards("."), "is no regular file"),
    "index with a shard named by a number": (rename_shards(7), "7 is missing; download it"),
    "configuration half": (write("config.json", '{"num_layers":'), "config.json is no readable JSON"),
    "configuration nested deep": (write("config.json", '{"a":' * 100_000), "config.json is no readable JSON"),
    "configuration a list": (write("config.json", "[]"), "config.json holds no JSON object"),
    "configuration a pipe": (pipe("config.json"), "config.json is no regular file"),
    "pickles only": (only_pickles, "holds pickled weights"),
    "nothing": (nothing, "holds no .safetensors file"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_that_are_not_whole(tiny, store, name: str) -> None:
    damage, said = FOLDERS[name]
    folder = store(tiny(), "sharded folder")
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert says(caught.value, said)


# Paths that lead to no file of weights.
NO_FILE = "name too long | does not exist"
PATHS = {
    "absent": ("absent.safetensors", "does not exist"),
    "a pickle": ("model.pt", "pickled weights"),
    "a pickled checkpoint": ("model.ckpt", "pickled weights"),
    "one shard": ("model-00001-of-00003.safetensors", "one shard of 3; give the folder"),
    "a long name": ("a" * 300 + ".safetensors", NO_FILE),
    "a deep path": ("a/" * 3000 + "b.safetensors", NO_FILE),
    "beneath a file": ("model.pt/inside.safetensors", "does not exist"),
    "a name of two lines": ("two\nlines.safetensors", "lines.safetensors does not exist"),
    "a zero in the name": ("zero\0.safetensors", "does not exist"),
    "a name in no encoding": ("\udcff.safetensors", "does not exist"),
    "a link to itself": ("loop.safetensors", "does not exist"),
    "a pipe": ("pipe.safetensors", "is no regular file"),
}


@pytest.mark.parametrize("name", PATHS)
def test_paths_to_nothing(tmp_path: Path, name: str) -> None:
    path, said = PATHS[name]
    for file in ("model.pt", "model.ckpt", "model-00001-of-00003.safetensors"):
        (tmp_path / file).write_bytes(b"PK\x03\x04")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.safetensors")
    elif name == "a pipe":
        pytest.skip("needs pipes with names")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / path)
    assert says(caught.value, said)


@pytest.mark.parametrize(
    "name", ["Bärenfüße-模型-🎬.safetensors", "a" * 200 + ".safetensors", "-.safetensors"]
)
def test_names_that_are_fine(native_file, tmp_path: Path, name: str) -> None:
    source = native_file().rename(tmp_path / name)
    (tmp_path / "out").mkdir()
    quantize_checkpoint(source, tmp_path / "out" / name, FAST)
    copy = open_checkpoint(tmp_path / "out" / name)
    assert copy.is_quantized and copy.metadata["sixbit_source"] == name
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


# The quantizer: the target stays what it was, and nothing is left beside it.
def spoil(name: str, value: float) -> Change:
    def change(state: State) -> None:
        state[name].view(-1)[3] = value

    return change


def quantized_layer(state: State) -> None:
    state.update(quantize_linear(state.pop(Q), FAST).state_dict("blocks.0.q"))


SOURCES: dict[str, tuple[Change, str]] = {
    "NaN in a weight": (spoil("blocks.1.ff_out.weight", math.nan), "blocks.1.ff_out.weight holds NaN or Inf"),
    "infinity in a weight": (spoil(Q, math.inf), "blocks.0.q.weight holds NaN or Inf"),
    "infinity in adaLN": (spoil("norm_out.linear.weight", -math.inf), "norm_out.linear.weight holds NaN"),
    "NaN in a bias": (spoil("blocks.1.norm2.norm.bias", math.nan), "norm2.norm.bias holds NaN or Inf"),
    "quantized already": (quantized_layer, "is quantized already; give the original"),
    "a weight in fp8": (retype("blocks.1.k.weight", torch.float8_e4m3fn), "is float8_e4m3fn; needed is"),
    "a weight missing": (drop("blocks.1.v.weight"), "blocks.1.v.weight is missing"),
    "a bias of another shape": (reshape("proj_out.bias", 3), "proj_out.bias is [3]"),
    "no tensor at all": (lambda state: state.clear(), "no model this pack knows"),
}


def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def denied(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


class Filling:
    """A file on a disk that fills up after 50 kB."""

    def __init__(self, path: Path) -> None:
        self._file, self._left = open(path, "wb"), 50_000  # noqa: SIM115

    def write(self, data: bytes) -> None:
        self._left -= len(data)
        if self._left < 0:
            full()
        self._file.write(data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


def opening(to_write: Callable[[Path], object]) -> Callable[..., object]:
    """`open` that does as ever for reading."""
    return lambda path, mode="r", **rest: to_write(path) if "w" in mode else open(path, mode, **rest)


def stop_in_the_middle(error: type[BaseException]) -> Callable[..., object]:
    calls, own = [], quantize_module.quantize_group

    def group(*args: object, **kwargs: object) -> object:
        calls.append(1)
        if len(calls) == 5:
            raise error("stop")
        return own(*args, **kwargs)

    return group


Usage = namedtuple("Usage", "total used free")
NO_SPACE = "out.safetensors: No space left on device"
MACHINES: dict[str, tuple[object, str, Callable[..., object], type[BaseException], str]] = {
    "too little space": (
        shutil,
        "disk_usage",
        lambda path: Usage(10**9, 10**9, 1000),
        CheckpointError,
        "has 0.00 GB free",
    ),
    "disk full at the first byte": (safetensors_file, "open", opening(full), CheckpointError, NO_SPACE),
    "disk full in the middle": (safetensors_file, "open", opening(Filling), CheckpointError, NO_SPACE),
    "disk full at the end": (os, "fsync", full, CheckpointError, NO_SPACE),
    "disk full at renaming": (os, "replace", full, CheckpointError, NO_SPACE),
    "a folder that is read only": (
        safetensors_file,
        "open",
        opening(denied),
        CheckpointError,
        "Permission denied; choose another place or name",
    ),
    "a folder that may not be listed": (
        Path,
        "iterdir",
        denied,
        CheckpointError,
        "denied; choose another place",
    ),
    "Ctrl-C": (quantize_module, "quantize_group", stop_in_the_middle, KeyboardInterrupt, "stop"),
    "out of memory": (quantize_module, "quantize_group", stop_in_the_middle, MemoryError, "stop"),
}


def check_target_stays(source: Path, folder: Path, existing: bool, error: type[BaseException]) -> str:
    folder.mkdir()
    target = folder / "out.safetensors"
    if existing:
        target.write_bytes(b"old")
    with pytest.raises(error) as caught:
        quantize_checkpoint(source, target, QuantizeConfig(method="rtn", force=existing))
    assert sorted(os.listdir(folder)) == ([target.name] if existing else [])
    assert not existing or target.read_bytes() == b"old"
    return check_line(caught.value)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("name", SOURCES)
def test_a_bad_source_leaves_the_target_alone(native_file, tmp_path: Path, name: str, existing: bool) -> None:
    change, said = SOURCES[name]
    assert said in check_target_stays(native_file(change=change), tmp_path / "to", existing, CheckpointError)


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_that_gives_out_leaves_the_target_alone(
    native_file, tmp_path: Path, monkeypatch, name: str, existing: bool
) -> None:
    owner, attribute, replacement, error, said = MACHINES[name]
    source = native_file()
    with monkeypatch.context() as patch:
        made = stop_in_the_middle(error) if replacement is stop_in_the_middle else replacement
        patch.setattr(owner, attribute, made, raising=False)
        line = check_target_stays(source, tmp_path / "to", existing, error)
    assert said in line


def test_a_file_that_may_not_be_read_says_what_to_do(native_file, monkeypatch) -> None:
    source = native_file()
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file, "open", denied, raising=False)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(source)
    assert (
        check_line(caught.value) == f"cannot read {source}: Permission denied; give a file that can be read"
    )


def beside(name: str) -> Callable[[Path], Path]:
    return lambda source: source.parent / name


def linked(source: Path) -> Path:
    link = source.with_name("link.safetensors")
    link.symlink_to(source)
    return link


def loop(source: Path) -> Path:
    link = source.with_name("loop.safetensors")
    link.symlink_to(link.name)
    return link


def folder(source: Path) -> Path:
    made = source.with_name("folder.safetensors")
    made.mkdir()
    return made


TARGETS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "the source": (lambda source: source, "is the source itself"),
    "a link to the source": (linked, "is the source itself"),
    "the source by a way round": (lambda s: s.parent / "x" / ".." / s.name, "does not exist; create it"),
    "another file": (
        beside("existing.safetensors"),
        "exists; choose another name, or replace it",
    ),
    "a folder": (folder, "is a folder"),
    "in no folder": (beside("absent/out.safetensors"), "does not exist; create it"),
    "beneath a file": (beside("existing.safetensors/out.safetensors"), "is a file, not a folder"),
    "another kind of file": (beside("out.gguf"), "must end in .safetensors; give it that ending"),
    "a long name": (beside("a" * 300 + ".safetensors"), "name too long"),
    "a name too long for what is written first": (beside("a" * 240 + ".safetensors"), "name too long"),
    "a link to itself": (loop, "loop.safetensors"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_are_refused(native_file, tmp_path: Path, name: str) -> None:
    source, existing = native_file(), tmp_path / "existing.safetensors"
    before = source.read_bytes()
    existing.write_bytes(b"old")
    make, said = TARGETS[name]
    with pytest.raises(CheckpointError) as caught:
        quantize_checkpoint(source, make(source), QuantizeConfig(method="rtn", force="source" in name))
    assert said in check_line(caught.value)
    assert source.read_bytes() == before and existing.read_bytes() == b"old"
    assert not list(tmp_path.glob(".*"))


# Another process. It takes a target and whether to force from each line, says "writing" after the first
# layer, and goes on at the next line.
OTHER = """
import runpy, sys
from pathlib import Path

root, source = sys.argv[1:]
runpy.run_path(root + "/__main__.py")["register_root"](Path(root))
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint

while line := sys.stdin.readline():
    force, target = line.strip().split(" ", 1)
    started = []

    def progress(*_):
        if not started:
            started.append(print("writing", flush=True))
            sys.stdin.readline()

    try:
        quantize_checkpoint(source, target, QuantizeConfig(method="rtn", force=force == "force"), progress)
        print("done", flush=True)
    except ValueError as error:
        print(error, flush=True)
"""


def test_another_process_writes_the_same_file(native_file, tmp_path: Path) -> None:
    """Always one whole file; without --force the later one says a sentence. Killed, it damages nothing."""
    source, alone, folder = native_file(), tmp_path / "alone.safetensors", tmp_path / "to"
    folder.mkdir()
    target = folder / "out.safetensors"
    quantize_checkpoint(source, alone, FAST)
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER, str(ROOT), str(source)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )

    def tell(line: str) -> str:
        other.stdin.write(f"{line}\n")
        other.stdin.flush()
        return other.stdout.readline().strip()

    def left_beside() -> list[str]:
        return [name for name in os.listdir(folder) if name != target.name]

    try:
        assert tell(f"plain {target}") == "writing"
        assert len(left_beside()) == 1
        quantize_checkpoint(source, target, FAST)
        assert "was made by another program meanwhile; choose another name" in tell("go")
        assert target.read_bytes() == alone.read_bytes() and not left_beside()

        target.write_bytes(b"old")
        assert tell(f"force {target}") == "writing" and target.read_bytes() == b"old"
        quantize_checkpoint(source, target, QuantizeConfig(method="rtn", force=True))
        assert target.read_bytes() == alone.read_bytes()
        assert tell("go") == "done"
        assert target.read_bytes() == alone.read_bytes() and not left_beside()

        target.write_bytes(b"old")
        assert tell(f"force {target}") == "writing"
        other.kill()
        other.wait()
        (left,) = left_beside()
        assert target.read_bytes() == b"old" and left.startswith(".") and not left.endswith(".safetensors")
        quantize_checkpoint(source, target, QuantizeConfig(method="rtn", force=True))
        assert target.read_bytes() == alone.read_bytes()
        assert os.name == "nt" or not left_beside()  # there processes cannot be asked whether they live
    finally:
        other.kill()
        other.communicate()


def test_a_target_made_meanwhile_stays(native_file, tmp_path: Path) -> None:
    target = tmp_path / "out.safetensors"
    with pytest.raises(CheckpointError, match=r"was made by another program meanwhile; .*--force"):
        quantize_checkpoint(native_file(), target, FAST, lambda *_: target.write_bytes(b"theirs"))
    assert target.read_bytes() == b"theirs" and not list(tmp_path.glob(".*"))


@pytest.mark.skipif(os.name == "nt", reason="processes cannot be asked there")
def test_leftovers_of_dead_processes_are_removed(native_file, tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = tmp_path / f".out.safetensors.tmp-{ended.pid}"
    kept = [tmp_path / f".out.safetensors.tmp-{os.getppid()}", tmp_path / f".b.safetensors.tmp-{ended.pid}"]
    for path in (dead, *kept):
        path.write_bytes(b"half")
    quantize_checkpoint(native_file(), tmp_path / "out.safetensors", FAST)
    assert not dead.exists() and all(path.exists() for path in kept)
    beside = tmp_path / f".p.tmp-{ended.pid}.json"
    beside.write_text("half")
    with replacing(tmp_path / "p.json") as path:
        path.write_text("whole")
    assert not beside.exists()


# Predictor files.
PREDICTOR = Predictor(
    family="cogvideox-5b",
    fingerprint="0123456789abcdef0123",
    calibration={"steps": 50, "cfg": 6.0, "size": [480, 720], "frames": 49, "prompts": 16},
    linears={
        "blocks.0.q": LinearFit(Line(0.1, 0.25, 0.4), None, 0.09, 0.01, (0.1,) * 10, 256, Plane(0, 0, 0, 0))
    },
    outlier_limits={"q": 9.5},
    theta={"5.0": {"cache_off": 0.4}, "7.0": {"cache_off": 0.2}},
    blocks=(BlockFit(0.1, (1.0,) * MAGNITUDES),),
)


def edit(*path: str | int, to: object = None, gone: bool = False) -> Callable[[str], str]:
    """Change one value of the document, given as JSON text where it is a string that starts with "=": raw."""

    def apply(text: str) -> str:
        document = json.loads(text)
        place = document
        for key in path[:-1]:
            place = place[key]
        if gone:
            del place[path[-1]]
        else:
            place[path[-1]] = "@raw@" if isinstance(to, bytes) else to
        text = json.dumps(document)
        return text.replace('"@raw@"', to.decode()) if isinstance(to, bytes) else text

    return apply


FIT = ("linears", "blocks.0.q")
PREDICTORS: dict[str, tuple[Callable[[str], str | bytes], str]] = {
    "nothing": (lambda text: "", "cannot be used"),
    "half": (lambda text: text[: len(text) // 2], "it is no JSON from line"),
    "random bytes": (lambda text: bytes(range(128, 256)) * 9, "cannot be used: it is no text file;"),
    "a pickle": (lambda text: b"\x80\x04cposix\nsystem\n(S'touch pwned'\ntR.", "cannot be used"),
    "a list": (lambda text: "[]", "cannot be used: it holds no JSON object;"),
    "null": (lambda text: "null", "it holds no JSON object"),
    "a number": (lambda text: "7", "it holds no JSON object"),
    "nested deep": (lambda text: "[" * 100_000, "it is nested too deep"),
    "nested deep within": (edit("calibration", to=b"[" * 100_000), "cannot be used"),
    "of 51 MB": (lambda text: text.replace("{", "{" + " " * 51_000_000, 1), "is 51 MB"),
    "another format": (edit("format", to="other"), "format is 'other'"),
    "a format of a megabyte": (edit("format", to="x" * 1_000_000), "its format is"),
    "a format of two lines": (edit("format", to="a\nb\x1b[31m"), "its format is"),
    "a later version": (edit("version", to=2), "version is 2, this program reads 1"),
    "a version in text": (edit("version", to="1"), "version is '1'"),
    "no theta": (edit("theta", gone=True), "lacks 'theta'"),
    "no model": (edit("model", gone=True), "lacks 'model'"),
    "a model that is text": (edit("model", to="5b"), "of another form than `sixbit calibrate` writes"),
    "linears a list": (edit("linears", to=[1]), "of another form"),
    "no linear": (edit("linears", to={}), "cannot be used"),
    "a linear that is null": (edit(*FIT, to=None), "of another form"),
    "no macs": (edit(*FIT, "macs", gone=True), "lacks 'macs'"),
    "macs in text": (edit(*FIT, "macs", to="256"), "holds '256' where"),
    "macs with a fraction": (edit(*FIT, "macs", to=0.5), "holds 0.5 where"),
    "macs true": (edit(*FIT, "macs", to=True), "holds True where"),
    "macs beyond a float": (edit(*FIT, "macs", to=b"1e999"), "holds inf where"),
    "alpha NaN": (edit(*FIT, "alpha", to=math.nan), "holds NaN"),
    "alpha infinite": (edit(*FIT, "alpha", to=-math.inf), "holds -Infinity"),
    "beta in text": (edit(*FIT, "beta", to="x"), "holds 'x' where"),
    "beta of a megabyte": (edit(*FIT, "beta", to="x" * 1_000_000), "holds 'xxx"),
    "beta beyond a float": (edit(*FIT, "beta", to=b"1e999"), "holds inf where"),
    "beta of 400 digits": (edit(*FIT, "beta", to=b"1" * 400), "int too large"),
    "beta of 5000 digits": (edit(*FIT, "beta", to=b"1" * 5000), "digits"),
    "one error by progress": (edit(*FIT, "error_by_progress", to=[1.0]), "needs 10 values"),
    "a plane without a slope": (edit(*FIT, "timed", "slope", gone=True), "lacks 'slope'"),
    "one magnitude": (edit("blocks", 0, "magnitudes", to=[1.0]), "needs 50 magnitudes above 0, has 1"),
    "a magnitude of 0": (edit("blocks", 0, "magnitudes", to=[0.0] * 50), "magnitudes above 0"),
    "blocks that are a number": (edit("blocks", to=7), "of another form"),
    "steps beyond a float": (edit("calibration", "steps", to=b"1e999"), "holds inf where"),
    "steps in text": (edit("calibration", "steps", to="50"), "holds '50' where"),
    "a size that is one number": (edit("calibration", "size", to=480), "holds 480 where"),
    "a size in text": (edit("calibration", "size", to=["480", "720"]), "holds '480' where"),
    "a size of three": (edit("calibration", "size", to=[1, 2, 3]), "holds [1, 2, 3] where"),
    "bits beyond a float": (edit("theta", "1e999", to={"cache_off": 0.1}), "holds inf where"),
    "bits in words": (edit("theta", "six", to={"cache_off": 0.1}), "cannot be used"),
    "a threshold that is null": (edit("theta", "5.0", "cache_off", to=None), "holds None where"),
}


@pytest.fixture
def predictor(tmp_path: Path) -> Path:
    PREDICTOR.save(tmp_path / "p.json")
    return tmp_path / "p.json"


@pytest.mark.parametrize("name", PREDICTORS)
def test_a_bad_predictor_file(predictor: Path, monkeypatch, name: str) -> None:
    monkeypatch.chdir(predictor.parent)
    load_predictor(predictor)
    change, said = PREDICTORS[name]
    text = change(predictor.read_text())
    predictor.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as caught:
        load_predictor(predictor)
    line = check_line(caught.value)
    assert said in line and "calibrate again" in line
    assert os.listdir(predictor.parent) == ["p.json"]


PREDICTOR_PATHS = {
    "absent": ("none.json", "there is no predictor file"),
    "a long name": ("a" * 300 + ".json", "name too long"),
    "a folder": (".", "it is no regular file"),
    "a pipe": ("pipe.json", "it is no regular file"),
    "a link to itself": ("loop.json", "loop.json"),
    "a zero in the name": ("zero\0.json", "cannot be used"),
}


@pytest.mark.parametrize("name", PREDICTOR_PATHS)
def test_a_predictor_path_to_nothing(tmp_path: Path, name: str) -> None:
    path, said = PREDICTOR_PATHS[name]
    (tmp_path / "loop.json").symlink_to("loop.json")
    if name == "a pipe":
        pipe("pipe.json")(tmp_path)
    with pytest.raises(ValueError) as caught:
        load_predictor(tmp_path / path)
    assert said in check_line(caught.value)


@pytest.mark.parametrize(
    ("owner", "attribute", "replacement", "said"),
    [
        (Path, "write_text", full, "No space left on device"),
        (os, "replace", denied, "Permission denied"),
        (Path, "iterdir", denied, "Permission denied"),
    ],
)
def test_a_failed_save_leaves_the_old_predictor(
    predictor: Path, monkeypatch, owner: object, attribute: str, replacement: object, said: str
) -> None:
    before = predictor.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, replacement)
        with pytest.raises(RuntimeError) as caught:
            PREDICTOR.save(predictor)
    assert f"cannot write {predictor}: {said}" == check_line(caught.value)
    assert predictor.read_bytes() == before and os.listdir(predictor.parent) == ["p.json"]
