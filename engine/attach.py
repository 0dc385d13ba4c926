"""Run a diffusers CogVideoX transformer under a `RunState`, and leave no trace on it.

Inside a `with attached(...)`, `forward` in the `__dict__` of the transformer and of each block is one that
asks the run; afterwards, however it ends, the entries are gone and the class's own methods serve again. A
block whose linears are quantized is computed by `sixbit_core.block`, in place of diffusers' own forward.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..sixbit_core.block import block_forward
from ..sixbit_core.block_parts import BlockLinear, BlockParts, block_parts
from ..sixbit_core.families import ModelFamily
from ..sixbit_core.run import RunState, run_block
from .linears import QuantizedLinear
from .schedule import Evaluation, TimestepReader

CONDITIONINGS = {1: ("cond",), 2: ("uncond", "cond")}  # in the order in which diffusers batches them


@contextmanager
def attached(
    transformer: nn.Module,
    run: RunState,
    evaluations: Sequence[Evaluation],
    family: ModelFamily,
    conditionings: Sequence[str] = ("uncond", "cond"),
) -> Iterator[None]:
    """Let `run` decide over `transformer` for the evaluations to come.

    Args:
        transformer: a CogVideoXTransformer3DModel whose block linears may be `QuantizedLinear`s.
        evaluations: those that may come; a call is told by its timestep.
        family: names of the block linears.
        conditionings: what one batch holds, from its first part to its last.
    """
    known = {evaluation.timestep: evaluation for evaluation in evaluations}
    reader = TimestepReader()

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        step = reader.read(kwargs["timestep"] if "timestep" in kwargs else args[1])
        if step not in known:
            raise RuntimeError(
                f"the transformer was called at timestep {step}, which the schedule does not have"
            )
        now = known[step]
        items = hidden_states.shape[0] // len(conditionings)
        streams = [(name, item) for name in conditionings for item in range(items)]
        run.begin_call(streams, now.sigma, now.progress, now.last)
        return type(transformer).forward(transformer, hidden_states, *args, **kwargs)

    swaps: list[tuple[nn.Module, Callable]] = [(transformer, forward)]
    for index, block in enumerate(transformer.transformer_blocks):
        linears = block_linears(block, family)
        if all(isinstance(linear, QuantizedLinear) for linear in linears.values()):
            swaps.append((block, partial(_own_forward, run, index, describe(block, family))))
            continue
        swaps.append((block, partial(_stock_forward, run, index, block)))
        for kind, linear in linears.items():
            if isinstance(linear, QuantizedLinear):
                swaps.append((linear, partial(_linear_forward, run, index, kind, linear)))
    with swapped(swaps):
        yield


@contextmanager
def swapped(swaps: Sequence[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Give each module another `forward` for the duration of the block."""
    taken = [module for module, _ in swaps if "forward" in module.__dict__]
    if taken:
        raise RuntimeError(
            f"a {type(taken[0]).__name__} already has a forward of its own; end the other run first"
        )
    try:
        for module, forward in swaps:
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, _ in swaps:
            module.__dict__.pop("forward", None)


def block_linears(block: nn.Module, family: ModelFamily) -> dict[str, nn.Module]:
    """The quantizable Linears of one diffusers block by native kind."""
    return {kind: block.get_submodule(_path(family, kind)) for kind in family.linears}


def describe(block: nn.Module, family: ModelFamily) -> BlockParts:
    """A diffusers block, whose linears are all `QuantizedLinear`s, as the core computes it."""

    def module(name: str) -> nn.Module | None:
        parent, _, leaf = _path(family, name).rpartition(".")
        return getattr(block.get_submodule(parent), leaf)

    def linear(found: QuantizedLinear) -> BlockLinear:
        return BlockLinear(found.quantized, found.bias)

    return block_parts(module, linear, family.linears, block.attn1.heads)


def _path(family: ModelFamily, name: str) -> str:
    """Where a diffusers block keeps what is called `name` natively."""
    return family.to_diffusers(f"{family.blocks}.0.{name}").split(".", 2)[2]


def _own_forward(
    run: RunState,
    index: int,
    parts: BlockParts,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    attention_kwargs: dict[str, Any] | None = None,
) -> Any:
    if attention_kwargs:
        raise ValueError(
            f"a quantized block takes no attention_kwargs, got {', '.join(attention_kwargs)}; leave them out"
        )
    compute = partial(
        block_forward, run, index, parts, hidden_states, encoder_hidden_states, temb, image_rotary_emb
    )
    return run_block(run, index, hidden_states, encoder_hidden_states, compute)


def _stock_forward(
    run: RunState,
    index: int,
    block: nn.Module,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    compute = partial(type(block).forward, block, hidden_states, encoder_hidden_states, *args, **kwargs)
    return run_block(run, index, hidden_states, encoder_hidden_states, compute)


def _linear_forward(
    run: RunState, index: int, kind: str, linear: QuantizedLinear, x: torch.Tensor
) -> torch.Tensor:
    return run.linear(index, kind, x, linear.quantized, linear.bias)
