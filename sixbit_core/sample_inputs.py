"""Sample inputs of the linears: what GPTQ rounds by, and what rotation "auto" is chosen by.

FOLDER/inputs.safetensors, kept by a calibration: native name of a block linear -> (n, K), in the type the
model computed in; of linears that share an input, the first only. Metadata: the model's fingerprint. What
adaLN linears read needs no calibration (`time_embedding`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from .checkpoint import Checkpoint
from .safetensors_file import CheckpointError, StreamWriter, read_header, read_tensor

FILE_NAME = "inputs.safetensors"
_KEY = "sixbit_fingerprint"


class SampleInputs(Mapping[str, torch.Tensor]):
    """Native linear name -> (n, K) inputs, read when asked for.

    Raises:
        CheckpointError: no such file, or of other weights than the checkpoint's.
    """

    def __init__(self, folder: Path, checkpoint: Checkpoint) -> None:
        file = folder / FILE_NAME
        try:
            there = file.is_file()
        except OSError:  # a name too long
            there = False
        if not there:
            raise CheckpointError(f"{file} does not exist; `sixbit calibrate --inputs {folder}` writes it")
        self._infos, metadata = read_header(file)
        if metadata.get(_KEY) != checkpoint.fingerprint:
            raise CheckpointError(
                f"{file} is of other weights than the checkpoint; calibrate that checkpoint"
            )

    def __getitem__(self, layer: str) -> torch.Tensor:
        return read_tensor(self._infos[layer])

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)


def write_inputs(folder: Path, inputs: Mapping[str, torch.Tensor], fingerprint: str) -> None:
    """Write (n, K) inputs by native linear name. CheckpointError where the disk refuses."""
    entries = [(name, rows.dtype, tuple(rows.shape)) for name, rows in inputs.items()]
    with StreamWriter(folder / FILE_NAME, entries, {_KEY: fingerprint}) as writer:
        for name, rows in inputs.items():
            writer.write(name, rows)
