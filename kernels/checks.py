"""Checks of arguments that several ops share. One line each: what was needed, what came, what to do."""

from __future__ import annotations

import torch

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NVFP4_BLOCK = 16
LARGEST_HADAMARD = 128


def check_float(name: str, x: torch.Tensor, ndim: int | None) -> None:
    """Refuse `x` unless it is a float16, bfloat16 or float32 tensor of `ndim` dimensions (None: any >= 1).

    Raises:
        ValueError: if it is not.
    """
    if x.dtype not in FLOAT_DTYPES or x.ndim == 0 or (ndim is not None and x.ndim != ndim):
        rank = "a" if ndim is None else f"a {ndim}-D"
        raise ValueError(f"{name} needs {rank} float16, bfloat16 or float32 tensor, got {describe(x)}")


def check_nvfp4_columns(name: str, columns: int) -> None:
    """Refuse a row length that NVFP4 cannot hold.

    Raises:
        ValueError: unless `columns` is a positive multiple of 16.
    """
    if columns == 0 or columns % NVFP4_BLOCK:
        raise ValueError(f"{name} needs K to be a positive multiple of {NVFP4_BLOCK}, got K = {columns}")


def check_nvfp4(name: str, data: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> None:
    """Refuse an NVFP4 triple whose types or shapes do not belong together.

    Raises:
        ValueError: unless `data` is (N, K/2) uint8, `scale` (N, K/16) float8_e4m3fn and `global_scale`
            float32 of shape () or (N, 1).
    """
    if data.dtype != torch.uint8 or data.ndim != 2:
        raise ValueError(f"{name} needs data as a 2-D uint8 tensor, two values a byte, got {describe(data)}")
    rows, columns = data.shape[0], data.shape[1] * 2
    check_nvfp4_columns(name, columns)
    if scale.dtype != torch.float8_e4m3fn or scale.shape != (rows, columns // NVFP4_BLOCK):
        expected = (rows, columns // NVFP4_BLOCK)
        raise ValueError(f"{name} needs scale as row-major float8_e4m3fn {expected}, got {describe(scale)}")
    if global_scale.dtype != torch.float32 or global_scale.shape not in ((), (rows, 1)):
        raise ValueError(
            f"{name} needs global_scale as float32 () or {(rows, 1)}, got {describe(global_scale)}"
        )


def check_block(name: str, columns: int, block: int) -> None:
    """Refuse a Hadamard block that cannot tile a row of `columns` values; 0 and 1 mean no rotation.

    Raises:
        ValueError: unless `block` is 0 or a power of two, at most 128, that divides `columns`.
    """
    if not 0 <= block <= LARGEST_HADAMARD or block & (block - 1) or (block and columns % block):
        raise ValueError(
            f"{name} needs a power of two that divides K = {columns} as block, got {block}; "
            f"the largest is {LARGEST_HADAMARD}"
        )


def describe(x: torch.Tensor) -> str:
    """Shape and dtype for an error message."""
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def check_streams(name: str, text: torch.Tensor, video: torch.Tensor) -> None:
    """Refuse two streams of tokens that are not those of one block.

    Raises:
        ValueError: unless `text` is (B, T, D) and `video` (B, V, D), of one float type; T may be 0.
    """
    check_float(name, video, ndim=3)
    batch, _, width = video.shape
    if text.ndim != 3 or text.dtype != video.dtype or (text.shape[0], text.shape[2]) != (batch, width):
        kind = str(video.dtype).removeprefix("torch.")
        raise ValueError(f"{name} needs text as {kind} {(batch, 'T', width)}, got {describe(text)}")


def check_shape(name: str, what: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Refuse `x`, called `what`, unless it is a float16, bfloat16 or float32 tensor of this shape.

    Raises:
        ValueError: if it is not.
    """
    if x.dtype not in FLOAT_DTYPES or tuple(x.shape) != shape:
        raise ValueError(f"{name} needs {what} as a float tensor {shape}, got {describe(x)}")
