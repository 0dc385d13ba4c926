"""Every private thing of the host that this pack touches, with the signature it counts on.

A name in quotes is a key of the host's dicts, which its source names; the last part of another is an
attribute, a call with its parameters, or what the methods of a class set on its objects. Not listed:
`comfy_api.latest`, the public interface for nodes, without a part of which a node is left out (`extension`).

`mismatches` probes them when a model is loaded. Where one is not as listed, the MODEL is loaded by the host's
own loader in bf16, without the features of this pack, and one line says so. What a node's fields read of the
host goes through `offered`, so that every node registers whatever is missing. Tested against ComfyUI 0.33.
"""

import dis
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import torch

from ..sixbit_core.checkpoint import Checkpoint
from ..sixbit_core.errors import one_line
from .scales import Scales


@dataclass(frozen=True)
class Seam:
    """One thing of the host.

    Attributes:
        module: where it lies.
        name: attribute path in the module, or a key in quotes.
        parameters: names that its call must take, in any order; empty for a plain attribute.
        used_for: what stops working without it.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    used_for: str = ""


T = TypeVar("T")
_NONE = object()
Table = dict[tuple[str, str], dict[str, str]]  # (used for, module) -> attribute path -> parameters
_TEXT, _VAE = "the reference's text encoder", "the reference's VAE"
_CLIP_MODEL = "device dtype model_options"
_TOKENIZER = "embedding_directory tokenizer_data"
_VAE_FACTS = (
    "first_stage_model latent_channels latent_dim upscale_ratio upscale_index_formula downscale_ratio "
    "downscale_index_formula memory_used_decode memory_used_encode working_dtypes vae_dtype device "
    "output_device patcher size"
)
_MODEL: Table = {
    ("the model", "comfy.ldm.cogvideo.model"): {
        "CogVideoXTransformer3DModel.__init__": (
            "num_attention_heads attention_head_dim in_channels out_channels time_embed_dim ofs_embed_dim "
            "text_embed_dim num_layers sample_width sample_height sample_frames patch_size patch_size_t "
            "max_text_seq_length use_rotary_positional_embeddings device dtype operations"
        ),
        "CogVideoXTransformer3DModel.forward": "x timestep context ofs transformer_options",
        "CogVideoXTransformer3DModel.attention_head_dim": "",
        "CogVideoXTransformer3DModel.blocks": "",
        "CogVideoXTransformer3DModel.dim": "",
        "CogVideoXTransformer3DModel.max_text_seq_length": "",
        "CogVideoXTransformer3DModel.out_channels": "",
        "CogVideoXTransformer3DModel.patch_size": "",
        "CogVideoXTransformer3DModel.patch_size_t": "",
    },
    ("the model", "comfy.model_base"): {
        "BaseModel.__init__": "model_config model_type device unet_model",
        "BaseModel.apply_model": "x t",
        "BaseModel.get_dtype_inference": "",
        "BaseModel.diffusion_model": "",
        "CogVideoX.image_to_video": "",
        "ModelType.V_PREDICTION_DDPM": "",
    },
    ("the model", "comfy.supported_models"): {
        "CogVideoX_T2V.__init__": "unet_config",
        "CogVideoX_T2V.set_inference_dtype": "dtype manual_cast_dtype",
        "CogVideoX_T2V.latent_format": "",
        "CogVideoX_T2V.unet_config": "",
    },
    ("the model", "comfy.latent_formats"): {
        "LatentFormat.latent_channels": "",
        "LatentFormat.scale_factor": "",
    },
    ("the model", "comfy.model_patcher"): {
        "CoreModelPatcher": "",
        "ModelPatcher.__init__": "model load_device offload_device",
        "ModelPatcher.model_size": "",
        "ModelPatcher.set_attachments": "key attachment",
        "ModelPatcher.get_attachment": "key",
        "ModelPatcher.cached_patcher_init": "",
        "ModelPatcher.load_device": "",
        "ModelPatcher.model": "",
        "ModelPatcher.model_options": "",
    },
    ("choosing a type", "comfy.model_management"): {
        "unet_dtype": "model_params supported_dtypes weight_dtype",
        "unet_manual_cast": "weight_dtype inference_device",
        "get_torch_device": "",
        "unet_offload_device": "",
    },
    ("positions", "comfy.ldm.cogvideo.model"): {
        "CogVideoXTransformer3DModel._get_rotary_emb": "h w t device",
        "CogVideoXTransformer3DModel.patch_embed": "",
        "CogVideoXTransformer3DModel.use_rotary_positional_embeddings": "",
        "CogVideoXPatchEmbed.__init__": (
            "patch_size patch_size_t in_channels dim text_dim use_positional_embeddings "
            "use_learned_positional_embeddings device dtype operations"
        ),
        "CogVideoXPatchEmbed.forward": "text_embeds image_embeds",
        "CogVideoXPatchEmbed.dim": "",
        "CogVideoXPatchEmbed.patch_size": "",
        "CogVideoXPatchEmbed.patch_size_t": "",
    },
    ("the noise schedule", "comfy.model_base"): {"BaseModel.model_sampling": ""},
    ("the noise schedule", "comfy.model_sampling"): {
        "ModelSamplingDiscrete.__init__": "model_config",
        "ModelSamplingDiscrete.set_sigmas": "sigmas",
        "ModelSamplingDiscrete.sigma_max": "",
        "V_PREDICTION": "",
    },
    ("the host moves 6-bit weights", "comfy.ops"): {
        "CastWeightBiasOp.comfy_cast_weights": "",
        "CastWeightBiasOp.weight_function": "",
        "CastWeightBiasOp.bias_function": "",
        "cast_bias_weight": "s input dtype bias_dtype offloadable",
        "uncast_bias_weight": "s weight bias offload_stream",
    },
    ("stock LoRAs on 6-bit weights", "comfy.model_patcher"): {"get_key_weight": "model key"},
    ("fused blocks", "comfy.ldm.cogvideo.model"): {
        "optimized_attention": "heads",
        "CogVideoXBlock.num_heads": "",
        **{f"CogVideoXBlock.{name}": "" for name in ("norm1", "norm2", "norm_q", "norm_k")},
        **{f"CogVideoXLayerNormZero.{name}": "" for name in ("linear", "norm")},
    },
    ("fused blocks", "comfy.ldm.modules.attention"): {"get_attention_function": "name default"},
    ("fused blocks", "comfy.model_patcher"): {'"optimized_attention_override"': ""},
    ("interrupting", "comfy.ops"): {"run_every_op": ""},
    ("interrupting", "comfy.model_management"): {"throw_exception_if_processing_interrupted": ""},
    ("calibrating", "comfy.sample"): {
        "sample": (
            "model noise steps cfg sampler_name scheduler positive negative latent_image callback "
            "disable_pbar seed"
        ),
        "fix_empty_latent_channels": "model latent_image",
    },
    ("calibrating", "comfy.samplers"): {"KSampler.SAMPLERS": "", "KSampler.SCHEDULERS": ""},
    ("calibrating", "comfy.sd"): {
        "CLIP.tokenize": "text",
        "CLIP.encode_from_tokens_scheduled": "tokens",
    },
    ("showing progress", "comfy.utils"): {
        "ProgressBar.__init__": "total",
        "ProgressBar.update_absolute": "value total",
    },
    ("finding files", "folder_paths"): {
        "get_filename_list": "folder_name",
        "get_full_path": "folder_name filename",
        "get_folder_paths": "folder_name",
        "models_dir": "",
    },
    ("an empty latent", "comfy.model_management"): {"intermediate_device": ""},
    ("image to video", "comfy.model_base"): {
        "CogVideoX.concat_cond": "kwargs",
        '"concat_latent_image"': "",
    },
    ("image to video", "comfy.sd"): {"VAE.encode": "pixel_samples", "VAE.latent_channels": ""},
    ("image to video", "comfy.utils"): {"common_upscale": "samples width height upscale_method crop"},
    ("image to video", "node_helpers"): {"conditioning_set_values": "conditioning values"},
    ("1.5's pairs of frames", "comfy.sample"): {"prepare_noise": "latent_image seed"},
    ("a run's state", "comfy.samplers"): {
        "CFGGuider.outer_sample": (
            "noise latent_image sampler sigmas denoise_mask callback disable_pbar seed latent_shapes"
        ),
        "CFGGuider.cfg": "",
        "CFGGuider.conds": "",
        "CFGGuider.model_options": "",
        "CFGGuider.model_patcher": "",
        '"sample_sigmas"': "",
        '"sigmas"': "",
        '"context_handler"': "",
    },
    ("a run's state", "comfy.model_patcher"): {
        '"transformer_options"': "",
        "create_model_options_clone": "orig_model_options",
        "ModelPatcher.clone": "",
        "ModelPatcher.add_wrapper_with_key": "wrapper_type key wrapper",
        "ModelPatcher.remove_wrappers_with_key": "wrapper_type key",
        "ModelPatcher.get_additional_models_with_key": "key",
        "ModelPatcher.is_dynamic": "",
    },
    ("a run's state", "comfy.patcher_extension"): {
        "WrappersMP.OUTER_SAMPLE": "",
        "WrappersMP.PREPARE_SAMPLING": "",
        "WrappersMP.CALC_COND_BATCH": "",
        "WrappersMP.DIFFUSION_MODEL": "",
        "WrapperExecutor.__init__": "class_obj",
        "WrapperExecutor.class_obj": "",
    },
    ("skipping blocks", "comfy.ldm.cogvideo.model"): {
        "CogVideoXBlock.forward": (
            "hidden_states encoder_hidden_states temb image_rotary_emb transformer_options"
        ),
        **{f"CogVideoXBlock.{name}": "" for name in ("q", "k", "v", "attn_out", "ff_proj", "ff_out")},
    },
    ("telling conditionings apart", "comfy.samplers"): {"calc_cond_batch": "model conds", '"uuids"': ""},
    ("telling conditionings apart", "comfy.sampler_helpers"): {'"uuid"': ""},
    ("memory of a run", "comfy.sampler_helpers"): {'"cross_attn"': ""},
    ("memory of a run", "comfy.model_patcher"): {
        "ModelPatcher.object_patches": "",
        "ModelPatcher.patches": "",
    },
    ("compiling blocks", "comfy_api.torch_helpers.torch_compile"): {"TORCH_COMPILE_KWARGS": ""},
    ("room for the delta cache", "comfy.sampler_helpers"): {
        "prepare_sampling": "model noise_shape conds model_options",
    },
    ("room for the delta cache", "comfy.model_base"): {"BaseModel.memory_required": "input_shape"},
    ("room for the delta cache", "comfy.model_management"): {
        "current_loaded_models": "",
        "get_free_memory": "dev",
        "LoadedModel.device": "",
        "LoadedModel.model": "",
        "LoadedModel.model_loaded_memory": "",
    },
    ("room for a LoRA", "comfy.model_management"): {"free_memory": "memory_required device"},
    ("room for the delta cache", "comfy.model_patcher"): {
        "ModelPatcher.loaded_size": "",
        "ModelPatcher.is_clone": "other",
    },
}
_PARTS: Table = {
    (_TEXT, "comfy.sd1_clip"): {
        "SDTokenizer.__init__": (
            f"tokenizer_path pad_with_end embedding_size embedding_key tokenizer_class has_start_token "
            f"pad_to_max_length max_length min_length {_TOKENIZER}"
        ),
        "SD1Tokenizer.__init__": f"clip_name tokenizer {_TOKENIZER}",
        "SDClipModel.__init__": f"max_length textmodel_json_config special_tokens model_class {_CLIP_MODEL}",
        "SD1ClipModel.__init__": f"clip_name clip_model {_CLIP_MODEL}",
    },
    (_TEXT, "comfy.text_encoders.t5"): {"T5": ""},
    (_TEXT, "comfy.text_encoders.spiece_tokenizer"): {"SPieceTokenizer": ""},
    (_TEXT, "comfy.supported_models_base"): {"ClipTarget.__init__": "tokenizer clip"},
    (_TEXT, "comfy.sd"): {"CLIP.__init__": "target parameters state_dict model_options"},
    (_VAE, "comfy.sd"): {
        "VAE.__init__": "sd",
        "VAE.model_size": "",
        **{f"VAE.{name}": "" for name in _VAE_FACTS.split()},
    },
    (_VAE, "comfy.model_patcher"): {"ModelPatcher.__init__": "model load_device offload_device"},
    (_VAE, "comfy.ldm.cogvideo.vae"): {
        "AutoencoderKLCogVideoX.__init__": (
            "block_out_channels latent_channels layers_per_block groups temporal_compression_ratio"
        ),
        "AutoencoderKLCogVideoX._decode_batched": "z",
    },
    (_VAE, "comfy.model_management"): {"vae_device": "", "vae_offload_device": "", "intermediate_device": ""},
}
# Where one of the others is not as listed, a MODEL is loaded through this.
_FALLBACK: Table = {("a plain model", "comfy.sd"): {"load_diffusion_model_state_dict": "sd"}}
# Extras: without one of them it is missing, and nothing else.
_NODE: Table = {
    ("telling nodes apart", "comfy_execution.utils"): {
        "get_executing_context": "",
        "ExecutionContext.node_id": "",
    }
}
_TEXT_UNDER_NODES: Table = {
    **_NODE,
    ("text under a node", "server"): {
        "PromptServer.send_progress_text": "text node_id sid",
        "PromptServer.instance": "",
        "PromptServer.client_id": "",
    },
}
_PREVIEWS: Table = {
    ("live previews", "comfy.latent_formats"): {
        "LatentFormat.latent_rgb_factors": "",
        "LatentFormat.latent_rgb_factors_bias": "",
    }
}
_SAMPLING: Table = {
    ("telling schedules apart", "comfy.samplers"): {
        "KSampler.__init__": "model steps device sampler scheduler",
        "KSampler.sigmas": "",
        "KSAMPLER.__init__": "sampler_function",
        "KSAMPLER.sampler_function": "",
        "sampler_object": "name",
    }
}


def _seams(table: Table) -> tuple[Seam, ...]:
    return tuple(
        Seam(module, name, tuple(parameters.split()), used_for)
        for (used_for, module), things in table.items()
        for name, parameters in things.items()
    )


SEAMS, PARTS_SEAMS, TEXT_SEAMS = _seams(_MODEL), _seams(_PARTS), _seams(_TEXT_UNDER_NODES)
NODE_SEAMS, PREVIEW_SEAMS, FALLBACK_SEAMS = _seams(_NODE), _seams(_PREVIEWS), _seams(_FALLBACK)
SAMPLING_SEAMS = _seams(_SAMPLING)
EVERY_SEAM = (*SEAMS, *PARTS_SEAMS, *TEXT_SEAMS, *PREVIEW_SEAMS, *FALLBACK_SEAMS, *SAMPLING_SEAMS)


def mismatches(seams: tuple[Seam, ...] = SEAMS) -> list[str]:
    """One line for each seam that is not as listed; empty on a host that this pack knows."""
    return [line for seam in seams if (line := _probe(seam))]


def check_parts() -> None:
    """Raise ValueError where the text encoder and VAE of a small pipeline cannot be made on this host."""
    broken = mismatches(PARTS_SEAMS)
    if broken:
        raise ValueError(
            f"this ComfyUI is not one this pack knows ({broken[0]}): the bundled reference's text encoder "
            "and VAE cannot be loaded; use ComfyUI 0.33"
        )


def known_host() -> bool:
    """Whether the features of this pack can run here; a line in the log where they cannot."""
    broken = mismatches()
    if broken:
        logging.warning(f"6Bit: this ComfyUI is not one this pack knows ({broken[0]}); model left as it is")
    return not broken


def offered(read: Callable[[], Iterable[T]], instead: tuple[T, ...] = ()) -> list[T]:
    """What a field of a node offers, as the host lists it; `instead` where the host has no such list.

    The host asks all nodes one after the other as it starts: one that raised would take those after it away.
    """
    try:
        return list(read())
    except Exception as error:
        _say_once(
            f"this ComfyUI is not one this pack knows ({one_line(str(error))}); a node offers less choice"
        )
        return list(instead)


@cache
def _say_once(line: str) -> None:
    """The host asks for fields again and again."""
    logging.warning(f"6Bit: {line}")


def load_or_plain(checkpoint: Checkpoint, scales: Scales, quantize: bool) -> Any:
    """A MODEL with our features; on a host we do not know, a plain bf16 one, and a line that says so.

    Raises:
        ValueError: that host has no loader of its own that we know either.
    """
    if not (broken := mismatches()):
        from .loading import load_checkpoint

        return load_checkpoint(checkpoint, scales, quantize)
    if lost := mismatches(FALLBACK_SEAMS):
        raise ValueError(
            f"this ComfyUI is not one this pack knows ({broken[0]}), nor can it load a transformer plainly "
            f"({lost[0]}); use ComfyUI 0.33"
        )
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
        if seam.name.startswith('"'):
            return None if seam.name in _source(thing) else f"{seam.module} knows no {seam.name}"
        for part in seam.name.split("."):
            owner, thing = thing, getattr(thing, part, _NONE)
            if thing is _NONE and not (isinstance(owner, type) and _is_set(owner, part)):
                return f"{where} is gone"
    except (ImportError, OSError):
        return f"{where} is gone"
    if not seam.parameters:
        return None
    known = inspect.signature(thing).parameters
    lost = [name for name in seam.parameters if name not in known]
    return f"{where} takes no {', '.join(lost)}" if lost else None


def _source(module: ModuleType) -> str:
    return inspect.getsource(module)


def _is_set(kind: type, name: str) -> bool:
    """Whether a method of the class, or of one it derives from, sets the attribute."""
    methods = (method for base in kind.__mro__ for method in vars(base).values())
    codes = (code for method in methods if (code := getattr(method, "__code__", None)) is not None)
    return any(
        step.opname == "STORE_ATTR" and step.argval == name
        for code in codes
        if name in code.co_names
        for step in dis.get_instructions(code)
    )
