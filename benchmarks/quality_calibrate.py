"""Part `calibrate` of `quality.py`: what the other parts of a model need, into its work folder.

predictor.json       of the model, as `sixbit calibrate --bits 6` makes it
inputs.safetensors   sample inputs of its linears
gptq.safetensors     its weights, rounded by them
teacache.json        TeaCache's polynomial, fitted to one full-precision run
"""

import hashlib
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from sixbit_diffusion.engine.calibrate import CalibrateRequest, calibrate
from sixbit_diffusion.engine.facts import REFERENCE, read_facts, reference_folder
from sixbit_diffusion.engine.files import write_json
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import load_model
from sixbit_diffusion.engine.prompts import Prompt
from sixbit_diffusion.engine.sample import ClipSpec
from sixbit_diffusion.engine.trajectory import record
from sixbit_diffusion.engine.transformer import FULL
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint
from sixbit_diffusion.sixbit_core.sample_inputs import FILE_NAME, SampleInputs
from step_caches import fit_teacache

GPTQ_FILE, TEACACHE_FILE, PREDICTOR_FILE = "gptq.safetensors", "teacache.json", "predictor.json"


def calibrate_model(given: Namespace, prompts: Sequence[Prompt]) -> None:
    """Write the four files of a model.

    Args:
        given: `model`, `steps`, `bits`, `device` and `work` of the command line.
        prompts: captions that no method is measured on.
    """
    given.work.mkdir(parents=True, exist_ok=True)
    captions = given.work / "captions.txt"
    captions.write_text("".join(f"{prompt.text}\n" for prompt in prompts), encoding="utf-8")
    machine, facts = find_machine(given.device), read_facts(given.model)
    model = load_model(given.model, None, FULL, machine, facts=facts)
    clip = ClipSpec(prompts[0].text, facts.size, facts.frames, steps=given.steps, seed=0)
    coefficients = fit_teacache(model.use(FULL), [record(model, clip)])
    write_json(given.work / TEACACHE_FILE, coefficients)
    del model
    request = CalibrateRequest(
        given.model,
        given.work / PREDICTOR_FILE,
        prompts=str(captions),
        steps=given.steps,
        bits=(given.bits,),
        inputs=given.work,
        device=given.device,
    )
    calibrate(request, say=lambda line: print(line, flush=True))
    source = reference_folder() if given.model == REFERENCE else Path(given.model)
    config = QuantizeConfig(method="gptq", calibrated=True, force=True)
    inputs = SampleInputs(given.work, facts.checkpoint)
    made = quantize_checkpoint(source, given.work / GPTQ_FILE, config, inputs=inputs, device=machine.device)
    print(f"{made.target}: {made.layers} layers in {made.seconds:.0f} s", flush=True)


def is_calibrated(work: Path) -> bool:
    """Whether all four files are there."""
    return all((work / name).is_file() for name in (PREDICTOR_FILE, FILE_NAME, TEACACHE_FILE, GPTQ_FILE))


def digest_files(work: Path) -> str:
    """Equal for equal files of a calibration, the predictor aside; those that are not there do not count."""
    found = {}
    for name in (GPTQ_FILE, FILE_NAME, TEACACHE_FILE):
        if (work / name).is_file():
            digest = hashlib.sha256()
            with (work / name).open("rb") as file:
                while chunk := file.read(1 << 20):
                    digest.update(chunk)
            found[name] = digest.hexdigest()
    return repr(found)
