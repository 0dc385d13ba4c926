"""What this machine is about to do, in one line before sampling."""

import torch

from ..kernels import backend_line
from ..sixbit_core.config import DeltaCacheConfig
from ..sixbit_core.delta_cache import bytes_needed

_TEXT_TOKENS = 226


def status_line(
    router: str | None,
    cache: DeltaCacheConfig | None,
    tokens: int,
    width: int,
    blocks: int,
    streams: int,
    dtype: torch.dtype,
    weight_bytes: int,
    free_bytes: int,
) -> str:
    """Formats, memory and kernels of the coming run.

    Args:
        router: of the activations; None where linears are left alone.
        tokens: video tokens of one clip; `width`, their channels.
        streams: conditionings times clips.
        dtype: the model computes in.
        free_bytes: on the device that computes.
    """
    words = ["activations as they come" if router is None else f"router {router}"]
    words.append(f"weights {_size(weight_bytes)}")
    if cache is not None:
        held = bytes_needed(cache.location, tokens + _TEXT_TOKENS, width, blocks, streams, dtype)
        words.append(f"delta cache up to {_size(held)} ({cache.location})")
    words.append(f"{_size(free_bytes)} free")
    return "6Bit: " + "; ".join([*words, backend_line()])


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"
