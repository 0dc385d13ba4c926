"""What a coming run takes of memory: numbers of bytes. Knows no host."""

from dataclasses import dataclass

import torch

from ..sixbit_core.delta_codecs import bytes_in_host_memory, bytes_needed, bytes_on_gpu, resolve_location
from ..sixbit_core.memory import FULL, sampling_bytes

HOST_HELD = 1
"""Times the hidden states of a stream that the host holds beside our blocks: measured on the 5B, one H200."""


@dataclass(frozen=True)
class BlockMemory:
    """What is known before a run of the memory that its blocks will take.

    Attributes:
        text: tokens of the longest text.
        formats: of the activations, as `sampling_bytes` takes them.
        together: a block takes all rows of a batch at once.
        alone: what runs in the blocks is ours and torch's. Else the host's own figure, made for its own
            blocks and its own attention, counts where it is larger.
    """

    text: int
    formats: str = FULL
    together: bool = False
    alone: bool = False

    def bytes_beside(self, host: int, tokens: int, width: int, itemsize: int, rows: int) -> int:
        """Bytes that sampling takes beside weights and delta cache.

        Args:
            host: what the host expects.
            tokens: video and text tokens of one row of the batch.
            width: of the hidden states; `itemsize`, bytes of a value.
            rows: of the batch.
        """
        ours = sampling_bytes(self.formats, tokens, width, itemsize, rows, self.together)
        if self.formats != FULL:
            ours += HOST_HELD * tokens * width * itemsize
        return ours if self.alone else max(host, ours)


@dataclass(frozen=True)
class Demand:
    """Memory of one run.

    Attributes:
        weights: bytes of the model; `loaded`, those on the device already.
        sampling: bytes that are expected to be needed beside them.
        tokens: video and text tokens of one stream; `width`, their channels; `dtype`, what they are in.
        blocks: of the model; `streams`, conditionings times clips.
    """

    weights: int
    loaded: int
    sampling: int
    tokens: int
    width: int
    blocks: int
    streams: int
    dtype: torch.dtype

    def cache(self, location: str) -> int:
        """Bytes of a full delta cache in a location."""
        return bytes_needed(location, self.tokens, self.width, self.blocks, self.streams, self.dtype)

    def cache_on_gpu(self, location: str) -> int:
        """Those of them that are on the GPU."""
        return bytes_on_gpu(location, self.tokens, self.width, self.blocks, self.streams, self.dtype)

    def cache_in_host_memory(self, location: str) -> int:
        """Those that wait in host memory, as they are pinned there."""
        return bytes_in_host_memory(location, self.tokens, self.width, self.blocks, self.streams, self.dtype)

    def place(self, location: str, room: int | None, host_room: int = 0) -> str:
        """Location "auto" settled for the bytes that the GPU has, None without one, and host memory."""
        return resolve_location(location, room, self.cache, self.cache_in_host_memory("host") <= host_room)
