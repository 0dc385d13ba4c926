"""Let a run decide over the blocks of a host's model while one call of it lasts, and leave no trace.

A block whose Linears are all 6-bit is computed by the core's `block_forward`, on weights that the host lends
for the call and with the host's attention. Any other, and one that another pack has put something on, runs as
the host has it, the product of each 6-bit Linear through the run. `forward` of a block and `product` of a
Linear are `borrowed`; what stood there comes back.

Nothing of a run is traced by torch.compile: decisions change from step to step, and a trace would be made
anew for each. Blocks whose Linears the run leaves alone are compiled one by one, as the MODEL's compile node
asked.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import comfy.ldm.cogvideo.model
import comfy.ldm.modules.attention
import torch
from torch import nn

from ..sixbit_core.block import block_forward
from ..sixbit_core.block_parts import Attention, BlockLinear, BlockParts, Norm, block_parts
from ..sixbit_core.config import DMPQConfig
from ..sixbit_core.layout import BlockLayout
from ..sixbit_core.run import Pair, RunState, run_block
from .borrow import borrowed
from .linear import QuantizedLinear, lent

KINDS = ("q", "k", "v", "attn_out", "ff_proj", "ff_out")
_CALLED = ("norm1.linear", "norm2.linear")  # by `block_forward`, as the modules they are


def layout(blocks: Sequence[nn.Module]) -> BlockLayout:
    """Shapes of the Linears of CogVideoX blocks."""
    linears = ({kind: getattr(block, kind) for kind in KINDS} for block in blocks)
    return BlockLayout(
        KINDS, tuple({kind: (m.out_features, m.in_features) for kind, m in row.items()} for row in linears)
    )


def deciding(
    run: RunState, blocks: Sequence[nn.Module], compiler: dict[str, Any] | None
) -> AbstractContextManager[None]:
    """Every block call inside goes through `run_block`, every product of a 6-bit Linear through the run.

    Args:
        compiler: arguments of torch.compile for the blocks; None leaves them as they are.
    """
    return borrowed(_changes(run, blocks, compiler))


def _changes(
    run: RunState, blocks: Sequence[nn.Module], compiler: dict[str, Any] | None
) -> Iterator[tuple[nn.Module, str, Callable]]:
    for index, block in enumerate(blocks):
        if _is_fused(run.dmpq, block, compiler is not None):
            yield block, "forward", _fused_forward(run, index, _inner(block))
            continue
        yield block, "forward", _host_forward(run, index, _own_forward(block, None if run.dmpq else compiler))
        for kind in KINDS:
            linear = getattr(block, kind)
            if isinstance(linear, QuantizedLinear) and run.dmpq is not None:
                yield linear, "product", partial(run.linear, index, kind)


def fused(dmpq: DMPQConfig | None, blocks: Sequence[nn.Module]) -> bool:
    """Whether `block_forward` computes all of these blocks, none of them compiled."""
    return all(_inner(block) is block and _is_fused(dmpq, block, False) for block in blocks)


def _is_fused(dmpq: DMPQConfig | None, block: nn.Module, compiles: bool) -> bool:
    inner = _inner(block)
    return _wants_fused(dmpq, compiles or inner is not block) and _is_ours(inner)


def _inner(block: nn.Module) -> nn.Module:
    """Of a block that was compiled by itself, the block."""
    return getattr(block, "_orig_mod", block)


def _wants_fused(dmpq: DMPQConfig | None, compiles: bool) -> bool:
    """Where the run leaves activations as they come, compiling counts; router "bf16" is off, bit for bit."""
    return not compiles if dmpq is None else dmpq.router != "bf16"


def _is_ours(block: nn.Module) -> bool:
    """Whether the Linears are 6-bit and nobody has put anything on what `block_forward` does not call."""
    return all(isinstance(getattr(block, kind), QuantizedLinear) for kind in KINDS) and all(
        _is_plain(module) for name, module in block.named_modules() if name not in _CALLED
    )


def hooked(blocks: Iterable[nn.Module]) -> bool:
    """Whether somebody may change what a block gives before the next one gets it."""
    return any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def _is_plain(module: nn.Module) -> bool:
    """Whether the module's own method is all that a call of it runs."""
    forward = module.__dict__.get("forward")  # a bound method of its own may be left there
    plain = forward is None or getattr(forward, "__func__", None) is type(module).forward
    return plain and not module._forward_hooks and not module._forward_pre_hooks


def _own_forward(block: nn.Module, compiler: dict[str, Any] | None) -> Callable:
    """What the block does by itself: one that was compiled has a `forward` of its own."""
    if "forward" in block.__dict__:
        return block.__dict__["forward"]
    forward = type(block).forward
    return partial(forward if compiler is None else torch.compile(forward, **compiler), block)


def _host_forward(run: RunState, index: int, own: Callable) -> Callable:
    def forward(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **kwargs: Any) -> Pair:
        compute = partial(own, hidden_states, encoder_hidden_states, **kwargs)
        return run_block(run, index, hidden_states, encoder_hidden_states, compute)

    return forward


def _fused_forward(run: RunState, index: int, block: nn.Module) -> Callable:
    def forward(
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> Pair:
        def compute() -> Pair:
            with ExitStack() as held:
                parts = _parts(block, hidden_states, transformer_options or {}, held)
                return block_forward(
                    run, index, parts, hidden_states, encoder_hidden_states, temb, image_rotary_emb
                )

        return run_block(run, index, hidden_states, encoder_hidden_states, compute)

    return forward


def _parts(block: nn.Module, x: torch.Tensor, options: dict[str, Any], held: ExitStack) -> BlockParts:
    """The block as the core computes it, its weights where `x` is until `held` is closed."""

    def module(name: str) -> Any:
        found = block.get_submodule(name)
        if not isinstance(found, nn.LayerNorm):
            return found
        return Norm(*held.enter_context(lent(found, x, x.dtype, beside_others=True)), found.eps)

    def linear(found: QuantizedLinear) -> BlockLinear:
        return BlockLinear(*held.enter_context(found.cast(x, beside_others=True)), found.branch)

    attention = _attention(block.num_heads, options)
    together = has_override(options)  # it may know rows by their place in the batch
    return block_parts(module, linear, KINDS, block.num_heads, attention, together)


def has_override(options: dict[str, Any]) -> bool:
    """Whether a node has put an attention of its own into transformer_options."""
    return "optimized_attention_override" in options


def takes_torchs_attention(options: dict[str, Any]) -> bool:
    """Whether the host's blocks would call torch's attention, with nothing of others before it.

    The host's own function is asked for where it is registered: a name in its module may be another's.
    """
    own = comfy.ldm.modules.attention.get_attention_function("pytorch", None)
    return comfy.ldm.cogvideo.model.optimized_attention is own and not has_override(options)


def _attention(heads: int, options: dict[str, Any]) -> Attention:
    """Attention over (B, heads, N, d): the host's, but where that is torch's, with the backend that torch
    prefers. The host asks for flash first, which took 24.5 ms where cuDNN took 18.6 (5B, one H200)."""
    if takes_torchs_attention(options):
        return nn.functional.scaled_dot_product_attention
    return partial(_host_attention, heads, options)


def _host_attention(
    heads: int, options: dict[str, Any], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """The host's attention over (B, heads, N, d), called as its own block does, overrides included."""
    q, k, v = (x.transpose(1, 2).flatten(2) for x in (q, k, v))
    attend = comfy.ldm.cogvideo.model.optimized_attention
    out = attend(q, k, v, heads=heads, transformer_options=options)
    return out.unflatten(2, (heads, -1)).transpose(1, 2)
