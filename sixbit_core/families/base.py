"""What the core must know of an architecture, as data.

Names are ComfyUI's ("native") everywhere in the core; a family knows how to turn the
names of a diffusers checkpoint into them and back.
"""

from collections.abc import Mapping
from dataclasses import dataclass

Shape = tuple[int, ...]
Renames = tuple[tuple[str, str], ...]  # (diffusers, native), whole dotted prefixes


@dataclass(frozen=True)
class Source:
    """What a Linear of a block reads: tokens after an adaLN, or what another Linear makes of them.

    Attributes:
        norm: the adaLN, in the block; its Linear gives shift and scale of the video first.
        through: the Linear between, whose outputs attention averages; None where there is none.
        gelu: the outputs go through a GELU instead.
    """

    norm: str
    through: str | None = None
    gelu: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelFamily:
    """One architecture with its published facts.

    Attributes:
        name: stable key, stored in files ("cogvideox-5b").
        label: shown to people.
        layers: number of transformer blocks; 0 where only a checkpoint tells.
        native_dtype: precision the weights were published in, as torch spells it.
        licence: of the published weights; "unknown" where there are none.
        size: (height, width) in pixels the model was made for; None if only its folder tells.
        frames: clip length it was made for; None if only its folder tells.
        frame_step: clips hold `frame_step * N + 1` frames.
        snr_shift_scale, vae_scaling_factor: of the published pipeline; None as above.
        blocks: attribute path of the list of transformer blocks (native), `diffusers_blocks` there.
        linears: quantized Linears of a block.
        shared_input: Linears of a block that read one input and share one global scale.
        sources: (Linear, what it reads), where that is known; the first of those that share it tells.
        modulation: adaLN Linears of a block, `top_modulation` those outside the blocks; never rotated.
        streams: parameters of the block's forward that it returns updated, in return order.
        block_renames, top_renames: key map from diffusers, inside and outside a block.
    """

    name: str
    label: str
    layers: int = 0
    native_dtype: str = "bfloat16"
    licence: str = "unknown"
    size: tuple[int, int] | None = None
    frames: int | None = None
    frame_step: int = 8
    snr_shift_scale: float | None = None
    vae_scaling_factor: float | None = None
    blocks: str = "blocks"
    diffusers_blocks: str = "transformer_blocks"
    linears: tuple[str, ...] = ()
    shared_input: tuple[str, ...] = ()
    sources: tuple[tuple[str, Source], ...] = ()
    modulation: tuple[str, ...] = ()
    top_modulation: tuple[str, ...] = ()
    streams: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    block_renames: Renames = ()
    top_renames: Renames = ()

    def to_native(self, key: str) -> str:
        """Native name of a diffusers tensor or layer; native names come back as they are."""
        return _renamed(key, self.diffusers_blocks, self.blocks, self.block_renames, self.top_renames)

    def to_diffusers(self, key: str) -> str:
        """Diffusers name of a native tensor or layer; diffusers names come back as they are."""
        block, top = (tuple((b, a) for a, b in pairs) for pairs in (self.block_renames, self.top_renames))
        return _renamed(key, self.blocks, self.diffusers_blocks, block, top)

    def block_layers(self) -> tuple[str, ...]:
        """Names of all block Linears ("blocks.0.q", …)."""
        return tuple(f"{self.blocks}.{n}.{kind}" for n in range(self.layers) for kind in self.linears)

    def modulation_layers(self) -> tuple[str, ...]:
        """Names of all adaLN Linears ("blocks.0.norm1.linear", …, "norm_out.linear")."""
        inner = (f"{self.blocks}.{n}.{kind}" for n in range(self.layers) for kind in self.modulation)
        return (*inner, *self.top_modulation)

    def tensor_shapes(self) -> dict[str, Shape]:
        """Shape of every tensor a checkpoint must hold, native names; -1 where any size will do."""
        raise NotImplementedError

    def optional_shapes(self) -> dict[str, Shape]:
        """Like `tensor_shapes`, for tensors a checkpoint may hold or lack."""
        return {}

    def diffusers_config(self, shapes: Mapping[str, Shape]) -> dict[str, object]:
        """Constructor arguments of the diffusers model that tensors of these shapes tell."""
        raise NotImplementedError


def _renamed(key: str, blocks_from: str, blocks_to: str, block: Renames, top: Renames) -> str:
    head, dot, rest = key.partition(".")
    if head == blocks_from and dot:
        index, _, inner = rest.partition(".")
        return f"{blocks_to}.{index}.{_swapped(inner, block)}" if inner else f"{blocks_to}.{index}"
    return _swapped(key, top)


def _swapped(key: str, pairs: Renames) -> str:
    for old, new in pairs:
        if key == old or key.startswith(f"{old}."):
            return new + key[len(old) :]
    return key
