"""From a checkpoint to a MODEL of the host."""

import logging
from collections.abc import Iterator

import comfy.model_management
import comfy.model_patcher
import comfy.supported_models
import torch
from comfy.patcher_extension import WrappersMP

from ..sixbit_core.checkpoint import Checkpoint, CheckpointError
from ..sixbit_core.quantize import QuantizeConfig, quantize_tensors
from ..sixbit_core.quantized import QuantizedWeight
from .bridge import MODEL_FACTS, ModelFacts, put_settings_
from .fit import KEY as FIT
from .fit import fit_clip
from .host_contract import PREVIEW_SEAMS, mismatches
from .model import ModelPlan, SixBitCogVideoX
from .packed import pack
from .precision import check_precision, float_type
from .previews import preview_colours
from .scales import Scales, transformer_config
from .settings import Settings

_TYPED = "patch_embed."  # the host casts what goes into these to the type of their weights


def load_checkpoint(
    checkpoint: Checkpoint, scales: Scales, quantize: bool = False, disable_dynamic: bool = False
) -> comfy.model_patcher.ModelPatcher:
    """A MODEL of an opened checkpoint.

    Args:
        scales: of its pipeline.
        quantize: quantize a 16-bit source in memory; one that is quantized is taken as it is.
        disable_dynamic: as the host asks for when it clones for several devices.

    Raises:
        CheckpointError: a tensor is missing, damaged or of a type that cannot be run.
    """
    check_precision(checkpoint)
    dtype, cast = _types(checkpoint)
    tensors, quantized = _read(checkpoint, quantize, dtype)
    config = transformer_config(checkpoint)
    family = checkpoint.family
    plan = ModelPlan(
        config, family.label, quantized, scales.snr_shift_scale, family.ofs_embed_dim is not None
    )
    model = _empty_model(plan, scales, dtype, cast)
    if (colours := preview_colours(checkpoint)) is not None and not mismatches(PREVIEW_SEAMS):
        model.latent_format.latent_rgb_factors = [list(row) for row in colours.factors]
        model.latent_format.latent_rgb_factors_bias = list(colours.bias)
    offload = comfy.model_management.unet_offload_device()
    patchers = comfy.model_patcher
    kind = patchers.ModelPatcher if disable_dynamic else patchers.CoreModelPatcher
    patcher = kind(model, comfy.model_management.get_torch_device(), offload)
    if config["patch_size_t"] and "patch_embed.proj.bias" not in tensors:  # the host's Linear always has one
        tensors["patch_embed.proj.bias"] = torch.zeros_like(tensors["patch_embed.proj.weight"][:, 0])
    result = model.diffusion_model.load_state_dict(tensors, strict=False, assign=True)
    if result.missing_keys or result.unexpected_keys:
        names = (*result.missing_keys, *result.unexpected_keys)
        raise CheckpointError(
            f"{checkpoint.path}: {names[0]} ({len(names)} in all) does not fit {family.label}"
        )
    model.diffusion_model.requires_grad_(False)
    patcher.set_attachments(MODEL_FACTS, ModelFacts(checkpoint, bool(quantized)))
    patcher.add_wrapper_with_key(
        WrappersMP.OUTER_SAMPLE, FIT, fit_clip
    )  # first: what follows sees the fit clip
    if quantized:
        put_settings_(patcher, Settings(six_bit=True))
    patcher.cached_patcher_init = (load_checkpoint, (checkpoint, scales, quantize))
    return patcher


def _empty_model(
    plan: ModelPlan, scales: Scales, dtype: torch.dtype, cast: torch.dtype | None
) -> SixBitCogVideoX:
    """The model on the meta device, so that no memory is touched before the weights come."""
    config = comfy.supported_models.CogVideoX_T2V(dict(plan.config))
    config.unet_config = {}
    config.latent_format.scale_factor = scales.vae
    config.latent_format.latent_channels = plan.config["out_channels"]
    config.set_inference_dtype(dtype, cast)
    return SixBitCogVideoX(config, plan, device=torch.device("meta"))


def _types(checkpoint: Checkpoint) -> tuple[torch.dtype, torch.dtype | None]:
    """The type weights are kept in, and the type the host computes in where that is another one."""
    management = comfy.model_management
    own = float_type(checkpoint)
    allowed = [torch.bfloat16, torch.float32]
    if checkpoint.family.native_dtype == "float16":
        allowed.insert(0, torch.float16)
    size = sum(info.nbytes // info.dtype.itemsize for info in checkpoint.infos.values())
    dtype = management.unet_dtype(model_params=size, supported_dtypes=allowed, weight_dtype=own)
    return dtype, management.unet_manual_cast(dtype, management.get_torch_device(), allowed)


def _read(
    checkpoint: Checkpoint, quantize: bool, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], dict[str, tuple[tuple[int, int], int]]]:
    """Tensors by native name, NVFP4 weights packed; and what is quantized."""
    tensors: dict[str, torch.Tensor] = {}
    quantized: dict[str, tuple[tuple[int, int], int]] = {}
    for name, item in _items(checkpoint, quantize):
        if isinstance(item, QuantizedWeight) and name.startswith(_TYPED):
            tensors[f"{name}.weight"] = item.dequantize(dtype)
        elif isinstance(item, QuantizedWeight):
            tensors[f"{name}.weight"] = pack(item)
            quantized[name] = ((item.out_features, item.in_features), item.hadamard)
        else:
            tensors[name] = item.to(dtype)
    return tensors, quantized


def _items(checkpoint: Checkpoint, quantize: bool) -> Iterator[tuple[str, QuantizedWeight | torch.Tensor]]:
    if quantize and not checkpoint.is_quantized:
        logging.info(f"6Bit: quantizing {checkpoint.path.name} in memory")
        yield from quantize_tensors(
            checkpoint, QuantizeConfig(), device=comfy.model_management.get_torch_device()
        )
        return
    weights = {f"{layer}.weight" for layer in checkpoint.formats}
    yield from ((layer, checkpoint.quantized(layer)) for layer in checkpoint.formats)
    for name in checkpoint.shapes:
        if name not in weights and not _is_stale_table(checkpoint, name):
            yield name, checkpoint.tensor(name)


def _is_stale_table(checkpoint: Checkpoint, name: str) -> bool:
    """A sincos table someone stored: it is computed for the size at hand instead."""
    return name == "patch_embed.pos_embedding" and not checkpoint.family.learned_positions
