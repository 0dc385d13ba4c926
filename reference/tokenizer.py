"""The reference model's tokenizer, as the pipeline uses it; `build_tokenizer` made its files."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import T5Tokenizer

FOLDER = Path(__file__).resolve().parent / "pipeline" / "tokenizer"
MAX_TOKENS = 32


def load_tokenizer(folder: Path = FOLDER) -> T5Tokenizer:
    """The tokenizer in `folder`, by default the committed one."""
    return T5Tokenizer.from_pretrained(folder)


def token_ids(tokenizer: T5Tokenizer, captions: list[str]) -> torch.Tensor:
    """[N, 32] int64 ids, padded as CogVideoX's pipeline pads: no mask is ever used."""
    return tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
