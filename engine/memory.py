"""What a clip needs at the least, and a refusal where the machine has less in all.

    bytes = max((streams + 2) · tokens · width · b, 3 · frames · height · width · (b + 4))

The first is a block's hidden states and the four times wider inside of one stream's feed-forward in INT8; the
second the decoded clip, in the type of the run (b bytes a value) and in float32. Real runs need more
(`sixbit_core/memory.py`): this never refuses one that fits.
"""

from ..sixbit_core.report import spelled_bytes
from .errors import InputError
from .facts import ModelFacts
from .machine import Machine


def least_bytes(facts: ModelFacts, size: tuple[int, int], frames: int, guided: bool, itemsize: int) -> int:
    """Bytes that sampling or decoding a clip holds at once on the device, weights not counted."""
    streams = 2 if guided else 1
    inside = (streams + 2) * facts.tokens(size, frames) * facts.width * itemsize
    return max(inside, 3 * frames * size[0] * size[1] * (itemsize + 4))


def check_memory(
    facts: ModelFacts, size: tuple[int, int], frames: int, guided: bool, machine: Machine
) -> None:
    """Raise InputError for a clip that cannot fit into all of the device's memory."""
    needed = least_bytes(facts, size, frames, guided, 4 if machine.device.type == "cpu" else 2)
    if 0 < machine.memory_bytes < needed:
        raise InputError(
            f"{frames} frames of {size[0]}x{size[1]} need {spelled_bytes(needed)} or more, and "
            f"{machine.name} has {spelled_bytes(machine.memory_bytes)}: give a smaller --size or "
            "fewer --frames"
        )
