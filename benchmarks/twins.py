"""Twins of a pipeline with outliers: the same function in full precision, other activations inside.

In every block some channels are multiplied by s where they are made and divided by s where they are read:

    after a norm   norm weight and bias, and the adaLN linear's shifts of video and text, times s; the
                   columns of q, k and v, or of the first feed-forward, divided by s
    v              rows and bias of v times s, the columns of the attention's output divided by s

s is a power of two, so that 16-bit weights stay exact. Real models have such channels; the reference has few.
"""

import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SHARE = 64  # one channel in so many is scaled


def write_twin(source: Path, target: Path, factor: float, seed: int = 0) -> Path:
    """Write a twin of the pipeline folder `source` to `target`, unless it stands there.

    Args:
        factor: s, a power of two.
        seed: of the channels.

    Raises:
        ValueError: another factor.
    """
    if math.frexp(factor)[0] != 0.5:
        raise ValueError(f"a twin's factor must be a power of two, got {factor:g}")
    if (target / "model_index.json").is_file():
        return target
    beside = target.with_name(f"{target.name}.part")
    shutil.copytree(source, beside, dirs_exist_ok=True)
    files = sorted((beside / "transformer").glob("*.safetensors"))
    shards = [load_file(file) for file in files]
    tensors = {name: (shard, shard[name]) for shard in shards for name in shard}
    scaled = _scaled({name: tensor for name, (_, tensor) in tensors.items()}, factor, seed)
    for name, tensor in scaled.items():
        tensors[name][0][name] = tensor
    for file, shard in zip(files, shards, strict=True):
        save_file({name: tensor.contiguous() for name, tensor in shard.items()}, file, {"format": "pt"})
    beside.rename(target)
    return target


def _scaled(tensors: dict[str, torch.Tensor], factor: float, seed: int) -> dict[str, torch.Tensor]:
    """The tensors that change, by diffusers name."""
    generator, changed = torch.Generator().manual_seed(seed), {}
    blocks = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("transformer_blocks.")})

    def times(name: str, scale: torch.Tensor, dim: int = 0) -> None:
        if name in tensors:  # a bias or an affine norm may be lacking
            shape = [-1 if d == dim else 1 for d in range(tensors[name].ndim)]
            changed[name] = (tensors[name].float() * scale.view(shape)).to(tensors[name].dtype)

    for block in blocks:
        at = f"transformer_blocks.{block}"
        width = tensors[f"{at}.attn1.to_q.weight"].shape[1]
        for norm, readers in (
            ("norm1", ("attn1.to_q", "attn1.to_k", "attn1.to_v")),
            ("norm2", ("ff.net.0.proj",)),
        ):
            scale = _channels(width, factor, generator)
            one = torch.ones(width)
            shifts = torch.cat(
                [scale, one, one, scale, one, one]
            )  # shift, scale, gate of video, then of text
            for part in ("weight", "bias"):
                times(f"{at}.{norm}.norm.{part}", scale)
                times(f"{at}.{norm}.linear.{part}", shifts)
            for reader in readers:
                times(f"{at}.{reader}.weight", 1 / scale, dim=1)
        scale = _channels(width, factor, generator)
        value = changed[f"{at}.attn1.to_v.weight"]
        changed[f"{at}.attn1.to_v.weight"] = (value.float() * scale[:, None]).to(value.dtype)
        times(f"{at}.attn1.to_v.bias", scale)
        times(f"{at}.attn1.to_out.0.weight", 1 / scale, dim=1)
    return changed


def _channels(width: int, factor: float, generator: torch.Generator) -> torch.Tensor:
    """(width,) 1, and `factor` at random places."""
    scale = torch.ones(width)
    scale[torch.randperm(width, generator=generator)[: max(1, width // SHARE)]] = factor
    return scale
