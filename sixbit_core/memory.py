"""What sampling holds on the device beside weights and delta cache, in bytes.

    bytes = max(2 · streams + HELD, 3 · streams) · hidden

The first is counted from what a block holds at once (`block.py`): the hidden states of all streams twice, and
those of one `HELD` times more. The second is an answered block, and the end of the model. A block that takes
all rows of a batch at once holds the inside of each. In full precision it is 13 times all hidden states, as
measured on the 5B, one H200.
"""

FULL, INT8 = "full", "int8"
HELD = {INT8: 4.6}
HELD_OTHERWISE = 9.7  # blocks with a linear in NVFP4 or 16 bits
HELD_IN_FULL = 13.0  # of all streams


def sampling_bytes(formats: str, hidden: int, streams: int, together: bool = False) -> int:
    """Bytes expected beside weights and delta cache.

    Args:
        formats: FULL for full precision, INT8 where every activation is, or anything else.
        hidden: bytes of the hidden states of one stream, text tokens included.
        streams: of the batch.
        together: a block takes all of them at once, not one after the other.
    """
    if formats == FULL:
        return int(HELD_IN_FULL * streams * hidden)
    held = HELD.get(formats, HELD_OTHERWISE)
    if together:
        return int((2 + held) * streams * hidden)
    return int(max(2 * streams + held, 3 * streams) * hidden)
