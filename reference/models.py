"""The networks of the reference model: CogVideoX's own classes, made small.

The bundled model is one shape of transformer; the other, "deep", has 42 narrow blocks and sincos
positions, as CogVideoX-2B has. A clip of 33x128x128 becomes 9x16x16 latents of 16 channels, 576 video
tokens of 2x2, beside 32 text tokens.
Noise follows CogVideoX: scaled linear betas, zero terminal SNR, v-prediction,

    x_t = sqrt(a_t) x_0 + sqrt(1 - a_t) e,   v = sqrt(a_t) e - sqrt(1 - a_t) x_0
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXDDIMScheduler, CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import nn
from transformers import T5Config, T5EncoderModel

from .tokenizer import MAX_TOKENS
from .world import FRAMES, SIZE

LATENT_CHANNELS = 16
LATENT_SIZE = SIZE // 8
LATENT_FRAMES = (FRAMES - 1) // 4 + 1
PATCH = 2
TEXT_WIDTH = 128


def make_vae(tiny: bool = False) -> AutoencoderKLCogVideoX:
    """The video autoencoder, 8x8x4, with fresh weights; `tiny` for tests."""
    return AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 16, 16) if tiny else (16, 32, 64, 64),
        latent_channels=LATENT_CHANNELS,
        layers_per_block=1,
        norm_num_groups=8,
        sample_height=SIZE,
        sample_width=SIZE,
        scaling_factor=1.0,
        force_upcast=False,
    )


def make_text_encoder(vocabulary: int, tiny: bool = False) -> T5EncoderModel:
    """The text encoder with fresh weights, trained together with the transformer."""
    config = T5Config(
        vocab_size=vocabulary,
        d_model=TEXT_WIDTH,
        d_kv=32,
        d_ff=384,
        num_layers=1 if tiny else 3,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
    )
    return T5EncoderModel(config)


def make_transformer(tiny: bool = False, deep: bool = False) -> CogVideoXTransformer3DModel:
    """The denoiser with fresh weights: zero modulations and output, so each block starts as identity.

    Args:
        tiny: two blocks of one head, for tests.
        deep: 42 blocks of 2 heads with sincos positions, in place of 12 of 4 with rotary ones.
    """
    heads, layers = (1, 2) if tiny else (2, 42) if deep else (4, 12)
    model = CogVideoXTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=64,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        time_embed_dim=128,
        text_embed_dim=TEXT_WIDTH,
        num_layers=layers,
        sample_width=LATENT_SIZE,
        sample_height=LATENT_SIZE,
        sample_frames=FRAMES,
        patch_size=PATCH,
        max_text_seq_length=MAX_TOKENS,
        spatial_interpolation_scale=1.0,
        use_rotary_positional_embeddings=not deep,
    )
    for block in model.transformer_blocks:
        for norm in (block.norm1, block.norm2):
            nn.init.zeros_(norm.linear.weight)
            nn.init.zeros_(norm.linear.bias)
    for linear in (model.norm_out.linear, model.proj_out):
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return model


def make_scheduler() -> CogVideoXDDIMScheduler:
    """CogVideoX's DDIM schedule, without a shift of the SNR."""
    return CogVideoXDDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=True,
        prediction_type="v_prediction",
        timestep_spacing="trailing",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0,
    )


def rotary_tables(head_dim: int, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [576, head_dim] float32: what the pipeline gives the transformer for a whole clip."""
    side = LATENT_SIZE // PATCH
    cos, sin = get_3d_rotary_pos_embed(
        embed_dim=head_dim,
        crops_coords=((0, 0), (side, side)),
        grid_size=(side, side),
        temporal_size=LATENT_FRAMES,
        device=device,
    )
    return cos.float(), sin.float()
