"""The type that a checkpoint's weights are in, and whether its model can run in it."""

import torch

from ..sixbit_core.checkpoint import Checkpoint, CheckpointError

_PLAIN = {torch.float32, torch.float16, torch.bfloat16}


def float_type(checkpoint: Checkpoint) -> torch.dtype:
    """Type of most of the values that are not quantized."""
    counts: dict[torch.dtype, int] = {}
    for info in checkpoint.infos.values():
        if info.dtype in _PLAIN:
            counts[info.dtype] = counts.get(info.dtype, 0) + info.nbytes // info.dtype.itemsize
    return max(counts, key=counts.__getitem__) if counts else torch.bfloat16


def check_precision(checkpoint: Checkpoint) -> None:
    """Refuse weights that their model cannot run in; reads no tensor.

    Raises:
        CheckpointError: float16 of a model that was published in bfloat16.
    """
    if float_type(checkpoint) == torch.float16 and checkpoint.family.native_dtype != "float16":
        raise CheckpointError(
            f"{checkpoint.path.name}: {checkpoint.family.label} overflows in float16 and gives a black clip; "
            "use its bfloat16 weights"
        )
