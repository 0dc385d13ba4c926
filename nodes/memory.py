"""What a coming run takes of a device's memory, and what is left there for the delta cache."""

from collections.abc import Sequence
from math import prod
from typing import Any

import comfy.model_management
import torch

from ..kernels import int8_backend
from ..sixbit_core.config import DMPQConfig
from ..sixbit_core.memory import formats_of
from .branches import KEY as LORAS
from .demand import BlockMemory, Demand
from .linear import QuantizedLinear
from .swap import fused, has_override, takes_torchs_attention

_NETWORK = "diffusion_model."  # what begins the name of an object patch on it


def block_memory(
    patcher: Any,
    model_options: dict[str, Any],
    dmpq: DMPQConfig | None,
    cached: bool,
    compiles: bool,
    text: int,
) -> BlockMemory:
    """What a run that decides over the blocks is known to take in them.

    Args:
        model_options: of the run.
        dmpq: activation formats; None leaves them as they come.
        cached: whether blocks may be skipped, and their residuals refreshed.
        compiles: whether the blocks or the model are to be compiled.
        text: tokens of the longest text.
    """
    if compiles or _patched(patcher) or not fused(dmpq, patcher.model.diffusion_model.blocks):
        return BlockMemory(text)
    options = model_options["transformer_options"]
    formats = "" if dmpq is None or LORAS in options else formats_of(dmpq, cached)
    alone = takes_torchs_attention(options) and int8_backend(patcher.load_device) == "triton"
    return BlockMemory(text, formats, has_override(options), alone)


def _patched(patcher: Any) -> bool:
    """Whether the host will change weights, maybe anew at each call, or others patch the network."""
    return bool(patcher.patches) or any(name.startswith(_NETWORK) for name in patcher.object_patches)


def sampling_bytes_of(model: Any, shape: Sequence[int], blocks: BlockMemory | None, host: float) -> int:
    """Bytes expected beside the weights of a model of the host.

    Args:
        shape: of the latents (B, C, frames, h, w), B all rows of the batch.
        blocks: what is known of a run; None where the model runs as it is.
        host: what the host expects.
    """
    if blocks is None:
        return int(host)
    network, dtype = model.diffusion_model, model.get_dtype_inference()
    tokens = tokens_of(network, shape, blocks.text)
    return blocks.bytes_beside(int(host), tokens, network.dim, dtype.itemsize, shape[0])


def tokens_of(network: Any, shape: Sequence[int], text: int) -> int:
    """Video and text tokens of one row of latents (B, C, frames, h, w), as the host pads them to patches."""
    sides = network.patch_size_t or 1, network.patch_size, network.patch_size
    return text + prod(-(-size // side) for size, side in zip(shape[-3:], sides, strict=True))


def demand_of(
    patcher: Any, shape: Sequence[int], conditionings: int, blocks: BlockMemory | None = None
) -> Demand:
    """What sampling a latent (B, C, frames, h, w) takes, with `blocks` as for `sampling_bytes_of`."""
    model, network = patcher.model, patcher.model.diffusion_model
    whole = [shape[0] * conditionings, *shape[1:]]
    return Demand(
        patcher.model_size(),
        patcher.loaded_size(),
        sampling_bytes_of(model, whole, blocks, model.memory_required(whole)),
        tokens_of(network, shape, network.max_text_seq_length if blocks is None else blocks.text),
        network.dim,
        len(network.blocks),
        whole[0],
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
