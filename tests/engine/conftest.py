"""A CogVideoX pipeline folder with random weights, small enough for a test, as diffusers itself writes it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
)
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import LoadedModel, load_model
from transformers import T5Config, T5EncoderModel, T5Tokenizer

TOKENIZER = Path(__file__).resolve().parents[2] / "reference" / "pipeline" / "tokenizer"
TEXT_LENGTH = 16


def tiny_transformer(**changes: object) -> CogVideoXTransformer3DModel:
    """Two blocks of width 128, one head of 64 twice."""
    torch.manual_seed(0)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 64,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 32,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 4,
        "sample_height": 4,
        "sample_frames": 9,
        "max_text_seq_length": TEXT_LENGTH,
        "use_rotary_positional_embeddings": True,
    }
    return CogVideoXTransformer3DModel(**{**config, **changes})


def save_tiny_pipeline(folder: Path, transformer: CogVideoXTransformer3DModel) -> Path:
    """Write a whole pipeline folder around `transformer`."""
    torch.manual_seed(1)
    vae = AutoencoderKLCogVideoX(
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        scaling_factor=0.7,
    )
    encoder = T5EncoderModel(T5Config(vocab_size=512, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4))
    scheduler = CogVideoXDDIMScheduler(
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        clip_sample=False,
        snr_shift_scale=1.0,
    )
    tokenizer = T5Tokenizer.from_pretrained(TOKENIZER)
    CogVideoXPipeline(tokenizer, encoder, vae, transformer, scheduler).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "pipeline", tiny_transformer())


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LoadedModel:
    """The tiny pipeline in full precision and quantized, on the CPU."""
    model = load_model(str(tiny_folder), None, "full", find_machine("cpu"))
    model.use("search")
    return model
