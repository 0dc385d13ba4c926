"""Between the host's sampling and `RunState`: the only code that touches ModelPatcher and its wrappers.

A node puts `Settings` on a clone of its MODEL. When sampling starts, an OUTER_SAMPLE wrapper opens a run and
closes it in `finally`; at each call of the model a DIFFUSION_MODEL wrapper says who is in the batch and swaps
`forward` in the `__dict__` of blocks and Linears, in try/finally. Nothing stays on a module.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from comfy.patcher_extension import WrappersMP
from torch import nn

from ..sixbit_core.checkpoint import Checkpoint
from ..sixbit_core.config import DeltaCacheConfig, DMPQConfig
from ..sixbit_core.layout import BlockLayout, Stream
from ..sixbit_core.predictor import Predictor
from ..sixbit_core.report import RunReport
from ..sixbit_core.run import RunState, run_block
from . import schedule
from .linear import QuantizedLinear
from .status import status_line

KEY = "sixbit"
RUN = "sixbit_run"
MODEL_FACTS = "sixbit_facts"
KINDS = ("q", "k", "v", "attn_out", "ff_proj", "ff_out")
_STEP_CACHES = ("easycache",)
_swap_lock = threading.RLock()


@dataclass(frozen=True)
class ModelFacts:
    """Kept with a MODEL that was loaded by this pack.

    Attributes:
        checkpoint: where it came from; holds no tensor.
        quantized: whether its Linears are NVFP4.
    """

    checkpoint: Checkpoint
    quantized: bool


@dataclass
class Journal:
    """The report of the last run of a MODEL and its clones."""

    last: RunReport | None = None


@dataclass(frozen=True)
class Settings:
    """What the nodes of this pack asked of a MODEL."""

    dmpq: DMPQConfig | None = None
    cache: DeltaCacheConfig | None = None
    predictor: Predictor | None = None
    journal: Journal = field(default_factory=Journal)

    @property
    def active(self) -> bool:
        return self.dmpq is not None or self.cache is not None


@dataclass(frozen=True)
class ActiveRun:
    """A run under way, and the noise level of its last evaluation."""

    state: RunState
    last_sigma: float


Patcher = comfy.model_patcher.ModelPatcher


def settings_of(model: Patcher) -> Settings:
    """What was asked of a MODEL; nothing, if no node of this pack was."""
    return model.model_options.get("transformer_options", {}).get(KEY) or Settings()


def with_settings(model: Patcher, **changes: Any) -> Patcher:
    """A clone of `model` with changed settings, ready to run under them.

    Raises:
        ValueError: if it is no CogVideoX, or the settings do not fit it.
    """
    layout = layout_of(model)
    settings = replace(settings_of(model), **changes)
    RunState(layout, settings.dmpq, settings.cache, settings.predictor).close()
    clone = model.clone()
    clone.model_options.setdefault("transformer_options", {})[KEY] = settings
    for kind, wrapper in (
        (WrappersMP.OUTER_SAMPLE, outer_sample),
        (WrappersMP.DIFFUSION_MODEL, diffusion_model),
    ):
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone


def facts_of(model: Patcher) -> ModelFacts | None:
    """Where a MODEL came from, None for one of another loader."""
    return model.get_attachment(MODEL_FACTS)


def layout_of(model: Patcher) -> BlockLayout:
    """Block Linears of a MODEL. Raises ValueError if it is no CogVideoX."""
    blocks = getattr(model.model.diffusion_model, "blocks", None)
    if blocks is None or not all(hasattr(blocks[0], kind) for kind in KINDS):
        name = type(model.model).__name__
        raise ValueError(f"this node needs a CogVideoX model, got {name}; load one with Load 6Bit CogVideoX")
    return _layout(blocks)


def _layout(blocks: Sequence[nn.Module]) -> BlockLayout:
    linears = ({kind: getattr(block, kind) for kind in KINDS} for block in blocks)
    return BlockLayout(
        KINDS, tuple({kind: (m.out_features, m.in_features) for kind, m in row.items()} for row in linears)
    )


def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """OUTER_SAMPLE wrapper: one `RunState` for one sampling run, gone when it ends, however it ends."""
    guider = executor.class_obj
    original = guider.model_options
    settings: Settings | None = original.get("transformer_options", {}).get(KEY)
    if settings is None or not settings.active:
        return executor(*args, **kwargs)
    sigmas = args[3]
    options = comfy.model_patcher.create_model_options_clone(original)
    for name in _STEP_CACHES:
        if name in options["transformer_options"]:
            logging.warning(
                f"6Bit: {name} skips whole evaluations, which the delta cache never sees; use one of the two"
            )
    layout = _layout(guider.model_patcher.model.diffusion_model.blocks)
    state = RunState(layout, settings.dmpq, settings.cache, settings.predictor)
    if state.note:
        logging.info(f"6Bit: {state.note}")
    logging.info(_status(guider, state, args[0]))
    last_sigma = float(sigmas[-2]) if len(sigmas) > 1 else float(sigmas[-1])
    options["transformer_options"][RUN] = ActiveRun(state, last_sigma)
    guider.model_options = options
    try:
        result = executor(*args, **kwargs)
        state.finish()
        return result
    finally:
        settings.journal.last = state.report()
        state.close()
        options["transformer_options"].pop(RUN, None)
        guider.model_options = original


def _status(guider: Any, state: RunState, noise: torch.Tensor) -> str:
    """The line that says what the coming run will take."""
    patcher = guider.model_patcher
    network = patcher.model.diffusion_model
    patch = network.patch_size**2 * (network.patch_size_t or 1)
    return status_line(
        None if state.dmpq is None else state.dmpq.router,
        state.cache,
        noise.shape[-3:].numel() // patch,
        network.dim,
        state.layout.blocks,
        noise.shape[0] * (1 if getattr(guider, "cfg", 0) == 1 else 2),
        patcher.model.get_dtype_inference(),
        patcher.model_size(),
        comfy.model_management.get_free_memory(patcher.load_device),
    )


def diffusion_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """DIFFUSION_MODEL wrapper: one call of the model under the run."""
    options = kwargs.get("transformer_options") or next(a for a in reversed(args) if isinstance(a, dict))
    run: ActiveRun | None = options.get(RUN)
    if run is None:
        return executor(*args, **kwargs)
    x, timestep = args[0], args[1]
    sigma, time = torch.stack([options["sigmas"][0].float(), timestep[0].float()]).tolist()
    last = sigma <= run.last_sigma * (1 + 1e-6)
    run.state.begin_call(streams_of(options, x.shape[0]), sigma, schedule.progress(time), last)
    with _swapped(_forwards(run.state, executor.class_obj.blocks)):
        return executor(*args, **kwargs)


def streams_of(options: dict, batch: int) -> list[Stream]:
    """Names of the batch rows: conditionings in the host's order, latents within each."""
    names = [str(name) for name in options["uuids"]]
    items, rest = divmod(batch, len(names))
    if rest:
        raise ValueError(f"a batch of {batch} rows cannot hold {len(names)} conditionings of one size")
    return [(name, item) for name in names for item in range(items)]


def _forwards(run: RunState, blocks: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, Callable]]:
    for index, block in enumerate(blocks):
        yield block, _block_forward(run, index, block)
        for kind in KINDS:
            linear = getattr(block, kind)
            if isinstance(linear, QuantizedLinear) and run.dmpq is not None:
                yield linear, _linear_forward(run, index, kind, linear)


def _block_forward(run: RunState, index: int, block: nn.Module) -> Callable:
    @partial(torch.compiler.disable, recursive=False)
    def forward(hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        own = partial(type(block).forward, block, hidden_states, encoder_hidden_states, **kwargs)
        return run_block(run, index, hidden_states, encoder_hidden_states, own)

    return forward


def _linear_forward(run: RunState, index: int, kind: str, linear: QuantizedLinear) -> Callable:
    return lambda x: linear.multiply(x, partial(run.linear, index, kind))


@contextmanager
def _swapped(swaps: Iterator[tuple[nn.Module, Callable]]) -> Iterator[None]:
    """Give each module another `forward` inside the block; what a module had of its own comes back after."""
    before: list[tuple[nn.Module, Callable | None]] = []
    with _swap_lock:
        try:
            for module, forward in swaps:
                before.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = forward
            yield
        finally:
            for module, own in before:
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = own
