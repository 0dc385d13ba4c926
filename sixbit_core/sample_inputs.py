"""Sample inputs of the block linears, kept by a calibration for `quantize_checkpoint`'s rotation "auto".

FOLDER/inputs.safetensors: native linear name -> (n, K), in the type the model computed in; of linears
share an input, the first only. Metadata: the model's fingerprint.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from .safetensors_file import CheckpointError, StreamWriter, read_header, read_tensor

FILE_NAME = "inputs.safetensors"
_KEY = "sixbit_fingerprint"


def write_inputs(folder: Path, inputs: Mapping[str, torch.Tensor], fingerprint: str) -> None:
    """Write (n, K) inputs by native linear name. CheckpointError where the disk refuses."""
    entries = [(name, rows.dtype, tuple(rows.shape)) for name, rows in inputs.items()]
    with StreamWriter(folder / FILE_NAME, entries, {_KEY: fingerprint}) as writer:
        for name, rows in inputs.items():
            writer.write(name, rows)


def read_inputs(folder: Path, fingerprint: str) -> dict[str, torch.Tensor]:
    """What `write_inputs` wrote for a model. CheckpointError if it is not there, or of another model."""
    file = folder / FILE_NAME
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; `sixbit calibrate --inputs {folder}` writes it")
    infos, metadata = read_header(file)
    if metadata.get(_KEY) != fingerprint:
        raise CheckpointError(f"{file} is of other weights than the checkpoint; calibrate that checkpoint")
    return {name: read_tensor(info) for name, info in infos.items()}
