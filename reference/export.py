"""Stage `export`: write the trained networks as a diffusers pipeline folder, in 16 bits.

Transformer and text encoder are stored in bfloat16, the transformer in shards of at most 15 MB; the
autoencoder in float16, whose rounding is finer and which no weight of it overflows. The text encoder's
config.json asks for float32: transformers loads a model in its stored precision while diffusers loads in
float32, and a pipeline loaded without a dtype must be of one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline
from safetensors.torch import load_file, save_file

from .models import make_scheduler
from .tokenizer import FOLDER, load_tokenizer
from .train_transformer import averaged_networks

SHARD = "15MB"


def export_pipeline(work: Path, folder: Path, tiny: bool = False, deep: bool = False) -> int:
    """Write the pipeline of `work`/vae and `work`/state.safetensors to `folder`.

    Returns:
        its size in bytes.
    """
    networks = averaged_networks(work, tiny, deep)
    vae = AutoencoderKLCogVideoX.from_pretrained(work / "vae", torch_dtype=torch.float16)
    pipeline = CogVideoXPipeline(
        tokenizer=load_tokenizer(),
        text_encoder=networks["text"],
        vae=vae,
        transformer=networks["transformer"].to(torch.bfloat16),
        scheduler=make_scheduler(),
    )
    pipeline.save_pretrained(folder, max_shard_size=SHARD)
    stored = folder / "text_encoder" / "model.safetensors"
    save_file({k: t.bfloat16() for k, t in load_file(stored).items()}, stored, metadata={"format": "pt"})
    for config in folder.glob("*/config.json"):
        values = json.loads(config.read_text())
        values.pop("_name_or_path", None)  # a path of the machine that trained
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    if folder.resolve() / "tokenizer" != FOLDER:  # as committed, with spiece.model
        shutil.copytree(FOLDER, folder / "tokenizer", dirs_exist_ok=True)
        shutil.copy(FOLDER.parent / "README.md", folder)  # the model card: name and licence
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
