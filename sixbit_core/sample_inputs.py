"""Sample inputs of the linears: what GPTQ rounds by, and what rotation "auto" is chosen by.

FOLDER/inputs.safetensors, kept by a calibration: native name of a block linear -> (n, K), in the type the
model computed in; of linears that share an input, the first only. Metadata: the model's fingerprint.
adaLN linears read nothing but the time embedding, which is computed from the checkpoint for every timestep.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.nn.functional import linear, silu

from .checkpoint import Checkpoint
from .safetensors_file import CheckpointError, StreamWriter, read_header, read_tensor

FILE_NAME = "inputs.safetensors"
TIMESTEPS = 1000  # that every CogVideoX is trained on
_OFS = 2.0  # the one value of the second embedding that image-to-video 1.5 is given
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
        self._embedded = time_inputs(checkpoint)
        self._modulation = tuple(checkpoint.family.modulation_layers())

    def __getitem__(self, layer: str) -> torch.Tensor:
        return self._embedded if layer in self._modulation else read_tensor(self._infos[layer])

    def __iter__(self) -> Iterator[str]:
        yield from (*self._infos, *self._modulation)

    def __len__(self) -> int:
        return len(self._infos) + len(self._modulation)


def write_inputs(folder: Path, inputs: Mapping[str, torch.Tensor], fingerprint: str) -> None:
    """Write (n, K) inputs by native linear name. CheckpointError where the disk refuses."""
    entries = [(name, rows.dtype, tuple(rows.shape)) for name, rows in inputs.items()]
    with StreamWriter(folder / FILE_NAME, entries, {_KEY: fingerprint}) as writer:
        for name, rows in inputs.items():
            writer.write(name, rows)


def time_inputs(checkpoint: Checkpoint) -> torch.Tensor:
    """What the adaLN linears read at each timestep, (1000, time_embed_dim) float32."""
    embedded = _embedded(checkpoint, "time_embedding", torch.arange(TIMESTEPS).float())
    if "ofs_embedding_linear_1.weight" in checkpoint.shapes:
        embedded = embedded + _embedded(checkpoint, "ofs_embedding", torch.tensor([_OFS]))
    return silu(embedded)


def _embedded(checkpoint: Checkpoint, name: str, values: torch.Tensor) -> torch.Tensor:
    """Cosines and sines of `values` (n,) through a two-layer perceptron of the checkpoint, (n, width)."""
    half = checkpoint.shapes[f"{name}_linear_1.weight"][1] // 2
    angles = values[:, None] * torch.exp(-math.log(10_000) * torch.arange(half) / half)
    x = torch.cat([angles.cos(), angles.sin()], dim=1)
    for layer in (f"{name}_linear_1", f"{name}_linear_2"):
        x = silu(x) if layer.endswith("2") else x
        x = linear(
            x, checkpoint.tensor(f"{layer}.weight").float(), checkpoint.tensor(f"{layer}.bias").float()
        )
    return x
