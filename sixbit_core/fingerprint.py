"""A short name for the weights themselves, to tie calibrations and quantized copies to a model.

    SHA-256 over (native name, shape, 64 bytes from the middle) of every tensor in the
    order of the names, first 32 hexadecimal digits

The same tensors give the same fingerprint from one file, from shards, under diffusers or
native names, and from memory; a quantized copy stores that of its source. It reads 64
bytes a tensor, so 11 GB take well under two seconds. The bytes are those stored: a bf16
and an fp16 file of one model are two models. A position table is left out, since some
loaders add one.
"""

import hashlib
from collections.abc import Callable, Mapping

import torch

SAMPLE_BYTES = 64
ADDED_TABLES = frozenset({"patch_embed.pos_embedding"})  # loaders may add one, in a type of their own


def sample_range(nbytes: int) -> tuple[int, int]:
    """Byte range of a tensor's data that the fingerprint reads; starts at a multiple of 8."""
    start = min(nbytes // 2, max(nbytes - SAMPLE_BYTES, 0)) // 8 * 8
    return start, min(start + SAMPLE_BYTES, nbytes)


def fingerprint(shapes: Mapping[str, tuple[int, ...]], sample: Callable[[str], bytes]) -> str:
    """Fingerprint of a checkpoint.

    Args:
        shapes: native name -> shape of every tensor.
        sample: the bytes at `sample_range` of the named tensor's data.

    Returns:
        32 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name in sorted(set(shapes) - ADDED_TABLES):
        digest.update(f"{name} {','.join(map(str, shapes[name]))}\n".encode())
        digest.update(sample(name))
    return digest.hexdigest()[:32]


def fingerprint_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """The same of tensors in memory (native names, unpatched, in the precision they are stored in)."""

    def sample(name: str) -> bytes:
        flat = tensors[name].detach().contiguous().reshape(-1)
        start, stop = sample_range(flat.numel() * flat.element_size())
        first, last = start // flat.element_size(), -(-stop // flat.element_size())
        return bytes(flat[first:last].cpu().view(torch.uint8).tolist())

    return fingerprint({name: tuple(t.shape) for name, t in tensors.items()}, sample)
