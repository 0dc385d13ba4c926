"""How and where a block's residual Δ is kept, and the bytes that takes.

Where Δ waits is a row of `CODECS`: as it comes ("gpu"), rounded to INT8 by blocks of 64 values or to NVFP4
by rows, or in INT8 in host memory (`courier`), there with the sum over each span of blocks (`delta_cache`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..kernels import dequantize_nvfp4, hadamard_block_size, quantize_int8, quantize_nvfp4
from .courier import bytes_on_device, pinned_bytes

SPAN = 6  # blocks; on the reference's skips stretched to 42 blocks two of seven spans are broken up
Payload = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Codec:
    """How Δ, (rows, width), is kept: to a payload and back, and the bytes of one row.

    Attributes:
        away: it waits in host memory.
    """

    encode: Callable[[torch.Tensor], Payload]
    decode: Callable[[Payload, torch.dtype], torch.Tensor]
    row_bytes: Callable[[int, int], int]  # (width, bytes of one input value)
    exact: bool = False
    away: bool = False


_AS_IT_COMES = Codec(
    encode=lambda delta: (delta,),
    decode=lambda payload, dtype: payload[0],
    row_bytes=lambda width, itemsize: width * itemsize,
    exact=True,
)


def _block(width: int) -> int:
    """Values of Δ that share an INT8 scale: of a whole row they would lose three times as much."""
    return min(64, hadamard_block_size(width))


def _to_int8(delta: torch.Tensor) -> Payload:
    q, scale = quantize_int8(delta.reshape(-1, _block(delta.shape[1])))
    return scale.view(len(delta), -1), q.view(delta.shape)


def _from_int8(payload: Payload, dtype: torch.dtype) -> torch.Tensor:
    scale, q = payload
    delta = torch.empty(q.shape, dtype=dtype, device=q.device)
    blocks = (*scale.shape, -1)
    torch.mul(q.view(blocks), scale[..., None], out=delta.view(blocks))  # float32 is never kept
    return delta


CODECS: dict[str, Codec] = {
    "gpu": _AS_IT_COMES,
    "gpu-int8": Codec(
        encode=_to_int8,
        decode=_from_int8,
        row_bytes=lambda width, itemsize: width + 4 * (width // _block(width)),
    ),
    "gpu-nvfp4": Codec(
        encode=lambda delta: quantize_nvfp4(delta, per_row=True),
        decode=lambda payload, dtype: dequantize_nvfp4(*payload, dtype=dtype),
        row_bytes=lambda width, itemsize: width // 2 + width // 16 + 4,
    ),
}
CODECS["host"] = replace(CODECS["gpu-int8"], away=True)


def resolve_location(
    location: str,
    free: int | None = None,
    size: Callable[[str], int] | None = None,
    fits_host: bool = False,
) -> str:
    """Settle "auto": the first of gpu, gpu-int8, host, gpu-nvfp4 whose full cache fits, else host.

    Host memory comes before NVFP4: it costs a few hundredths of the time where that costs decibels.

    Args:
        location: one of `config.CACHE_LOCATIONS`.
        free: bytes that the cache may take on the GPU; None where that is not known, which is "gpu".
        size: location -> bytes of a full cache there (`bytes_needed`); needed with `free`.
        fits_host: whether host memory is known to have room for a full cache.
    """
    if location != "auto" or free is None or size is None:
        return "gpu" if location == "auto" else location
    near = [name for name in ("gpu", "gpu-int8", "gpu-nvfp4") if size(name) <= free]
    return near[0] if near and not (fits_host and near[0] == "gpu-nvfp4") else "host"


def bytes_needed(
    location: str, tokens: int, width: int, blocks: int, streams: int, dtype: torch.dtype
) -> int:
    """Bytes that a full cache takes.

    Args:
        location: one of `config.CACHE_LOCATIONS`.
        tokens: video and text tokens of one stream.
        width: of the hidden states.
        blocks: transformer blocks.
        streams: conditionings times batch items.
        dtype: of the hidden states.
    """
    one = _bytes_of_one(location, tokens, width, dtype)
    return one * (blocks + _spans(location, blocks)) * streams


def bytes_on_gpu(
    location: str, tokens: int, width: int, blocks: int, streams: int, dtype: torch.dtype
) -> int:
    """Bytes of `bytes_needed`, which see, that are on the GPU: where Δ is away, of those on their way, and of
    what a span began with."""
    if not CODECS[resolve_location(location)].away:
        return bytes_needed(location, tokens, width, blocks, streams, dtype)
    begun = tokens * width * dtype.itemsize * streams
    return bytes_on_device(_bytes_of_one(location, tokens, width, dtype)) + begun


def bytes_in_host_memory(
    location: str, tokens: int, width: int, blocks: int, streams: int, dtype: torch.dtype
) -> int:
    """Bytes of host memory that a full cache takes, as PyTorch pins them; arguments as `bytes_needed`."""
    if not CODECS[resolve_location(location)].away:
        return 0
    one = pinned_bytes(_bytes_of_one(location, tokens, width, dtype))
    return one * (blocks + _spans(location, blocks)) * streams


def _bytes_of_one(location: str, tokens: int, width: int, dtype: torch.dtype) -> int:
    return CODECS[resolve_location(location)].row_bytes(width, dtype.itemsize) * tokens


def _spans(location: str, blocks: int) -> int:
    """Spans whose sum is kept."""
    return -(-blocks // SPAN) if CODECS[resolve_location(location)].away else 0
