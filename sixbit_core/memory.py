"""What sampling holds on the device beside weights and delta cache, in bytes.

    bytes = max(2 · streams + held, 3 · streams) · hidden + 8 · width²

hidden = tokens · width · bytes of a value: the hidden states of one stream. The first term is counted from
what a block holds at once (`block.py`): those of all streams twice, and of one stream `HELD` times more. Its
second side is an answered block, and the end of the model. The last term is a weight of the feed-forward in
16 bits, or both of them in INT8. A block that takes all rows of a batch at once holds the inside of each. In
full precision it is 13 times all hidden states. On an H200 the 5B's INT8 loop held 8.7 times `hidden` where
this says 8.6.
"""

from .block import PIECE
from .config import DMPQConfig

FULL, INT8 = "full", "int8"
HELD = {INT8: 3.9}
HELD_OTHERWISE = 6.3  # blocks with a linear in NVFP4 or 16 bits, as a refresh may have it
HELD_IN_FULL = 13.0  # of all streams; measured on the 5B


def formats_of(dmpq: DMPQConfig, cached: bool) -> str:
    """Formats of a run for `sampling_bytes`: a refresh may take any cached block out of INT8."""
    return "" if cached and dmpq.purified_refresh else dmpq.router


def sampling_bytes(
    formats: str, tokens: int, width: int, itemsize: int, streams: int, together: bool = False
) -> int:
    """Bytes expected beside weights and delta cache.

    Args:
        formats: FULL for full precision, INT8 where every activation is, or anything else.
        tokens: video and text tokens of one stream.
        width: of the hidden states.
        itemsize: bytes of one of their values.
        streams: of the batch.
        together: blocks take all of them at once, however long.
    """
    hidden = tokens * width * itemsize
    if formats == FULL:
        return int(HELD_IN_FULL * streams * hidden)
    held, cast = HELD.get(formats, HELD_OTHERWISE), 8 * width**2
    if together or tokens < PIECE:
        return int((2 + held) * streams * hidden) + cast
    return int(max(2 * streams + held, 3 * streams) * hidden) + cast
