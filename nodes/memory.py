"""What a coming run takes of a device's memory, and what is left there for the delta cache."""

from collections.abc import Sequence
from typing import Any

import comfy.model_management
import torch

from .demand import Demand
from .linear import QuantizedLinear


def demand_of(patcher: Any, shape: Sequence[int], conditionings: int) -> Demand:
    """What sampling a latent (B, C, frames, h, w) takes."""
    model, network = patcher.model, patcher.model.diffusion_model
    patch = network.patch_size**2 * (network.patch_size_t or 1)
    rows = shape[0] * conditionings
    return Demand(
        patcher.model_size(),
        patcher.loaded_size(),
        int(model.memory_required([rows, *shape[1:]])),
        shape[-3] * shape[-2] * shape[-1] // patch + network.max_text_seq_length,
        network.dim,
        len(network.blocks),
        rows,
        model.get_dtype_inference(),
    )


def bytes_in_16_bits(model: torch.nn.Module) -> int:
    """Of a host's model, with every weight in 16 bits."""
    count = sum(tensor.numel() for tensor in model.state_dict().values())
    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            count += module.out_features * module.in_features - module.weight.numel()
    return 2 * count


def reset_peak(device: torch.device) -> None:
    """Count the device's peak from now on, where torch counts it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int | None:
    """Most that torch held on the device since `reset_peak`; None where it is not counted."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def room_for_cache(patcher: Any, demand: Demand) -> int | None:
    """Bytes that the delta cache may take on the GPU: half of what weights and sampling leave of what is free
    or held by models that the host can put off it. None where there is no GPU."""
    device = patcher.load_device
    if device.type in ("cpu", "mps"):
        return None
    management = comfy.model_management
    others = sum(
        loaded.model_loaded_memory()
        for loaded in management.current_loaded_models
        if loaded.device == device and loaded.model is not None and not patcher.is_clone(loaded.model)
    )
    coming = demand.weights - demand.loaded + demand.sampling
    return max(0, management.get_free_memory(device) + others - coming) // 2
