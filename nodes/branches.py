"""Low-rank changes that run beside a MODEL's Linears; no weight is touched.

    y = Linear(x) + strength * scale * (x downᵀ) upᵀ

They are kept with a clone's options, on the CPU. For a sampling run an OUTER_SAMPLE wrapper holds them on the
device; at each call of the model a DIFFUSION_MODEL wrapper puts them beside its Linears, in try/finally. A
MODEL without them is the same module, so taking a LoRA off is using the MODEL from before it.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.model_patcher
import torch
from comfy.patcher_extension import WrappersMP
from torch import nn

from .linear import QuantizedLinear
from .lora_file import LowRank, Size

KEY = "sixbit_lora"
_lock = threading.RLock()  # a host may call clones of one model from several threads


@dataclass(frozen=True, eq=False)
class Branches:
    """The changes of one LoRA, by native layer name, and how strongly they count."""

    layers: Mapping[str, LowRank]
    strength: float

    def to(self, device: torch.device, dtype: torch.dtype) -> "Branches":
        """The same on a device, in a type."""
        return Branches({name: pair.to(device, dtype) for name, pair in self.layers.items()}, self.strength)


def linears_of(network: nn.Module) -> dict[str, Size]:
    """Native name -> (out, in) of every Linear of a network."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in network.named_modules()
        if hasattr(module, "in_features") and hasattr(module, "out_features")
    }


def with_branches(
    model: comfy.model_patcher.ModelPatcher, added: Branches
) -> comfy.model_patcher.ModelPatcher:
    """A clone of `model` that runs with these changes beside those it has."""
    clone = model.clone()
    options = clone.model_options.setdefault("transformer_options", {})
    options[KEY] = (*options.get(KEY, ()), added)
    for kind, wrapper in (
        (WrappersMP.OUTER_SAMPLE, outer_sample),
        (WrappersMP.DIFFUSION_MODEL, diffusion_model),
    ):
        clone.remove_wrappers_with_key(kind, KEY)
        clone.add_wrapper_with_key(kind, KEY, wrapper)
    return clone


def outer_sample(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """OUTER_SAMPLE wrapper: the changes wait on the device while the run lasts."""
    guider = executor.class_obj
    original, patcher = guider.model_options, guider.model_patcher
    kept: tuple[Branches, ...] = original.get("transformer_options", {}).get(KEY, ())
    options = comfy.model_patcher.create_model_options_clone(original)
    place = patcher.load_device, patcher.model.get_dtype_inference()
    options["transformer_options"][KEY] = tuple(branches.to(*place) for branches in kept)
    guider.model_options = options
    try:
        return executor(*args, **kwargs)
    finally:
        guider.model_options = original


@torch.compiler.disable(recursive=False)
def diffusion_model(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """DIFFUSION_MODEL wrapper: one call of the model with the changes beside its Linears."""
    options = kwargs.get("transformer_options") or next(a for a in reversed(args) if isinstance(a, dict))
    with _lock, _beside(executor.class_obj, options.get(KEY, ())):
        return executor(*args, **kwargs)


@contextmanager
def _beside(network: nn.Module, loras: tuple[Branches, ...]) -> Iterator[None]:
    """Put branches beside Linears inside the block; what a module had of its own comes back after."""
    by_layer: dict[str, list[tuple[LowRank, float]]] = {}
    for lora in loras:
        for name, pair in lora.layers.items():
            by_layer.setdefault(name, []).append((pair, lora.strength * pair.scale))
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name, pairs in by_layer.items():
            module = network.get_submodule(name)
            attribute, value = _branch(module, tuple(pairs))
            before.append((module.__dict__, attribute, module.__dict__.get(attribute)))
            module.__dict__[attribute] = value
        yield
    finally:
        for own, attribute, value in reversed(before):
            if value is None:
                own.pop(attribute, None)
            else:
                own[attribute] = value


def _branch(module: nn.Module, pairs: tuple[tuple[LowRank, float], ...]) -> tuple[str, Callable]:
    """What to set on a module, and under which name: a 6-bit Linear adds branches of itself."""

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for pair, factor in pairs:
            inner = nn.functional.linear(x, pair.down.to(x.device, x.dtype))
            y = torch.add(y, nn.functional.linear(inner, pair.up.to(x.device, x.dtype)), alpha=factor)
        return y

    if isinstance(module, QuantizedLinear):
        return "branch", add
    forward = module.forward
    return "forward", lambda x: add(x, forward(x))
