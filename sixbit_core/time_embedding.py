"""What adaLN linears read: the time embedding, which a checkpoint alone decides.

Every timestep's can be computed before anything runs, so that adaLN weights are rounded by their true inputs
(`gptq`) without a calibration.
"""

import math

import torch
from torch.nn.functional import linear, silu

from .checkpoint import Checkpoint

TIMESTEPS = 1000  # that every CogVideoX is trained on
_OFS = 2.0  # the one value of the second embedding that image-to-video 1.5 is given


def time_inputs(checkpoint: Checkpoint) -> torch.Tensor:
    """What the adaLN linears read at each timestep, (1000, time_embed_dim) float32.

    Raises:
        CheckpointError: a tensor of the embedding with NaN or Inf.
    """
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
        x = linear(x, *(checkpoint.finite(f"{layer}.{part}").float() for part in ("weight", "bias")))
    return x
