"""6-bit copies made by the nodes; every check of `test_quantize` is one entry of the answer."""

from boot import ARGUMENTS, answer, pack  # isort: split

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import comfy.model_management
import comfy.utils
import folder_paths
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(ARGUMENTS["folder"])
folder_paths.folder_names_and_paths["diffusion_models"] = ([str(FOLDER)], {".safetensors"})
LOAD = pack("nodes.load").SixBitLoadCogVideoX
QUANTIZE = pack("nodes.quantize").SixBitQuantize
COPIES = pack("nodes.copies")
OPEN = pack("sixbit_core.checkpoint").open_checkpoint
LINES: list[str] = []
CHECKS: dict[str, Callable[[], object]] = {}


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def predict(model: object) -> torch.Tensor:
    comfy.model_management.load_models_gpu([model])
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((1, 4, 3, 8, 12), generator=generator)
    text = torch.randn((1, 16, 32), generator=generator)
    return model.model.diffusion_model(x, torch.full((1,), 501.0), text)


def listed() -> list[str]:
    return QUANTIZE.GET_SCHEMA().inputs[0].options


@check
def every_source_gives_one_model() -> list[str]:
    bad = []
    expected = predict(LOAD.execute("tiny/", "as stored").args[0])
    for name in ("native.safetensors", "prefixed.safetensors", "pipeline/"):
        if name not in listed():
            bad.append(f"{name} is not in the list")
        if not torch.equal(predict(LOAD.execute(name, "as stored").args[0]), expected):
            bad.append(f"{name} differs")
    return bad


@check
def copy_is_said_made_once_and_taken_again() -> list[str]:
    bad, updates = [], []
    target = FOLDER / "native-6bit.safetensors"
    comfy.utils.set_progress_bar_global_hook(lambda value, total, *_, **__: updates.append(value / total))
    LINES.clear()
    first = predict(LOAD.execute("native.safetensors", "6-bit").args[0])
    comfy.utils.set_progress_bar_global_hook(None)
    made = target.stat().st_mtime_ns
    said = [line for line in LINES if line.startswith("6Bit: quantizing native.safetensors into native-6bit")]
    if len(said) != 1 or " GB of disk, less than a minute on cpu" not in said[0]:
        bad.append(f"said {LINES}")
    if not updates or updates != sorted(updates) or updates[-1] != 1:
        bad.append(f"progress {updates}")
    LINES.clear()
    if not torch.equal(predict(LOAD.execute("native.safetensors", "auto").args[0]), first):
        bad.append("the second load differs")
    if target.stat().st_mtime_ns != made or not any("is taken" in line for line in LINES):
        bad.append("it was not taken again")
    if not torch.equal(predict(LOAD.execute("native-6bit.safetensors", "as stored").args[0]), first):
        bad.append("by its own name it differs")
    return bad


@check
def copy_of_other_weights_is_refused() -> str:
    source = load_file(FOLDER / "native.safetensors")
    save_file({name: tensor + 1 for name, tensor in source.items()}, FOLDER / "other.safetensors")
    shutil.copy(FOLDER / "native-6bit.safetensors", FOLDER / "other-6bit.safetensors")
    try:
        LOAD.execute("other.safetensors", "6-bit")
    except ValueError as error:
        return str(error)
    return "no error"


@check
def a_full_disk_is_said_before() -> list[object]:
    own = shutil.disk_usage
    shutil.disk_usage = lambda path: type("Usage", (), {"free": 1000})()
    (FOLDER / "native-6bit.safetensors").rename(FOLDER / "aside")
    try:
        return [
            LOAD.validate_inputs("native.safetensors", "auto"),
            QUANTIZE.validate_inputs("native.safetensors", "search", "auto", "full"),
            LOAD.validate_inputs("native.safetensors", "as stored"),
        ]
    finally:
        shutil.disk_usage = own
        (FOLDER / "aside").rename(FOLDER / "native-6bit.safetensors")


@check
def node_writes_what_was_asked_for() -> list[str]:
    bad = []
    for method, rotation in (("rtn", "off"), ("search", "on")):
        name = f"{method}-{rotation}"
        output = QUANTIZE.execute("tiny/", method, rotation, name)
        copy = OPEN(FOLDER / f"{name}.safetensors")
        marks = {mark["format"] for layer, mark in copy.formats.items() if ".q" in layer}
        if marks != {"sixbit_nvfp4" if rotation == "on" else "nvfp4"}:
            bad.append(f"{name}: {marks}")
        if copy.metadata["sixbit_method"] != method or output.args != (f"{name}.safetensors",):
            bad.append(f"{name}: {output.args}")
        if copy.fingerprint != OPEN(FOLDER / "tiny").fingerprint or f"{name}.safetensors" not in listed():
            bad.append(f"{name} is not what or where it should be")
    if QUANTIZE.execute("bundled reference", "rtn", "off", "").args != ("reference-6bit.safetensors",):
        bad.append("the reference lies elsewhere")
    if QUANTIZE.validate_inputs(None, "rtn", "off", "") is not True or LOAD.fingerprint_inputs(None, "auto"):
        bad.append("what comes from another node is checked")
    made = (FOLDER / "rtn-off.safetensors").stat().st_mtime_ns
    QUANTIZE.execute("tiny/", "rtn", "off", "rtn-off")
    if (FOLDER / "rtn-off.safetensors").stat().st_mtime_ns != made:
        bad.append("what is there already was written again")
    return bad


@check
def plain_nvfp4_loads() -> bool:
    expected = predict(LOAD.execute("tiny/", "as stored").args[0])
    found = predict(LOAD.execute("rtn-off.safetensors", "auto").args[0])
    return 0.01 < float((found - expected).norm() / expected.norm()) < 0.2


@check
def wrong_requests_are_one_line() -> list[object]:
    half = {name: tensor.half() for name, tensor in load_file(FOLDER / "native.safetensors").items()}
    save_file(half, FOLDER / "half.safetensors")
    return [
        QUANTIZE.validate_inputs("tiny/", "search", "auto", "rtn-off"),
        QUANTIZE.validate_inputs("native-6bit.safetensors", "search", "auto", ""),
        QUANTIZE.validate_inputs("tiny/", "search", "auto", "../up"),
        LOAD.validate_inputs("half.safetensors", "6-bit"),
        LOAD.validate_inputs("gone", "auto"),
    ]


@check
def interrupting_leaves_no_file() -> list[str]:
    before = {path.name for path in FOLDER.iterdir()}
    comfy.model_management.interrupt_current_processing()
    try:
        QUANTIZE.execute("tiny/", "rtn", "auto", "interrupted")
        return ["not interrupted"]
    except comfy.model_management.InterruptProcessingException:
        return sorted({path.name for path in FOLDER.iterdir()} - before)
    finally:
        comfy.model_management.interrupt_current_processing(False)


def main() -> None:
    logging.getLogger().addHandler(_Listener())
    logging.getLogger().setLevel(logging.INFO)
    results = {}
    for name, function in CHECKS.items():
        try:
            results[name] = function()
        except Exception as error:
            logging.exception(name)
            results[name] = f"{type(error).__name__}: {error}"
    answer(results=results, methods=QUANTIZE.GET_SCHEMA().inputs[1].options)


with torch.inference_mode():
    main()
