"""A MODEL of the host and what the nodes of this pack put on it: the only code that touches ModelPatcher.

A node puts `Settings` on a clone of its MODEL, with the wrappers of `run` that carry them out.
"""

from dataclasses import dataclass, replace
from typing import Any

import comfy.model_patcher
from comfy.patcher_extension import WrappersMP

from ..sixbit_core.checkpoint import Checkpoint
from ..sixbit_core.layout import BlockLayout
from ..sixbit_core.run import RunState
from .run import calc_cond_batch, diffusion_model, outer_sample, prepare_sampling
from .settings import KEY, Journal, Settings, settings_in
from .swap import KINDS, layout

MODEL_FACTS = "sixbit_facts"
Patcher = comfy.model_patcher.ModelPatcher
_WRAPPERS = (
    (WrappersMP.OUTER_SAMPLE, outer_sample),
    (WrappersMP.PREPARE_SAMPLING, prepare_sampling),
    (WrappersMP.CALC_COND_BATCH, calc_cond_batch),
    (WrappersMP.DIFFUSION_MODEL, diffusion_model),
)


@dataclass(frozen=True)
class ModelFacts:
    """Kept with a MODEL that was loaded by this pack.

    Attributes:
        checkpoint: where it came from; holds no tensor.
        quantized: whether its Linears are NVFP4.
    """

    checkpoint: Checkpoint
    quantized: bool


def settings_of(model: Patcher) -> Settings:
    """What was asked of a MODEL; nothing, if no node of this pack was."""
    return settings_in(model.model_options)


def with_settings(model: Patcher, **changes: Any) -> Patcher:
    """A clone of `model` with changed settings, ready to run under them.

    Raises:
        ValueError: if it is no CogVideoX, or the settings do not fit it.
    """
    blocks = layout_of(model)
    settings = replace(settings_of(model), journal=Journal(), **changes)
    RunState(blocks, settings.dmpq, settings.cache, settings.predictor).close()
    clone = model.clone()
    put_settings_(clone, settings)
    return clone


def put_settings_(model: Patcher, settings: Settings) -> None:
    """Have `model` itself run under `settings`."""
    model.model_options.setdefault("transformer_options", {})[KEY] = settings
    for kind, wrapper in _WRAPPERS:
        model.remove_wrappers_with_key(kind, KEY)
        model.add_wrapper_with_key(kind, KEY, wrapper)


def facts_of(model: Patcher) -> ModelFacts | None:
    """Where a MODEL came from, None for one of another loader."""
    return model.get_attachment(MODEL_FACTS)


def layout_of(model: Patcher) -> BlockLayout:
    """Block Linears of a MODEL. Raises ValueError if it is no CogVideoX."""
    blocks = getattr(model.model.diffusion_model, "blocks", None)
    if not blocks or not all(hasattr(blocks[0], kind) for kind in KINDS):
        name = type(model.model).__name__
        raise ValueError(f"this node needs a CogVideoX model, got {name}; load one with Load 6Bit CogVideoX")
    return layout(blocks)
