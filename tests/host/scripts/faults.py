"""Bad input to the nodes, in the pack as ComfyUI's registry installs it; every answer is the one line said.

A row is a name, what a user asks for, and a part of the line.
"""

import json
import os
import sys

os.environ["SIXBIT_ROOT"] = json.loads(sys.argv[1])["root"]  # the unpacked archive, before boot reads it
from boot import ARGUMENTS, answer, load_pack, pack  # isort: split

import asyncio
import errno
import shutil
from pathlib import Path

import comfy.model_management
import comfy.utils
import folder_paths
import torch
from safetensors.torch import load_file, save_file

FOLDER = Path(ARGUMENTS["folder"])
MODELS = FOLDER / "diffusion_models"
folder_paths.models_dir = str(FOLDER)
folder_paths.folder_names_and_paths["diffusion_models"] = ([str(MODELS)], {".safetensors"})
folder_paths.folder_names_and_paths["loras"] = ([str(FOLDER / "loras")], {".safetensors"})
LOAD = pack("nodes.load").SixBitLoadCogVideoX
QUANTIZE = pack("nodes.quantize").SixBitQuantize
LORA = pack("nodes.lora").SixBitLoadLora
DMPQ = pack("nodes.dmpq").SixBitApplyDMPQ
COMPARE = pack("nodes.compare").SixBitCompare
CALIBRATE = pack("nodes.calibrate").SixBitCalibratePredictor
REFERENCE = pack("nodes.reference").SixBitLoadReference
OUT = MODELS / "out.safetensors"
LONG = "n" * 300


def damage(name: str, file: str, text: str) -> str:
    """A copy of the good pipeline with one file replaced; its entry in the list."""
    folder = shutil.copytree(MODELS / "good", MODELS / name)
    (folder / file).write_text(text)
    return f"{name}/"


def write(name: str, content: bytes) -> str:
    (MODELS / name).write_bytes(content)
    return name


def checked(name: str, weights: str = "as stored") -> object:
    """Validation, then execution: both say it."""
    said, found = LOAD.validate_inputs(name, weights), None
    try:
        found = LOAD.execute(name, weights)
    except ValueError as error:
        found = str(error)
    return said if said == found else f"validation: {said}; execution: {found}"


def quantized(model_name: str, **given: str) -> object:
    values = {"model_name": model_name, "method": "rtn", "rotation": "auto", "name": "out", **given}
    said = QUANTIZE.validate_inputs(**values)
    return QUANTIZE.execute(**values) if said is True else said


def failing(owner: object, name: str, error: OSError, use: object) -> object:
    """`use` while a function of the system fails; nothing is left behind."""

    def fail(*_: object, **__: object) -> None:
        raise error

    own = getattr(owner, name)
    setattr(owner, name, fail)
    try:
        return use()
    except (ValueError, RuntimeError) as caught:
        left = [name for name in os.listdir(MODELS) if ".tmp-" in name or name == OUT.name]
        return f"{caught}, left behind: {left}" if left else str(caught)
    finally:
        setattr(owner, name, own)


def interrupted() -> str:
    """The host's own interruption while a copy is written."""
    comfy.model_management.interrupt_current_processing()
    try:
        quantized("good/")
    except comfy.model_management.InterruptProcessingException:
        return "interrupted" if not OUT.exists() and not list(MODELS.glob(".*")) else "left behind"
    return "not interrupted"


def comparing_interrupted() -> str:
    """The host's own interruption, pressed after the first frame of three."""
    told, clip = [], torch.zeros(3, 16, 16, 3)

    def hook(done: int, total: int, *_: object, **__: object) -> None:
        told.append((done, total))
        comfy.model_management.interrupt_current_processing()

    comfy.utils.set_progress_bar_global_hook(hook)
    try:
        COMPARE.execute(clip, clip)
    except comfy.model_management.InterruptProcessingException:
        return f"interrupted after {told}"
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    return "not interrupted"


def predictor(name: str, text: str) -> str:
    (FOLDER / "sixbit_predictors").mkdir(exist_ok=True)
    (FOLDER / "sixbit_predictors" / name).write_text(text)
    return name


def loras() -> None:
    (FOLDER / "loras").mkdir()
    (FOLDER / "loras" / "random.safetensors").write_bytes(bytes(range(97, 256)) * 9)
    save_file({"a\nb\x1b[31m": torch.ones(1)}, FOLDER / "loras" / "odd.safetensors")


def latent() -> dict:
    return {"samples": torch.zeros(1, 4, 3, 8, 12)}


def calibrated(model: object, name: str) -> object:
    said = CALIBRATE.validate_inputs(name, "a dog")
    if said is not True:
        return said
    return CALIBRATE.execute(model, None, latent(), "a dog", 4, 6.0, "euler", "simple", 0, name)


def whole_file_of_another(name: str) -> str:
    state = load_file(MODELS / "good" / "transformer" / "diffusion_pytorch_model.safetensors")
    save_file({**state, "proj_out.bias": torch.zeros(3)}, MODELS / name)
    return name


loras()
QUANTIZED = LOAD.execute("good/", "6-bit").args[0]
full = OSError(errno.ENOSPC, "No space left on device")
denied = PermissionError(errno.EACCES, "Permission denied")
random = bytes(range(97, 256)) * 9
CONFIG = "transformer/config.json"
sample = lambda **told: json.dumps({**json.loads((MODELS / "good" / CONFIG).read_text()), **told})  # noqa: E731
ROWS = {
    "the reference is left out": (lambda: REFERENCE.execute(), "copy the folder reference/pipeline of the"),
    "the reference by name": (lambda: checked("bundled reference"), "copy the folder reference/pipeline"),
    "the reference to quantize": (lambda: quantized("bundled reference"), "copy the folder reference/pip"),
    "random bytes": (lambda: checked(write("random.safetensors", random)), "is not a safetensors file"),
    "nothing": (lambda: checked(write("empty.safetensors", b"")), "is not a safetensors file"),
    "a pickle": (lambda: checked(write("p.safetensors", b"\x80\x04." + random)), "is not a safetensors file"),
    "a header of 2^63": (lambda: checked(write("h.safetensors", b"\0" * 7 + b"\x80{}")), "is not a safetens"),
    "another shape": (lambda: checked(whole_file_of_another("other.safetensors")), "proj_out.bias is [3]"),
    "a folder up": (lambda: checked("../secret.safetensors"), "there is no model ../secret.safetensors"),
    "an absolute path": (lambda: checked("/etc/passwd"), "there is no model /etc/passwd"),
    "a long name": (lambda: checked(f"{LONG}.safetensors"), "there is no model"),
    "a zero": (lambda: checked("a\0b"), "there is no model"),
    "a name of two lines": (lambda: checked("a\nb\x1b[31m"), "there is no model"),
    "configuration half": (lambda: checked(damage("a", CONFIG, "{")), "config.json is no readable JSON"),
    "configuration deep": (lambda: checked(damage("b", CONFIG, "[" * 100_000)), "is no readable JSON"),
    "a width in words": (lambda: checked(damage("c", CONFIG, sample(sample_width="x"))), "sample_width 'x'"),
    "a length of 0": (lambda: checked(damage("d", CONFIG, sample(sample_frames=0))), "sample_frames 0"),
    "a NaN scale": (
        lambda: checked(damage("e", CONFIG, sample(spatial_interpolation_scale=float("nan")))),
        "spatial_interpolation_scale nan",
    ),
    "scheduler half": (
        lambda: checked(damage("f", "scheduler/scheduler_config.json", "{")),
        "scheduler_config.json is no readable JSON",
    ),
    "scheduler in words": (
        lambda: checked(damage("g", "scheduler/scheduler_config.json", '{"snr_shift_scale": "x"}')),
        "says snr_shift_scale 'x'",
    ),
    "VAE infinite": (
        lambda: checked(damage("h", "vae/config.json", '{"scaling_factor": Infinity}')),
        "says scaling_factor inf",
    ),
    "a copy that is none": (
        lambda: (write("good-6bit.safetensors", random), LOAD.execute("good/", "auto"))[1],
        "good-6bit.safetensors is not a safetensors file",
    ),
    "quantizing to a folder up": (lambda: quantized("good/", name="../out"), "name must be that of a file"),
    "quantizing to a long name": (lambda: quantized("good/", name=LONG), "name must be that of a file"),
    "quantizing to two lines": (lambda: quantized("good/", name="a\nb"), "name must be that of a file"),
    "quantizing by gptq": (lambda: quantized("good/", method="gptq"), "gptq"),
    "quantizing a copy": (lambda: quantized("six.safetensors"), "is quantized already"),
    "quantizing onto another": (lambda: quantized("good/", name="random"), "is not a safetensors file"),
    "disk full at the end": (
        lambda: failing(os, "fsync", full, lambda: quantized("good/")),
        "cannot write",
    ),
    "disk full at renaming": (lambda: failing(os, "replace", full, lambda: quantized("good/")), "No space"),
    "a folder that is read only": (
        lambda: failing(Path, "iterdir", denied, lambda: quantized("good/")),
        "out.safetensors: Permission denied",
    ),
    "interrupted": (interrupted, "interrupted"),
    "comparing is interrupted": (comparing_interrupted, "interrupted after [(1, 3)]"),
    "a LoRA of random bytes": (lambda: LORA.validate_inputs("random.safetensors"), "not a safetensors file"),
    "a LoRA with no name": (lambda: LORA.validate_inputs("../a\0b"), "there is no LoRA"),
    "a LoRA of odd keys": (lambda: LORA.execute(QUANTIZED, "odd.safetensors"), "holds no low-rank pair"),
    "a predictor half": (
        lambda: DMPQ.execute(QUANTIZED, "balanced", predictor("half.json", "{")),
        "predictor file",
    ),
    "a predictor deep": (
        lambda: DMPQ.execute(QUANTIZED, "balanced", predictor("deep.json", "[" * 100_000)),
        "cannot be used",
    ),
    "a predictor elsewhere": (
        lambda: DMPQ.execute(QUANTIZED, "balanced", "../../secret.json"),
        "name must be that of a file, without a folder",
    ),
    "calibrating to a folder up": (lambda: calibrated(QUANTIZED, "../p"), "name must be that of a file"),
    "calibrating onto another file": (lambda: calibrated(QUANTIZED, "half"), "half.json is taken"),
    "calibrating 16-bit weights": (
        lambda: calibrated(LOAD.execute("good/", "as stored").args[0], "p"),
        "needs 6-bit weights",
    ),
}


def said(use: object) -> str:
    """What a use is answered with; an exception that no person is meant to read has its type before it."""
    try:
        found = use()
    except (ValueError, RuntimeError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found if isinstance(found, str) else "no error"


async def registered() -> list[str]:
    extension = await sys.modules[load_pack()].comfy_entrypoint()
    return [node.GET_SCHEMA().node_id for node in await extension.get_node_list()]


shutil.move(MODELS / "good-6bit.safetensors", MODELS / "six.safetensors")
predictor(".half.tmp-1.json", "{")
listed = [
    *pack("nodes.files").list_models([MODELS]),
    *pack("nodes.predictors").list_predictors(FOLDER / "sixbit_predictors"),
]
with torch.inference_mode():
    rows = [(name, said(use), words) for name, (use, words) in ROWS.items()]
answer(rows=rows, nodes=asyncio.run(registered()), listed=listed)
