"""What a run must know of a model: its blocks' linears and their sizes; and how a batch row is named."""

from collections.abc import Mapping
from dataclasses import dataclass

Stream = tuple[str, int]
"""One conditioning of one batch item: (the host's id of the conditioning, place of the item)."""


@dataclass(frozen=True)
class BlockLayout:
    """The quantized linears of every transformer block.

    Attributes:
        names: linear kinds of a block, in order, e.g. ("q", "k", "v", "attn_out", "ff_proj", "ff_out").
        shapes: for every block, {kind: (out_features, in_features)}.
    """

    names: tuple[str, ...]
    shapes: tuple[Mapping[str, tuple[int, int]], ...]

    def __post_init__(self) -> None:
        for block, shapes in enumerate(self.shapes):
            if set(shapes) != set(self.names):
                raise ValueError(f"block {block} needs shapes of {sorted(self.names)}, got {sorted(shapes)}")

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return len(self.shapes)

    def macs(self, block: int, kind: str) -> int:
        """Multiply-accumulates of one linear for one row (token)."""
        out_features, in_features = self.shapes[block][kind]
        return out_features * in_features

    def mac_share(self) -> dict[str, float]:
        """Share of each kind in the multiply-accumulates of all blocks."""
        macs = {kind: sum(self.macs(b, kind) for b in range(self.blocks)) for kind in self.names}
        return {kind: count / sum(macs.values()) for kind, count in macs.items()}

    def linear_names(self) -> list[tuple[str, int, str]]:
        """(native name, block, kind) of every linear, in order."""
        return [(linear_name(b, k), b, k) for b in range(self.blocks) for k in self.names]


def linear_name(block: int, kind: str) -> str:
    """ComfyUI-native name of a block's linear, the key of predictor files."""
    return f"blocks.{block}.{kind}"
