"""Bad files and machines at the command line: exit code, one line on stderr, and nothing damaged.

A row is a name, the arguments (capitals stand for places), what makes the bad input, and what the line says.
"""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sixbit_diffusion.engine.cli import main
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.facts import read_facts
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import load_model
from sixbit_diffusion.engine.video import read_image

RANDOM = bytes(range(97, 256)) * 9
LONG = "n" * 300
NO_FILE = "name too long | does not exist"  # as Python's version has it
ON_CPU = ("--device", "cpu")
GENERATE = ("generate", "--model", "TINY", "--prompt", "a star", "--steps", "2", "--out", "OUT", *ON_CPU)
EVALUATE = ("evaluate", "--model", "TINY", "--steps", "2", "--out", "OUT", *ON_CPU)
CALIBRATE = ("calibrate", "--model", "TINY", "--steps", "4", "--out", "OUT", *ON_CPU)
QUANTIZE = ("quantize", "TINY", "TARGET")

Row = tuple[tuple[str, ...], bytes | None, str]  # arguments, what BAD holds, what is said
ROWS: dict[str, Row] = {
    "inspect random bytes": (("inspect", "BAD"), RANDOM, "is not a safetensors file"),
    "inspect a pickle": (("inspect", "PICKLE"), None, "pickled weights, which can run code and are not read"),
    "inspect a long name": (("inspect", LONG), None, NO_FILE),
    "inspect a name of two lines": (("inspect", "a\nb\x1b[31m"), None, "does not exist"),
    "inspect a name in no encoding": (("inspect", "\udcff"), None, "does not exist"),
    "inspect a zero": (("inspect", "a\0b"), None, "does not exist"),
    "inspect a link to itself": (("inspect", "LOOP"), None, "does not exist"),
    "inspect an empty folder": (("inspect", "EMPTY"), None, "holds no .safetensors file"),
    "quantize random bytes": (("quantize", "BAD", "TARGET"), RANDOM, "is not a safetensors file"),
    "quantize onto a file": (("quantize", "TINY", "KEPT"), None, "exists; choose another name"),
    "quantize onto itself": (("quantize", "KEPT", "KEPT", "--force"), None, "is the source itself"),
    "quantize onto a folder": (("quantize", "TINY", "FOLDER"), None, "is a folder; give a file name in it"),
    "quantize onto a long name": (("quantize", "TINY", f"{LONG}.safetensors"), None, NO_FILE),
    "quantize onto a link to itself": (("quantize", "TINY", "LOOP"), None, "loop.safetensors"),
    "quantize into no folder": (("quantize", "TINY", "no/x.safetensors"), None, "does not exist; create it"),
    "quantize with random inputs": (
        (*QUANTIZE, "--method", "gptq", "--calibration", "INPUTS"),
        RANDOM,
        "inputs.safetensors is not a safetensors file",
    ),
    "quantize with a long folder": ((*QUANTIZE, "--method", "gptq", "--calibration", LONG), None, NO_FILE),
    "generate from random bytes": ((*GENERATE, "--model", "BAD", "--pipeline", "TINY"), RANDOM, "is not a"),
    "generate from a long name": ((*GENERATE, "--model", LONG), None, NO_FILE),
    "generate from a zero": ((*GENERATE, "--model", "a\0b"), None, "does not exist"),
    "generate with no pipeline": (
        (*GENERATE, "--model", "KEPT", "--pipeline", "no"),
        None,
        "no does not exist",
    ),
    "generate with a file as pipeline": (
        (*GENERATE, "--model", "KEPT", "--pipeline", "KEPT"),
        None,
        "is no folder; give a diffusers folder",
    ),
    "generate from a long pipeline": ((*GENERATE, "--model", "KEPT", "--pipeline", LONG), None, NO_FILE),
    "generate to a long name": ((*GENERATE, "--out", LONG), None, NO_FILE),
    "generate beneath a file": ((*GENERATE, "--out", "KEPT/out"), None, "cannot be made a folder"),
    "generate to a link to itself": ((*GENERATE, "--out", "LOOP"), None, "cannot be made a folder"),
    "report to a long name": ((*GENERATE, "--report", LONG), None, NO_FILE),
    "report beneath a file": ((*GENERATE, "--report", "KEPT/r.json"), None, "cannot be made a folder"),
    "predictor of random bytes": ((*GENERATE, "--predictor", "BAD"), RANDOM, "cannot be used"),
    "predictor nested deep": ((*GENERATE, "--predictor", "BAD"), b"[" * 100_000, "cannot be used"),
    "predictor that is a folder": ((*GENERATE, "--predictor", "EMPTY"), None, "it is no regular file"),
    "predictor of a long name": ((*GENERATE, "--predictor", LONG), None, NO_FILE),
    "captions of random bytes": (
        (*EVALUATE, "--prompts", "BAD"),
        b"\xff\xfe",
        "file: it is not UTF-8; give",
    ),
    "captions in a folder": ((*EVALUATE, "--prompts", "EMPTY"), None, "cannot be read as a text file"),
    "captions of a long name": ((*EVALUATE, "--prompts", LONG), None, "cannot be read as a text file"),
    "no caption": ((*EVALUATE, "--prompts", "BAD"), b" \n\n", "holds no caption"),
    "evaluate to a folder": ((*EVALUATE, "--out", "EMPTY"), None, "is a folder; give a file name"),
    "evaluate to a long name": ((*EVALUATE, "--out", LONG), None, NO_FILE),
    "evaluate beside a damaged part": ((*EVALUATE, "--out", "DAMAGED"), None, "of another measurement"),
    "calibrate to a long name": ((*CALIBRATE, "--out", LONG), None, NO_FILE),
    "calibrate beneath a file": ((*CALIBRATE, "--out", "KEPT/p.json"), None, "cannot be made a folder"),
    "calibrate with inputs to a file": ((*CALIBRATE, "--inputs", "KEPT"), None, "cannot be made a folder"),
}


@pytest.fixture
def places(tiny_folder: Path, tmp_path: Path) -> dict[str, str]:
    """What capitals in the arguments stand for."""
    names = {
        **{"BAD": "bad.safetensors", "KEPT": "kept.safetensors", "TARGET": "made.safetensors", "OUT": "out"},
        **{"EMPTY": "empty", "FOLDER": "folder.safetensors", "INPUTS": "inputs", "PICKLE": "model.pt"},
        **{"LOOP": "loop.safetensors", "DAMAGED": "rows.json"},
    }
    for name in ("empty", "folder.safetensors", "inputs"):
        (tmp_path / name).mkdir()
    shutil.copyfile(tiny_folder / "transformer/diffusion_pytorch_model.safetensors", tmp_path / names["KEPT"])
    (tmp_path / "model.pt").write_bytes(b"PK\x03\x04")
    (tmp_path / "rows.json.partial").write_bytes(b"\n{]\n7\n")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    return {"TINY": str(tiny_folder), **{key: str(tmp_path / name) for key, name in names.items()}}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run(arguments: tuple[str, ...], places: dict[str, str], capsys: pytest.CaptureFixture) -> tuple[int, str]:
    """Exit code and the one line on stderr of a command."""

    def placed(argument: str) -> str:
        first, slash, rest = argument.partition("/")
        return places.get(first, first) + slash + rest

    code = main([placed(argument) for argument in arguments])
    out, err = capsys.readouterr()
    line = err.removesuffix("\n")
    assert line.startswith("sixbit: ") and line.isprintable() and len(line) < 1200, err[-3000:]
    assert "Traceback" not in out
    return code, line


@pytest.mark.parametrize("name", ROWS)
def test_bad_input_is_one_line_and_code_2(name, places, tmp_path, capsys, monkeypatch) -> None:
    arguments, content, said = ROWS[name]
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(places["BAD"]).write_bytes(content)
        Path(places["INPUTS"], "inputs.safetensors").write_bytes(content)
    before = contents(tmp_path)
    code, line = run(arguments, places, capsys)
    assert any(words in line for words in said.split(" | ")) and code == 2, line
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", [LONG, "a\0b", "\udcff", "LOOP", "BAD", "EMPTY"])
def test_check_speaks_of_the_machine_first(name, places, capsys) -> None:
    Path(places["BAD"]).write_bytes(RANDOM)
    assert main(["check", "--model", places.get(name, name), *ON_CPU]) == 2
    out, err = capsys.readouterr()
    assert "machine: cpu" in out and err.startswith("sixbit: ") and err.count("\n") == 1


@pytest.mark.parametrize("content", [RANDOM, b"", b"\x89PNG\r\n\x1a\n" + RANDOM, b"P6 99999 99999 255\n"])
def test_an_image_that_is_none(tmp_path, content) -> None:
    """The last one would unpack to gigabytes."""
    (tmp_path / "first.png").write_bytes(content)
    with pytest.raises(InputError, match=r"--image .*first\.png cannot be read as an image"):
        read_image(tmp_path / "first.png")


# A pipeline folder of which a part is damaged.
@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "model")


JSON_FILES = {
    "index empty": ("model_index.json", "{}"),
    "index a list": ("model_index.json", "[]"),
    "index of half an entry": (
        "model_index.json",
        '{"_class_name": "CogVideoXPipeline", "vae": ["diffusers"]}',
    ),
    "index nested deep": ("model_index.json", "[" * 100_000),
    "VAE without sizes": ("vae/config.json", '{"block_out_channels": null, "scaling_factor": "x"}'),
    "VAE empty": ("vae/config.json", "{}"),
    "VAE nested deep": ("vae/config.json", '{"a":' * 100_000),
    "VAE of 400 digits": (
        "vae/config.json",
        '{"block_out_channels": [8, 8, 8, 8], "scaling_factor": ' + "9" * 400 + "}",
    ),
    "text encoder of a wide width": ("text_encoder/config.json", '{"d_model": "wide"}'),
    "text encoder empty": ("text_encoder/config.json", "{}"),
    "scheduler of many steps": ("scheduler/scheduler_config.json", '{"num_train_timesteps": "many"}'),
    "transformer of a wide width": ("transformer/config.json", '{"sample_width": "wide"}'),
    "transformer of infinite length": ("transformer/config.json", '{"sample_frames": Infinity}'),
    "tokenizer empty": ("tokenizer/tokenizer.json", "{}"),
}


@pytest.mark.parametrize("name", JSON_FILES)
def test_a_broken_json_is_one_line(name, folder, places, capsys) -> None:
    file, text = JSON_FILES[name]
    (folder / file).write_text(text)
    code, line = run((*GENERATE, "--model", str(folder)), places, capsys)
    assert code == 2 and str(folder) in line, line


def test_a_tokenizer_without_a_vocabulary(folder) -> None:
    for name in ("tokenizer.json", "spiece.model"):
        (folder / "tokenizer" / name).unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"holds none of tokenizer.json, spiece.model"):
        read_facts(str(folder))


def test_a_tokenizer_to_which_every_word_is_unknown(folder) -> None:
    file = folder / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = [*tokenizer["model"]["vocab"][:3], ["▁", -2.0]]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="knows no English word"):
        load_model(str(folder), None, "full", find_machine("cpu"))


@pytest.mark.parametrize("part", ["text_encoder/model", "vae/diffusion_pytorch_model"])
def test_a_part_that_lacks_a_tensor(part, folder) -> None:
    file = folder / f"{part}.safetensors"
    tensors = load_file(file)
    gone = next(name for name in sorted(tensors) if "weight" in name and "shared" not in name)
    tensors["another.name"] = tensors.pop(gone)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=f"lacks the tensor {gone}"):
        load_model(str(folder), None, "full", find_machine("cpu"))


@pytest.mark.parametrize("part", ["text_encoder/model", "vae/diffusion_pytorch_model"])
@pytest.mark.parametrize("damage", [lambda raw: RANDOM, lambda raw: raw[: len(raw) // 2]])
def test_a_part_that_is_damaged(part, damage, folder, places, capsys) -> None:
    file = folder / f"{part}.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    code, line = run((*GENERATE, "--model", str(folder)), places, capsys)
    assert code == 2 and str(file) in line, line


def test_frames_that_are_not_finite_are_not_written(folder, places, capsys) -> None:
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_out.conv.bias"].fill_(torch.nan)
    save_file(tensors, file, {"format": "pt"})
    main([*GENERATE[:2], str(folder), *GENERATE[3:-3], places["OUT"], *ON_CPU])
    assert "not finite" in capsys.readouterr().err
    assert not os.listdir(places["OUT"])


# Machines that give out: code 1, and no half of a file.
def full(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("arguments", "call"), [(GENERATE, "replace"), (EVALUATE, "replace"), (EVALUATE, "fsync")]
)
def test_a_disk_that_fills_up(arguments, call, places, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(os, call, full)
    code, line = run((*arguments, "--precision", "w4a8"), places, capsys)
    assert code == 1 and "No space left on device" in line
    assert not [name for name in contents(tmp_path) if ".tmp-" in name or name.endswith(("out", ".mp4"))]


def test_output_in_an_encoding_that_lacks_the_letters(places, capsys, monkeypatch, tmp_path) -> None:
    """As Windows has it where output goes into a file."""
    import io
    import sys

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    source = shutil.copyfile(places["KEPT"], tmp_path / "Bär-模型.safetensors")
    assert main(["inspect", str(source)]) == 0
    sys.stdout.flush()
    assert b"\\xe4r-" in sys.stdout.buffer.getvalue()
