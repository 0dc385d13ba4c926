"""Calibrations by the node; every check of `test_calibrate` is one entry of the answer."""

from boot import ARGUMENTS, answer, pack  # isort: split

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import comfy.model_management
import comfy.utils
import folder_paths
import torch

import nodes

FOLDER = Path(ARGUMENTS["folder"])
folder_paths.folder_names_and_paths["diffusion_models"] = ([str(FOLDER)], {".safetensors"})
folder_paths.models_dir = str(FOLDER / "models")
PREDICTORS = FOLDER / "models" / "sixbit_predictors"
LOAD = pack("nodes.load").SixBitLoadCogVideoX
pack("nodes.calibration").BITS = (6.0,)  # for time, as is the next
pack("nodes.calibration")._SOLVING_PROMPTS = 1
CALIBRATE = pack("nodes.calibrate").SixBitCalibratePredictor
DMPQ = pack("nodes.dmpq").SixBitApplyDMPQ
TDC = pack("nodes.delta_cache").SixBitTemporalDeltaCache
BRIDGE = pack("nodes.bridge")
LOAD_PREDICTOR = pack("sixbit_core.predictor").load_predictor
LINES: list[str] = []
CHECKS: dict[str, Callable[[], object]] = {}
STEPS = 5
PROMPTS = "one\n\n  seven  \n"


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def encoded(text: str) -> list:
    generator = torch.Generator().manual_seed(len(text))
    return [[torch.randn((1, 16, 32), generator=generator), {}]]


CLIP = SimpleNamespace(tokenize=lambda text: text, encode_from_tokens_scheduled=encoded)
LATENT = {"samples": torch.zeros(1, 4, 3, 8, 12)}


def load(name: str = "tiny/", weights: str = "6-bit") -> object:
    return LOAD.execute(name, weights).args[0]


def calibrate(model: object, name: str = "mine", prompts: str = PROMPTS) -> tuple:
    return CALIBRATE.execute(model, CLIP, LATENT, prompts, STEPS, 6.0, "euler", "simple", 3, name).args


def clean(model: object) -> bool:
    return not any("forward" in module.__dict__ for module in model.model.diffusion_model.modules())


@check
def predictor_is_what_dmpq_finds_and_runs_by() -> list[str]:
    bad, updates = [], []
    model = load()
    comfy.utils.set_progress_bar_global_hook(lambda value, total, *_, **__: updates.append(value / total))
    LINES.clear()
    name, picture = calibrate(model)
    comfy.utils.set_progress_bar_global_hook(None)
    said = [line for line in LINES if line.startswith("6Bit: calibration takes about") or "measured" in line]
    if "takes about 1 min" not in said[0] or "2 clips are measured" not in said[0] or len(said) != 3:
        bad.append(f"said {said}")
    if updates != sorted(updates) or updates[-1] != 1 or len(updates) < 3:
        bad.append(f"progress {updates}")
    if name != "mine.json" or name not in DMPQ.GET_SCHEMA().inputs[2].options:
        bad.append(f"{name} is not in the list")
    if picture.ndim != 4 or picture.shape[-1] != 3 or not picture.std() > 0.05:
        bad.append(f"picture {tuple(picture.shape)}")
    predictor = LOAD_PREDICTOR(PREDICTORS / name)
    if predictor.fingerprint != BRIDGE.facts_of(model).checkpoint.fingerprint:
        bad.append("fingerprint")
    told = {
        "steps": STEPS,
        "scheduler": "euler simple",
        "cfg": 6.0,
        "size": [64, 96],
        "frames": 9,
        "seed": 3,
        "prompts": 2,
    }
    if dict(predictor.calibration) != told:
        bad.append(f"calibration {predictor.calibration}")
    if not all(fit.error_nvfp4 > fit.error_int8 > 0 for fit in predictor.linears.values()):
        bad.append("errors")
    routed = DMPQ.execute(model, "balanced", predictor=name, router="gamma", compute="emulate").args[0]
    nodes.common_ksampler(routed, 3, STEPS, 6.0, "euler", "simple", encoded("one"), encoded(""), LATENT)
    bits = BRIDGE.settings_of(routed).journal.last.report.average_activation_bits
    if not abs(bits - 6) < 0.3:
        bad.append(f"{bits} bits")
    return bad


@check
def same_request_gives_the_same_file() -> list[str]:
    first, model, bad = (PREDICTORS / "mine.json").read_bytes(), load(), []
    settled = TDC.execute(DMPQ.execute(model, "quality").args[0], "balanced", threshold=0.9).args[0]
    calibrate(settled)  # over the file that is there
    if (PREDICTORS / "mine.json").read_bytes() != first:
        bad.append("it differs")
    if BRIDGE.settings_of(settled).journal.last is not None or not clean(model):
        bad.append("the model was touched")
    return bad


@check
def sixteen_bit_source_at_hand_gives_the_papers_error_too() -> list[str]:
    checkpoint = pack("sixbit_core.checkpoint").open_checkpoint(FOLDER / "tiny")
    scales = pack("nodes.scales").scales_of(checkpoint)
    model = pack("nodes.loading").load_checkpoint(checkpoint, scales, quantize=True)
    calibrate(model, "paper", prompts="one")
    predictor = LOAD_PREDICTOR(PREDICTORS / "paper.json")
    DMPQ.execute(model, "paper", predictor="paper.json")
    without = [name for name, fit in predictor.linears.items() if fit.paper is None]
    return without + sorted({key for row in predictor.theta.values() for key in row})


@check
def interrupting_leaves_nothing() -> list[str]:
    model, bad, calls = load(), [], [0]
    before = sorted(path.name for path in PREDICTORS.iterdir())

    def stop(value: int, total: int, *_: object, **__: object) -> None:
        calls[0] += 1
        if value > total // 30:
            raise comfy.model_management.InterruptProcessingException()

    comfy.utils.set_progress_bar_global_hook(stop)
    try:
        calibrate(model, "interrupted")
        bad.append("not interrupted")
    except comfy.model_management.InterruptProcessingException:
        pass
    finally:
        comfy.utils.set_progress_bar_global_hook(None)
    if sorted(path.name for path in PREDICTORS.iterdir()) != before or not clean(model):
        bad.append("something is left")
    return bad


@check
def wrong_use_is_one_line() -> list[object]:
    said: list[object] = [
        CALIBRATE.validate_inputs("../up", "one"),
        CALIBRATE.validate_inputs("fine", " \n "),
    ]
    (PREDICTORS / "taken.json").write_text(
        (PREDICTORS / "mine.json").read_text().replace('"fingerprint": "', '"fingerprint": "0')
    )
    for model, name in ((load(weights="as stored"), "fine"), (load("image/"), "fine"), (load(), "taken")):
        try:
            calibrate(model, name)
            said.append("no error")
        except ValueError as error:
            said.append(str(error))
    return said


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
    answer(results=results)


with torch.inference_mode():
    main()
