"""Low-rank changes that run beside a MODEL's Linears; no weight is touched.

    y = Linear(x) + strength * scale * (x downᵀ) upᵀ

They are kept with a clone's options, on the CPU. For a sampling run an OUTER_SAMPLE wrapper holds them on the
device; for each call of the model a DIFFUSION_MODEL wrapper puts them beside its Linears. A MODEL without
them is the same module, so taking a LoRA off is using the MODEL from before it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import comfy.model_patcher
import torch
from comfy.patcher_extension import WrappersMP
from torch import nn

from .borrow import borrowed
from .linear import QuantizedLinear
from .lora_file import LowRank, Size

KEY = "sixbit_lora"


@dataclass(frozen=True, eq=False)
class Branches:
    """The changes of one LoRA, by native layer name, and how strongly they count."""

    layers: Mapping[str, LowRank]
    strength: float

    def bytes_in(self, dtype: torch.dtype) -> int:
        """What they take in a type."""
        return sum(pair.down.numel() + pair.up.numel() for pair in self.layers.values()) * dtype.itemsize

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
    # The host makes room for what it loads itself; these come before.
    comfy.model_management.free_memory(sum(branches.bytes_in(place[1]) for branches in kept), place[0])
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
    with _beside(executor.class_obj, options.get(KEY, ())):
        return executor(*args, **kwargs)


def _beside(network: nn.Module, loras: tuple[Branches, ...]) -> AbstractContextManager[None]:
    """Branches beside the Linears of a network inside the block."""
    return borrowed(_changes(network, loras))


def _changes(network: nn.Module, loras: tuple[Branches, ...]) -> Iterator[tuple[nn.Module, str, Callable]]:
    """The branches of all LoRAs, by the Linear that they lie beside."""
    by_layer: dict[str, list[tuple[LowRank, float]]] = {}
    for lora in loras:
        for name, pair in lora.layers.items():
            by_layer.setdefault(name, []).append((pair, lora.strength * pair.scale))
    for name, pairs in by_layer.items():
        module = network.get_submodule(name)
        yield module, *_branch(module, tuple(pairs))


def _branch(module: nn.Module, pairs: tuple[tuple[LowRank, float], ...]) -> tuple[str, Callable]:
    """What to set on a module, and under which name: a 6-bit Linear adds branches of itself."""

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = y.flatten(0, -2)  # a product's own result: added to in place
        for pair, factor in pairs:
            inner = nn.functional.linear(x, pair.down.to(x.device, x.dtype)).flatten(0, -2)
            rows.addmm_(inner, pair.up.to(x.device, x.dtype).T, alpha=factor)
        return rows.view(y.shape)

    if isinstance(module, QuantizedLinear):
        return "branch", add
    forward = module.forward
    return "forward", lambda x: add(x, forward(x))
