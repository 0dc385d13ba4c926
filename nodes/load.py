"""Node: a CogVideoX transformer, whatever file it comes in, as a MODEL that gives what diffusers gives."""

import logging
import shutil
from pathlib import Path

import comfy.utils
import folder_paths
from comfy_api.latest import io

from ..sixbit_core.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ..sixbit_core.quantize import QuantizeConfig, planned_entries, quantize_checkpoint
from .files import REFERENCE, find_model, list_models, quantized_copy
from .host_contract import load_or_plain
from .scales import scales_of

WEIGHTS = ("auto", "6-bit", "as stored")
_MINUTES_PER_GB = 1.2  # of a 16-bit source on two CPU cores, docs/checkpoints.md


def model_roots() -> list[Path]:
    """The host's folders of diffusion models."""
    return [
        Path(folder) for folder in folder_paths.get_folder_paths("diffusion_models") if Path(folder).is_dir()
    ]


class SixBitLoadCogVideoX(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitLoadCogVideoX",
            display_name="Load 6Bit CogVideoX",
            category="sixbit",
            description="Load a CogVideoX transformer, in 6-bit or in its own precision.",
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_models(model_roots()),
                    tooltip="A file or sharded folder of models/diffusion_models, or the bundled model.",
                ),
                io.Combo.Input(
                    "weights",
                    options=list(WEIGHTS),
                    default="auto",
                    tooltip="auto and 6-bit: NVFP4 weights; a 16-bit source is quantized once, beside it. "
                    "as stored: the file as it is.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def validate_inputs(cls, model_name: str, weights: str) -> bool | str:
        try:
            checkpoint = open_checkpoint(find_model(model_name, model_roots()))
            if weights == "6-bit" and not checkpoint.is_quantized and model_name != REFERENCE:
                _check_disk(checkpoint, quantized_copy(checkpoint.path))
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model_name: str, weights: str) -> str:
        try:
            path = find_model(model_name, model_roots())
        except ValueError:
            return model_name
        newest = max((p.stat().st_mtime_ns for p in path.rglob("*.safetensors")), default=0)
        return f"{path}:{newest if path.is_dir() else path.stat().st_mtime_ns}:{weights}"

    @classmethod
    def execute(cls, model_name: str, weights: str) -> io.NodeOutput:
        checkpoint = open_checkpoint(find_model(model_name, model_roots()))
        scales = scales_of(checkpoint)
        if model_name == REFERENCE:
            return io.NodeOutput(load_or_plain(checkpoint, scales, quantize=weights != "as stored"))
        if weights != "as stored" and not checkpoint.is_quantized:
            checkpoint = _quantized_once(checkpoint)
        return io.NodeOutput(load_or_plain(checkpoint, scales, quantize=False))


def _quantized_once(checkpoint: Checkpoint) -> Checkpoint:
    """The 6-bit copy beside a checkpoint, made now if there is none of these weights."""
    target = quantized_copy(checkpoint.path)
    if target.is_file():
        copy = open_checkpoint(target)
        if copy.fingerprint == checkpoint.fingerprint:
            return copy
        raise CheckpointError(
            f"{target.name} is a 6-bit copy of other weights than {checkpoint.path.name}; move or delete it"
        )
    needed = _check_disk(checkpoint, target)
    minutes = max(1, round(checkpoint.nbytes / 1e9 * _MINUTES_PER_GB))
    logging.info(
        f"6Bit: quantizing {checkpoint.path.name} once, into {target.name}: {needed / 1e9:.1f} GB of disk, "
        f"about {minutes} min on two CPU cores; the next load takes it from there"
    )
    bar = comfy.utils.ProgressBar(checkpoint.nbytes)
    quantize_checkpoint(
        checkpoint.path, target, QuantizeConfig(), lambda done, total, name: bar.update_absolute(done, total)
    )
    return open_checkpoint(target)


def _check_disk(checkpoint: Checkpoint, target: Path) -> int:
    """Bytes that the 6-bit copy takes. Raises CheckpointError where the disk lacks them."""
    if target.is_file():
        return 0
    entries = planned_entries(checkpoint)
    needed = sum(dtype.itemsize * _count(shape) for _, dtype, shape in entries)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"the 6-bit copy of {checkpoint.path.name} takes {needed / 1e9:.1f} GB, {target.parent} has "
            f"{free / 1e9:.1f} GB free; free some space"
        )
    return needed


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count
