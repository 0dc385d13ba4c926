"""Quantize a CogVideoX checkpoint to NVFP4, one tensor at a time, in memory or into a file.

Block Linears and adaLN Linears become NVFP4. Block Linears are stored rotated by the block
Hadamard that their INT8 activations need; adaLN Linears read one row and are never rotated.
What those read at every timestep is known, so that but for "rtn" they are always rounded by
their inputs. Of what block Linears read the second moments follow, which "search" rounds them by
(docs/method.md has what both gain).
All else is copied in its precision; float32 goes to the precision the family was published in.
A file for a stock host keeps one adaLN Linear in 16 bits: that host reads the width of the time
embedding off its shape, and takes the packed one for it.
"""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from . import VERSION
from .checkpoint import Checkpoint, CheckpointError, open_checkpoint
from .families import ModelFamily
from .input_moments import linear_moments
from .provenance import source_licence, source_name
from .quantize_weight import GPTQ, QuantizeConfig, output_errors, quantize_group, quantize_linear
from .quantized import QuantizedWeight, file_entries
from .safetensors_file import StreamWriter
from .time_embedding import time_inputs

__all__ = [
    "QuantizeConfig",
    "QuantizeSummary",
    "quantize_checkpoint",
    "quantize_group",
    "quantize_linear",
    "quantize_tensors",
]

_READ_BY_THE_HOST = "0.norm1.linear"  # its shape is how a stock host knows the model
Progress = Callable[[int, int, str], None]  # (source bytes done, in all, what was just done)


@dataclass(frozen=True)
class QuantizeSummary:
    """What `quantize_checkpoint` did.

    Attributes:
        target: the file written.
        family: of the model.
        layers, rotated: quantized layers, and how many of them are rotated.
        source_bytes, target_bytes: tensor bytes of the source, size of the file.
        seconds: wall time.
    """

    target: Path
    family: str
    layers: int
    rotated: int
    source_bytes: int
    target_bytes: int
    seconds: float


def quantize_checkpoint(
    source: str | Path,
    target: str | Path,
    config: QuantizeConfig,
    progress: Progress | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
    errors: dict[str, float] | None = None,
) -> QuantizeSummary:
    """Write a quantized copy of a checkpoint as one safetensors file in ComfyUI's layout, native names.

    Holds one group of layers in memory at a time. The target appears when it is complete;
    an error or an interruption leaves what was there before.

    Args:
        source: what `open_checkpoint` takes.
        target: a path ending in .safetensors, in an existing folder.
        progress: called after each layer or tensor.
        inputs, device, errors: as in `quantize_tensors`.

    Raises:
        CheckpointError: one line that says what is wrong with source, target or disk.
    """
    begin = time.monotonic()
    source, target = Path(source), Path(target)
    try:
        _check_target(source, target, config)
    except (OSError, RuntimeError) as error:  # a name too long, links in a circle
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write {target}: {reason}; choose another place or name") from error
    checkpoint = open_checkpoint(source)
    check_plain(checkpoint)
    entries = planned_entries(checkpoint, config.compatible)
    writer = StreamWriter(target, entries, _metadata(checkpoint, config), config.force)
    free = shutil.disk_usage(target.parent).free
    if free < writer.nbytes:
        raise CheckpointError(
            f"{target.parent} has {free / 1e9:.2f} GB free, {writer.nbytes / 1e9:.2f} GB are needed; "
            "free some space or choose another folder"
        )
    total, done, layers, rotated = checkpoint.nbytes, 0, 0, 0
    with writer:
        for name, item in quantize_tensors(checkpoint, config, inputs, device, errors):
            if isinstance(item, QuantizedWeight):
                layers, rotated = layers + 1, rotated + item.rotated
                done += checkpoint.infos[f"{name}.weight"].nbytes
                for key, tensor in item.state_dict(name).items():
                    writer.write(key, tensor)
            else:
                done += checkpoint.infos[name].nbytes
                writer.write(name, item)
            if progress is not None:
                progress(done, total, name)
    seconds = time.monotonic() - begin
    return QuantizeSummary(
        target, checkpoint.family.name, layers, rotated, checkpoint.nbytes, writer.nbytes, seconds
    )


def _check_target(source: Path, target: Path, config: QuantizeConfig) -> None:
    if target.suffix != ".safetensors":
        raise CheckpointError(f"{target} must end in .safetensors; give it that ending")
    if target.parent.exists() and not target.parent.is_dir():
        raise CheckpointError(
            f"{target.parent} is a file, not a folder; choose another place for {target.name}"
        )
    if not target.parent.is_dir():
        raise CheckpointError(f"the folder {target.parent} does not exist; create it first")
    if target.is_dir():
        raise CheckpointError(f"{target} is a folder; give a file name in it")
    held = target.resolve()
    if source.exists() and held in {source.resolve(), *(p.resolve() for p in _weight_files(source))}:
        raise CheckpointError(f"{target} is the source itself or part of its pipeline; choose another name")
    if target.exists() and not config.force:
        raise CheckpointError(f"{target} exists; choose another name, or replace it with --force")


def _weight_files(source: Path) -> list[Path]:
    """What is read as the source, and what stands with it in a pipeline's folder."""
    folder = source if source.is_dir() else source.parent
    pipeline = next((f for f in (folder, folder.parent) if (f / "model_index.json").is_file()), None)
    files = [*pipeline.glob("*/*.safetensors")] if pipeline else []
    if source.is_file() and not source.name.endswith(".index.json"):
        return [source, *files]
    return [*folder.glob("*.safetensors"), *folder.glob("transformer/*.safetensors"), *files]


def _metadata(checkpoint: Checkpoint, config: QuantizeConfig) -> dict[str, str]:
    return {
        "format": "pt",
        "sixbit_source": source_name(checkpoint),
        "sixbit_fingerprint": checkpoint.fingerprint,
        "sixbit_licence": source_licence(checkpoint),
        "sixbit_method": config.method,
        "sixbit_version": VERSION,
        "sixbit_family": checkpoint.family.name,
        "sixbit_config": config_json(checkpoint),
    }


def planned_entries(
    checkpoint: Checkpoint, compatible: bool = False
) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Names, types and shapes of the quantized copy's tensors, in the order they are written.

    Args:
        compatible: as in `QuantizeConfig`.

    Raises:
        CheckpointError: a layer whose size NVFP4 cannot take.
    """
    entries: list[tuple[str, torch.dtype, tuple[int, ...]]] = []
    try:
        for layers, _ in layer_groups(checkpoint.family, compatible):
            for layer in layers:
                entries += file_entries(layer, *checkpoint.shapes[f"{layer}.weight"])
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {error}") from error
    for name in copied_names(checkpoint, compatible):
        entries.append((name, copied_dtype(checkpoint, name), checkpoint.shapes[name]))
    return entries


def layer_groups(family: ModelFamily, compatible: bool = False) -> Iterator[tuple[tuple[str, ...], bool]]:
    """Layers to quantize, in order: those that share a global scale together, and whether of a block."""
    for n in range(family.layers):
        block = f"{family.blocks}.{n}"
        yield tuple(f"{block}.{kind}" for kind in family.shared_input), True
        for kind in family.linears:
            if kind not in family.shared_input:
                yield (f"{block}.{kind}",), True
    for layer in family.modulation_layers():
        if not (compatible and layer == f"{family.blocks}.{_READ_BY_THE_HOST}"):
            yield (layer,), False


def copied_names(checkpoint: Checkpoint, compatible: bool = False) -> tuple[str, ...]:
    """Tensors that are copied, not quantized, in order."""
    groups = layer_groups(checkpoint.family, compatible)
    quantized = {f"{layer}.weight" for layers, _ in groups for layer in layers}
    return tuple(name for name in checkpoint.shapes if name not in quantized)


def copied_dtype(checkpoint: Checkpoint, name: str) -> torch.dtype:
    """Type that a tensor is copied in: its own, float32 in the family's published precision."""
    dtype = checkpoint.dtype(name)
    return getattr(torch, checkpoint.family.native_dtype) if dtype == torch.float32 else dtype


def quantize_tensors(
    checkpoint: Checkpoint,
    config: QuantizeConfig,
    inputs: Mapping[str, torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
    errors: dict[str, float] | None = None,
) -> Iterator[tuple[str, QuantizedWeight | torch.Tensor]]:
    """Quantize a checkpoint in memory, one group of layers at a time.

    Args:
        checkpoint: an unquantized one.
        config: method and rotation.
        inputs: block layer -> (n, K) sample inputs, for rotation "auto" and "gptq"; the first layer's of a
            group.
        device: where the work is done and the result lies.
        errors: where to keep the output error of each layer whose inputs are known, on these inputs.

    Yields:
        (layer, QuantizedWeight) in the order of `layer_groups`, then (tensor name, tensor) copied.

    Raises:
        CheckpointError: already quantized, or a tensor of another type or with NaN or Inf.
    """
    check_plain(checkpoint)
    method = config.method if config.method == "rtn" else GPTQ
    by_time = replace(config, rotation="off", method=method, calibrated=True)
    embedded = time_inputs(checkpoint).to(device)
    for layers, in_block in layer_groups(checkpoint.family, config.compatible):
        weights = [checkpoint.finite(f"{layer}.weight", device) for layer in layers]
        samples = (inputs.get(layers[0]) if inputs else None) if in_block else embedded
        known = in_block and config.method == "search"
        moments = linear_moments(checkpoint, layers[0], embedded) if known else None
        try:
            group = quantize_group(weights, config if in_block else by_time, None, samples, moments)
        except ValueError as error:
            names = ", ".join(layers)
            raise CheckpointError(f"{checkpoint.path}: {names} cannot be quantized: {error}") from error
        if errors is not None and samples is not None:
            errors.update(zip(layers, output_errors(weights, group, samples), strict=True))
        del weights, samples, moments
        yield from zip(layers, group, strict=True)
    for name in copied_names(checkpoint, config.compatible):
        yield name, checkpoint.finite(name, device, copied_dtype(checkpoint, name))


def check_plain(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that cannot be a source; reads no tensor.

    Raises:
        CheckpointError: quantized already; `open_checkpoint` has refused any other type.
    """
    if checkpoint.is_quantized:
        raise CheckpointError(f"{checkpoint.path} is quantized already; give the original checkpoint")


def config_json(checkpoint: Checkpoint) -> str:
    """The diffusers configuration of a checkpoint, for the metadata of its quantized copy."""
    inferred = checkpoint.family.diffusers_config(checkpoint.shapes)
    return json.dumps({**inferred, **(checkpoint.config or {})}, sort_keys=True)
