"""Let a run decide over the blocks of a host's model while one call of it lasts, and leave no trace.

`forward` in the `__dict__` of a block or Linear is replaced in try/finally; what stood there comes back.
Nothing of a run is traced by torch.compile: decisions change from step to step, and a trace would be made
anew for each. Blocks whose Linears the run leaves alone are compiled one by one, as the MODEL's compile node
asked.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..sixbit_core.layout import BlockLayout
from ..sixbit_core.run import RunState, run_block
from .linear import QuantizedLinear

KINDS = ("q", "k", "v", "attn_out", "ff_proj", "ff_out")
_lock = threading.RLock()  # a host may call clones of one model from several threads


def layout(blocks: Sequence[nn.Module]) -> BlockLayout:
    """Shapes of the Linears of CogVideoX blocks."""
    linears = ({kind: getattr(block, kind) for kind in KINDS} for block in blocks)
    return BlockLayout(
        KINDS, tuple({kind: (m.out_features, m.in_features) for kind, m in row.items()} for row in linears)
    )


@contextmanager
def deciding(run: RunState, blocks: Sequence[nn.Module], compiler: dict[str, Any] | None) -> Iterator[None]:
    """Every block call inside goes through `run_block`, every product of a 6-bit Linear through the run.

    Args:
        compiler: arguments of torch.compile for the blocks; None leaves them as they are.
    """
    before: list[tuple[nn.Module, Callable | None]] = []
    with _lock:
        try:
            for module, forward in _forwards(run, blocks, compiler):
                before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = forward
            yield
        finally:
            for module, own in before:
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = own


def _forwards(
    run: RunState, blocks: Sequence[nn.Module], compiler: dict[str, Any] | None
) -> Iterator[tuple[nn.Module, Callable]]:
    for index, block in enumerate(blocks):
        yield block, _block_forward(run, index, _own_forward(block, None if run.dmpq else compiler))
        for kind in KINDS:
            linear = getattr(block, kind)
            if isinstance(linear, QuantizedLinear) and run.dmpq is not None:
                yield linear, _linear_forward(run, index, kind, linear)


def _own_forward(block: nn.Module, compiler: dict[str, Any] | None) -> Callable:
    """What the block does by itself: one that was compiled has a `forward` of its own."""
    if "forward" in block.__dict__:
        return block.__dict__["forward"]
    forward = type(block).forward
    return partial(forward if compiler is None else torch.compile(forward, **compiler), block)


def _block_forward(run: RunState, index: int, own: Callable) -> Callable:
    def forward(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        compute = partial(own, hidden_states, encoder_hidden_states, **kwargs)
        return run_block(run, index, hidden_states, encoder_hidden_states, compute)

    return forward


def _linear_forward(run: RunState, index: int, kind: str, linear: QuantizedLinear) -> Callable:
    return lambda x: linear.multiply(x, partial(run.linear, index, kind))
