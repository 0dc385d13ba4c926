"""Text encoder and VAE of a small CogVideoX pipeline, as the host's CLIP and VAE.

The host's own loaders know one width of each (T5-XXL, the published VAE); these read the widths from the
pipeline's configurations. The VAE decodes two latent frames at a time, as diffusers does: its group norms see
those frames only, and another chunking gives another clip.
"""

import json
import logging
import math
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import comfy.sd
import comfy.text_encoders.t5
import torch
from comfy import sd1_clip
from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX
from comfy.supported_models_base import ClipTarget
from comfy.text_encoders.spiece_tokenizer import SPieceTokenizer
from safetensors.torch import load_file

_NAME = "t5"


def load_clip(folder: Path, length: int) -> comfy.sd.CLIP:
    """The host's CLIP of a pipeline's text_encoder and tokenizer.

    Args:
        folder: of the pipeline.
        length: tokens of a caption, padding included.
    """
    config = _config(folder / "text_encoder")
    model_file = folder / "tokenizer" / "spiece.model"

    class Tokenizer(sd1_clip.SDTokenizer):
        def __init__(
            self, embedding_directory: str | None = None, tokenizer_data: dict | None = None
        ) -> None:
            super().__init__(
                str(model_file),
                embedding_directory=embedding_directory,
                pad_with_end=False,
                embedding_size=config["d_model"],
                embedding_key=_NAME,
                tokenizer_class=SPieceTokenizer,
                has_start_token=False,
                pad_to_max_length=False,
                max_length=length,
                min_length=length,
                tokenizer_data=tokenizer_data or {},
            )

    class Tokenizers(sd1_clip.SD1Tokenizer):
        def __init__(
            self, embedding_directory: str | None = None, tokenizer_data: dict | None = None
        ) -> None:
            super().__init__(
                embedding_directory=embedding_directory,
                tokenizer_data=tokenizer_data or {},
                clip_name=_NAME,
                tokenizer=Tokenizer,
            )

    class Encoder(sd1_clip.SDClipModel):
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: dict | None = None) -> None:
            super().__init__(
                device=device,
                dtype=dtype,
                max_length=length,
                textmodel_json_config=dict(config),
                special_tokens={"end": config["eos_token_id"], "pad": config["pad_token_id"]},
                model_class=comfy.text_encoders.t5.T5,
                model_options=model_options or {},
            )

    class Encoders(sd1_clip.SD1ClipModel):
        def __init__(self, device: Any = "cpu", dtype: Any = None, model_options: dict | None = None) -> None:
            super().__init__(
                device=device,
                dtype=dtype,
                model_options=model_options or {},
                clip_name=_NAME,
                clip_model=Encoder,
            )

    weights = load_file(folder / "text_encoder" / "model.safetensors")
    size = sum(tensor.numel() for tensor in weights.values())
    options = {"dtype": torch.float32}
    return comfy.sd.CLIP(
        ClipTarget(Tokenizers, Encoders), parameters=size, state_dict=[weights], model_options=options
    )


class _Autoencoder(AutoencoderKLCogVideoX):
    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return self._decode_batched(z)


def load_vae(folder: Path) -> comfy.sd.VAE:
    """The host's VAE of a pipeline's vae folder."""
    config = _config(folder / "vae")
    vae = _bare_vae()
    vae.first_stage_model = _Autoencoder(
        block_out_channels=tuple(config["block_out_channels"]),
        latent_channels=config["latent_channels"],
        layers_per_block=config["layers_per_block"],
        groups=config["norm_num_groups"],
        temporal_compression_ratio=int(config["temporal_compression_ratio"]),
    ).eval()
    vae.latent_channels, vae.latent_dim = config["latent_channels"], 3
    vae.upscale_ratio = (lambda frames: max(0, frames * 4 - 3), 8, 8)
    vae.upscale_index_formula = (4, 8, 8)
    vae.downscale_ratio = (lambda frames: max(0, math.floor((frames + 3) / 4)), 8, 8)
    vae.downscale_index_formula = (4, 8, 8)
    widest = max(config["block_out_channels"])
    vae.memory_used_decode = lambda shape, dtype: (
        5 * widest * shape[2] * shape[3] * shape[4] * 256 * dtype.itemsize
    )
    vae.memory_used_encode = lambda shape, dtype: 5 * widest * shape[2] * shape[3] * shape[4] * dtype.itemsize
    vae.working_dtypes = [torch.float32]
    vae.device = comfy.model_management.vae_device()
    vae.output_device = comfy.model_management.intermediate_device()
    vae.vae_dtype = torch.float32
    vae.first_stage_model.load_state_dict(load_file(folder / "vae" / "diffusion_pytorch_model.safetensors"))
    vae.first_stage_model.requires_grad_(False)
    offload = comfy.model_management.vae_offload_device()
    vae.patcher = comfy.model_patcher.ModelPatcher(vae.first_stage_model, vae.device, offload)
    vae.size = None
    vae.model_size()
    return vae


def _bare_vae() -> comfy.sd.VAE:
    """A VAE of the host with every default set and no network in it, which the host warns of."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        return comfy.sd.VAE(sd={})
    finally:
        logging.disable(before)


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))
