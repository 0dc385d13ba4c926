"""Every private thing of the host that this pack touches, with the signature it counts on.

`mismatches` probes them when a model is loaded. Where one is not as listed, the MODEL is loaded by the host's
own loader in bf16, without the features of this pack, and one line says so. Tested against ComfyUI 0.33.
"""

import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch

from ..sixbit_core.checkpoint import Checkpoint
from .scales import Scales


@dataclass(frozen=True)
class Seam:
    """One thing of the host.

    Attributes:
        module: where it lies.
        name: attribute path in the module.
        parameters: names that its call must take, in any order; empty for a plain attribute.
        used_for: what stops working without it.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    used_for: str = ""


_TRANSFORMER = (
    "num_attention_heads attention_head_dim in_channels out_channels time_embed_dim ofs_embed_dim "
    "text_embed_dim num_layers sample_width sample_height sample_frames patch_size patch_size_t "
    "max_text_seq_length use_rotary_positional_embeddings device dtype operations"
)
_PATCH_EMBED = (
    "patch_size patch_size_t in_channels dim text_dim use_positional_embeddings "
    "use_learned_positional_embeddings device dtype operations"
)
_OUTER_SAMPLE = "noise latent_image sampler sigmas denoise_mask callback disable_pbar seed latent_shapes"
_BLOCK = "hidden_states encoder_hidden_states temb image_rotary_emb transformer_options"
SEAMS: tuple[Seam, ...] = (
    Seam("comfy.ops", "CastWeightBiasOp", (), "the host moves 6-bit weights"),
    Seam(
        "comfy.ops",
        "cast_bias_weight",
        ("s", "input", "dtype", "bias_dtype", "offloadable"),
        "the host moves 6-bit weights",
    ),
    Seam(
        "comfy.ops",
        "uncast_bias_weight",
        ("s", "weight", "bias", "offload_stream"),
        "the host moves 6-bit weights",
    ),
    Seam("comfy.ops", "run_every_op", (), "interrupting"),
    Seam(
        "comfy.ldm.cogvideo.model",
        "CogVideoXTransformer3DModel.__init__",
        tuple(_TRANSFORMER.split()),
        "the model",
    ),
    Seam(
        "comfy.ldm.cogvideo.model",
        "CogVideoXTransformer3DModel._get_rotary_emb",
        ("h", "w", "t", "device"),
        "positions",
    ),
    Seam(
        "comfy.ldm.cogvideo.model", "CogVideoXPatchEmbed.__init__", tuple(_PATCH_EMBED.split()), "positions"
    ),
    Seam(
        "comfy.ldm.cogvideo.model",
        "CogVideoXPatchEmbed.forward",
        ("text_embeds", "image_embeds"),
        "positions",
    ),
    Seam("comfy.ldm.cogvideo.model", "CogVideoXBlock.forward", tuple(_BLOCK.split()), "skipping blocks"),
    Seam(
        "comfy.model_base",
        "BaseModel.__init__",
        ("model_config", "model_type", "device", "unet_model"),
        "the model",
    ),
    Seam("comfy.model_base", "CogVideoX.concat_cond", ("kwargs",), "image to video"),
    Seam("comfy.model_base", "ModelType.V_PREDICTION_DDPM", (), "the model"),
    Seam("comfy.model_sampling", "ModelSamplingDiscrete.set_sigmas", ("sigmas",), "the noise schedule"),
    Seam("comfy.model_sampling", "V_PREDICTION", (), "the noise schedule"),
    Seam("comfy.supported_models", "CogVideoX_T2V.__init__", ("unet_config",), "the model"),
    Seam(
        "comfy.supported_models",
        "CogVideoX_T2V.set_inference_dtype",
        ("dtype", "manual_cast_dtype"),
        "the model",
    ),
    Seam(
        "comfy.model_management",
        "unet_dtype",
        ("model_params", "supported_dtypes", "weight_dtype"),
        "choosing a type",
    ),
    Seam(
        "comfy.model_management", "unet_manual_cast", ("weight_dtype", "inference_device"), "choosing a type"
    ),
    Seam("comfy.model_patcher", "CoreModelPatcher", (), "the model"),
    Seam("comfy.model_patcher", "create_model_options_clone", ("orig_model_options",), "a run's state"),
    Seam(
        "comfy.model_patcher", "ModelPatcher.add_wrapper_with_key", ("wrapper_type", "key", "wrapper"), "runs"
    ),
    Seam("comfy.model_patcher", "ModelPatcher.set_attachments", ("key", "attachment"), "runs"),
    Seam("comfy.patcher_extension", "WrappersMP.OUTER_SAMPLE", (), "a run's state"),
    Seam("comfy.patcher_extension", "WrappersMP.DIFFUSION_MODEL", (), "skipping blocks"),
    Seam("comfy_api.torch_helpers.torch_compile", "TORCH_COMPILE_KWARGS", (), "compiling blocks"),
    Seam("comfy.patcher_extension", "WrappersMP.CALC_COND_BATCH", (), "telling conditionings apart"),
    Seam("comfy.samplers", "calc_cond_batch", ("model", "conds"), "telling conditionings apart"),
    Seam("comfy.patcher_extension", "WrappersMP.PREPARE_SAMPLING", (), "room for the delta cache"),
    Seam(
        "comfy.sampler_helpers",
        "prepare_sampling",
        ("model", "noise_shape", "conds", "model_options"),
        "room for the delta cache",
    ),
    Seam("comfy.model_base", "BaseModel.memory_required", ("input_shape",), "room for the delta cache"),
    Seam("comfy.model_management", "current_loaded_models", (), "room for the delta cache"),
    Seam("comfy.model_management", "get_free_memory", ("dev",), "room for the delta cache"),
    Seam("comfy.model_management", "LoadedModel.model_loaded_memory", (), "room for the delta cache"),
    Seam("comfy.model_patcher", "ModelPatcher.loaded_size", (), "room for the delta cache"),
    Seam("comfy.model_patcher", "ModelPatcher.is_clone", ("other",), "room for the delta cache"),
    Seam("comfy.samplers", "CFGGuider.outer_sample", tuple(_OUTER_SAMPLE.split()), "a run's state"),
    Seam("comfy.sample", "prepare_noise", ("latent_image", "seed"), "1.5's pairs of frames"),
)


def mismatches(seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """One line for each seam that is not as listed; empty on a host that this pack knows."""
    return [line for seam in seams if (line := _probe(seam))]


def known_host() -> bool:
    """Whether the features of this pack can run here; a line in the log where they cannot."""
    broken = mismatches()
    if broken:
        logging.warning(f"6Bit: this ComfyUI is not one this pack knows ({broken[0]}); model left as it is")
    return not broken


def load_or_plain(checkpoint: Checkpoint, scales: Scales, quantize: bool) -> Any:
    """A MODEL with our features; on a host we do not know, a plain bf16 one, and a line that says so."""
    broken = mismatches()
    if not broken:
        from .fit import KEY, fit_clip
        from .loading import load_checkpoint

        model = load_checkpoint(checkpoint, scales, quantize)
        model.add_wrapper_with_key("outer_sample", KEY, fit_clip)
        return model
    logging.warning(
        f"6Bit: this ComfyUI is not one this pack knows ({broken[0]}; {len(broken)} in all): "
        f"{checkpoint.path.name} is loaded in bf16 by ComfyUI itself, without the features of this pack"
    )
    return _plain(checkpoint)


def _plain(checkpoint: Checkpoint) -> Any:
    import comfy.sd

    layers = set(checkpoint.formats)
    weights = {f"{layer}.weight" for layer in layers}
    tensors = {f"{layer}.weight": checkpoint.quantized(layer).dequantize(torch.bfloat16) for layer in layers}
    for name in checkpoint.shapes:
        if name not in weights:
            tensors[name] = checkpoint.tensor(name).to(torch.bfloat16)
    return comfy.sd.load_diffusion_model_state_dict(tensors)


def _probe(seam: Seam) -> str | None:
    where = f"{seam.module}.{seam.name}"
    try:
        thing = importlib.import_module(seam.module)
        for part in seam.name.split("."):
            thing = getattr(thing, part)
    except (ImportError, AttributeError):
        return f"{where} is gone"
    if not seam.parameters:
        return None
    known = inspect.signature(thing).parameters
    lost = [name for name in seam.parameters if name not in known]
    return f"{where} takes no {', '.join(lost)}" if lost else None
