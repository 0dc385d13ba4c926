"""What a coming run takes of a device's memory, and what is left there for the delta cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch

from ..sixbit_core.delta_cache import bytes_in_host_memory, bytes_needed, bytes_on_gpu, resolve_location
from .linear import QuantizedLinear


@dataclass(frozen=True)
class Demand:
    """Memory of one run.

    Attributes:
        weights: bytes of the model; `loaded`, those on the device already.
        sampling: bytes that the host expects to need beside them.
        tokens: video and text tokens of one stream; `width`, their channels; `dtype`, what they are in.
        blocks: of the model; `streams`, conditionings times clips.
    """

    weights: int
    loaded: int
    sampling: int
    tokens: int
    width: int
    blocks: int
    streams: int
    dtype: torch.dtype

    def cache(self, location: str) -> int:
        """Bytes of a full delta cache in a location."""
        return bytes_needed(location, self.tokens, self.width, self.blocks, self.streams, self.dtype)

    def cache_on_gpu(self, location: str) -> int:
        """Those of them that are on the GPU."""
        return bytes_on_gpu(location, self.tokens, self.width, self.blocks, self.streams, self.dtype)

    def cache_in_host_memory(self, location: str) -> int:
        """Those that wait in host memory, as they are pinned there."""
        return bytes_in_host_memory(location, self.tokens, self.width, self.blocks, self.streams, self.dtype)

    def place(self, location: str, room: int | None) -> str:
        """Location "auto" settled for a room in bytes; None is a device without memory of its own."""
        return resolve_location(location, room, self.cache)


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
