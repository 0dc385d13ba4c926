"""6-bit copies of checkpoints on disk. What one will take is said before it is written."""

import logging
import math
import shutil
import time
from pathlib import Path

import comfy.model_management
import comfy.utils
import folder_paths
import torch

from ..sixbit_core.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ..sixbit_core.input_moments import linear_moments
from ..sixbit_core.quantize import QuantizeConfig, planned_entries, quantize_checkpoint, quantize_group
from ..sixbit_core.quantized import ROTATED_FORMAT
from ..sixbit_core.time_embedding import time_inputs
from .files import quantized_copy

_TRIED_ROWS = 256  # of one layer, quantized to time this machine


def model_roots() -> list[Path]:
    """The host's folders of diffusion models."""
    return [
        Path(folder) for folder in folder_paths.get_folder_paths("diffusion_models") if Path(folder).is_dir()
    ]


def quantized_once(checkpoint: Checkpoint) -> Checkpoint:
    """The 6-bit copy beside a 16-bit checkpoint, made now if there is none of these weights.

    Raises:
        CheckpointError: what stands there is a copy of other weights, or the disk is full or read-only.
    """
    target = quantized_copy(checkpoint.path)
    if not target.exists():
        return write_copy(checkpoint, target, QuantizeConfig())
    copy = open_checkpoint(target)
    if not copy.is_quantized or copy.fingerprint != checkpoint.fingerprint:
        raise CheckpointError(f"{target.name} is no 6-bit copy of {checkpoint.path.name}; move or delete it")
    logging.info(f"6Bit: {target.name} is the 6-bit copy of {checkpoint.path.name} and is taken")
    return copy


def write_copy(checkpoint: Checkpoint, target: Path, config: QuantizeConfig) -> Checkpoint:
    """Write a quantized copy, with the host's progress bar, and open it.

    Raises:
        CheckpointError: the source cannot be quantized, or the disk is full or read-only.
    """
    needed, device = check_disk(checkpoint, target, config.compatible), _device()
    minutes = _minutes(checkpoint, config, device)
    logging.info(
        f"6Bit: quantizing {checkpoint.path.name} into {target.name}: {needed / 1e9:.2f} GB of disk, "
        f"{'less than a minute' if minutes < 1 else f'about {minutes:.0f} min'} on {device}"
    )
    bar = comfy.utils.ProgressBar(checkpoint.nbytes)

    def progress(done: int, total: int, name: str) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update_absolute(done, total)

    quantize_checkpoint(checkpoint.path, target, config, progress, device=device)
    return open_checkpoint(target)


def is_copy(target: Path, checkpoint: Checkpoint, config: QuantizeConfig) -> bool:
    """Whether `target` is what `write_copy` would write."""
    copy = open_checkpoint(target)
    rotated = any(mark["format"] == ROTATED_FORMAT for mark in copy.formats.values())
    return (
        copy.is_quantized
        and copy.fingerprint == checkpoint.fingerprint
        and copy.metadata.get("sixbit_method") == config.method
        and rotated == config.rotates
    )


def check_disk(checkpoint: Checkpoint, target: Path, compatible: bool = False) -> int:
    """Bytes that the copy takes; `compatible` as in `QuantizeConfig`.

    Raises:
        CheckpointError: where the disk lacks them.
    """
    entries = planned_entries(checkpoint, compatible)
    needed = sum(dtype.itemsize * math.prod(shape) for _, dtype, shape in entries)
    free = shutil.disk_usage(target.parent).free
    if free < needed:
        raise CheckpointError(
            f"the 6-bit copy of {checkpoint.path.name} takes {needed / 1e9:.2f} GB, {target.parent} has "
            f"{free / 1e9:.2f} GB free; free some space"
        )
    return needed


def _device() -> torch.device:
    device = comfy.model_management.get_torch_device()
    return device if device.type == "cuda" else torch.device("cpu")


def _minutes(checkpoint: Checkpoint, config: QuantizeConfig, device: torch.device) -> float:
    """How long the copy will take: some rows of one layer are quantized and timed, the second time round."""
    layer = checkpoint.family.block_layers()[0]
    rows = checkpoint.tensor(f"{layer}.weight")[:_TRIED_ROWS].to(device)
    known = config.method == "search"
    moments = linear_moments(checkpoint, layer, time_inputs(checkpoint).to(device)) if known else None
    for _ in range(2):  # the first may compile
        begin = time.perf_counter()
        quantize_group([rows], config, moments=moments)[0].global_scale.item()
        seconds = time.perf_counter() - begin
    values = sum(math.prod(shape) for shape in checkpoint.shapes.values())
    return seconds * values / rows.numel() / 60
