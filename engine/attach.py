"""Run a diffusers CogVideoX transformer under a `RunState`, and leave no trace on it.

Inside a `with attached(...)`, `forward` in the `__dict__` of the transformer, of each block and of each
quantized Linear of a block is one that asks the run; afterwards, however it ends, the entries are gone and
the class's own methods serve again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..sixbit_core.families import ModelFamily
from ..sixbit_core.run import RunState, run_block
from .linears import QuantizedLinear
from .schedule import Evaluation

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
    blocks = transformer.transformer_blocks

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        now = _evaluation(known, kwargs["timestep"] if "timestep" in kwargs else args[1])
        items = hidden_states.shape[0] // len(conditionings)
        streams = [(name, item) for name in conditionings for item in range(items)]
        run.begin_call(streams, now.sigma, now.progress, now.last)
        return type(transformer).forward(transformer, hidden_states, *args, **kwargs)

    swaps: list[tuple[nn.Module, Callable]] = [(transformer, forward)]
    for index, block in enumerate(blocks):
        swaps.append((block, _block_forward(run, index, block)))
        for kind, linear in block_linears(block, family).items():
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
    paths = {
        kind: family.to_diffusers(f"{family.blocks}.0.{kind}").split(".", 2)[2] for kind in family.linears
    }
    return {kind: block.get_submodule(path) for kind, path in paths.items()}


def _evaluation(known: Mapping[int, Evaluation], timestep: torch.Tensor | int) -> Evaluation:
    """The evaluation of a call. The read waits for no more than the scheduler's own indexing does."""
    step = int(torch.as_tensor(timestep).reshape(-1)[0])
    if step not in known:
        raise RuntimeError(f"the transformer was called at timestep {step}, which the schedule does not have")
    return known[step]


def _block_forward(run: RunState, index: int, block: nn.Module) -> Callable:
    def forward(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        compute = partial(
            type(block).forward,
            block,
            hidden_states=hidden_states,
            encoder_hidden_states=encoder_hidden_states,
            **kwargs,
        )
        return run_block(run, index, hidden_states, encoder_hidden_states, compute)

    return forward


def _linear_forward(
    run: RunState, index: int, kind: str, linear: QuantizedLinear, x: torch.Tensor
) -> torch.Tensor:
    return run.linear(index, kind, x, linear.quantized, linear.bias)
