"""NVFP4: E2M1 values, one E4M3 scale per 16 of them along K, one float32 scale above. The contract.

    value[n, k]  = e2m1[n, k] * (scale[n, k // 16] * global_scale)          (decode scales only)
    global_scale = amax / (448 * 6), over the tensor or over each row
    scale        = E4M3(amax_block / 6 / global_scale)
    e2m1         = E2M1(x / (scale * global_scale)), ties to the even code, saturating at 6

The format is NVIDIA's (OCP Microscaling values, E4M3 block scales). E2M1 has the magnitudes
0, 0.5, 1, 1.5, 2, 3, 4, 6 in codes 0 to 7; bit 3 is the sign. Two codes share a byte, the EVEN element in
the HIGH nibble. Scales are plain row-major here; `scale_tiles` has the 128x4 order of cuBLAS and files.

What is not finite: the global scale of the row (or tensor) that holds it becomes NaN and its codes zero, so
that everything decoded from it is NaN and never a plausible number. Nothing is read back from a device.
"""

from __future__ import annotations

import torch

from .checks import NVFP4_BLOCK, check_float, check_nvfp4, check_nvfp4_columns, describe
from .dispatch import Op

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MAX_CODE = 0x7E
SCALE_RANGE = E4M3_MAX * E2M1_MAX
SMALLEST_SCALE = 2.0**-126  # a global scale below this counts as zero, which keeps denormals out
SEARCH_OFFSETS = (0, 1, -1, 2, -2, 3, -3, 4)  # steps of the E4M3 code; the first wins a tie
ROUNDINGS = ("nearest", "four-over-six", "search")

_CHUNK = 1 << 18  # elements quantized at once: keeps the temporaries of the search in a CPU's cache


@Op
def quantize_nvfp4(
    x: torch.Tensor,
    rounding: str = "nearest",
    per_row: bool = False,
    global_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize the rows of `x` to NVFP4.

    Args:
        x: (M, K) float16, bfloat16 or float32, any strides, K a multiple of 16.
        rounding: how a block scale is chosen. "nearest": from amax / 6. "four-over-six": the better of
            amax / 6 and amax / 4. "search": the best of the eight E4M3 codes from 3 below to 4 above the
            nearest one. Better means the lower squared error of the block.
        per_row: one global scale per row instead of one for the tensor.
        global_scale: float32 () or (M, 1), positive, to use instead of amax / 2688 (q, k and v share one).

    Returns:
        data: (M, K/2) uint8.
        scale: (M, K/16) float8_e4m3fn, never NaN and never negative.
        global_scale: float32 () or, per row, (M, 1); 1.0 for zeros, NaN for what is not finite.

    Raises:
        ValueError: wrong type, rank or K, an unknown rounding, or a global scale of another shape.
    """
    check_quantize(x, rounding, global_scale)
    x = x.float()
    blocks = x.reshape(x.shape[0], -1, NVFP4_BLOCK)
    block_amax = blocks.abs().amax(dim=2)
    by_row = per_row if global_scale is None else global_scale.ndim == 2
    amax = block_amax.amax(dim=1, keepdim=True) if by_row else block_amax.amax()
    global_scale = global_scale_of(amax, global_scale)
    finite = torch.isfinite(global_scale)

    rows = max(1, _CHUNK // x.shape[1])
    chunks = [
        _quantize_blocks(
            blocks[i : i + rows],
            block_amax[i : i + rows],
            global_scale[i : i + rows] if global_scale.ndim == 2 else global_scale,
            rounding,
        )
        for i in range(0, x.shape[0], rows)
    ]
    data = torch.where(finite, torch.cat([data for data, _ in chunks]), 0)
    codes = torch.where(finite, torch.cat([codes for _, codes in chunks]), 0)
    return data, codes.view(torch.float8_e4m3fn), global_scale


@Op
def dequantize_nvfp4(
    data: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Decode NVFP4 in float32, then round once to `dtype`.

    Args:
        data: (N, K/2) uint8.
        scale: (N, K/16) float8_e4m3fn; a NaN code makes its block NaN.
        global_scale: float32 () or (N, 1).
        dtype: float16, bfloat16 or float32.

    Returns:
        (N, K) of `dtype`.

    Raises:
        ValueError: if the three do not belong together.
    """
    check_nvfp4("dequantize_nvfp4", data, scale, global_scale)
    pairs = byte_pairs(data.device).index_select(0, data.reshape(-1).int())
    values = pairs.view(torch.float32).view(*scale.shape, NVFP4_BLOCK)
    values *= (scale.float() * global_scale)[..., None]
    return values.view(data.shape[0], -1).to(dtype)


def global_scale_of(amax: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor:
    """The global scale for this amax, or the given one; NaN where amax or the given one is of no use."""
    scale = _divide(amax, SCALE_RANGE) if given is None else given
    usable = torch.isfinite(amax) & torch.isfinite(scale)
    if given is None:
        scale = torch.where(scale >= SMALLEST_SCALE, scale, 1.0)
    return torch.where(usable & (scale >= SMALLEST_SCALE), scale, torch.nan)


def encode_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """E2M1 codes (uint8, 0 to 15) of float32 values: nearest, ties to the even code, saturating at 6."""
    rounded = _round_e2m1_(scaled.abs())
    # From 1 upward the code is the float's exponent and first mantissa bit; below, twice the value.
    code = torch.where(rounded < 1, (rounded * 2).int(), (rounded.view(torch.int32) >> 22) - 252)
    return code.to(torch.uint8) | (torch.signbit(scaled).to(torch.uint8) << 3)


def round_e2m1(scaled: torch.Tensor) -> torch.Tensor:
    """What `decode_e2m1(encode_e2m1(scaled))` is, in a third of the passes."""
    return _round_e2m1_(scaled.abs()).copysign_(scaled)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Float32 values of E2M1 codes 0 to 15, of any integer type."""
    codes = codes.int()
    m = codes & 7
    magnitude = torch.where(m < 2, m * 0.5, ((2 + (m & 1)) << (m >> 1)) * 0.25)
    return torch.where(codes < 8, magnitude, -magnitude)


def _quantize_blocks(
    blocks: torch.Tensor, amax: torch.Tensor, global_scale: torch.Tensor, rounding: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed values (R, K/2) and scale codes (R, K/16), both uint8, of blocks (R, K/16, 16)."""
    codes = _scale_codes(amax, E2M1_MAX, global_scale)
    if rounding == "four-over-six":
        codes = _best(blocks, global_scale, [codes, _scale_codes(amax, 4.0, global_scale)])
    elif rounding == "search":
        shifted = [(codes.int() + offset).clamp_(0, E4M3_MAX_CODE) for offset in SEARCH_OFFSETS]
        codes = _best(blocks, global_scale, [c.to(torch.uint8) for c in shifted])
    total = _total(codes, global_scale)
    scaled = torch.where(total[..., None] > 0, _scaled(blocks, total), 0.0)
    e2m1 = encode_e2m1(scaled).view(blocks.shape[0], -1, 2)
    return (e2m1[..., 0] << 4) | e2m1[..., 1], codes


def _best(blocks: torch.Tensor, global_scale: torch.Tensor, candidates: list[torch.Tensor]) -> torch.Tensor:
    """Of the candidate codes of each block, the first of least squared error."""
    magnitude = blocks.abs()
    best_codes, best_error = candidates[0], None
    for codes in candidates:
        total = _total(codes, global_scale)
        rounded = _round_e2m1_(_scaled(magnitude, total)).mul_(total[..., None])
        error = rounded.sub_(magnitude).square_().sum(dim=2)
        if best_error is None:
            best_error = error
            continue
        better = error < best_error
        best_codes = torch.where(better, codes, best_codes)
        best_error = torch.where(better, error, best_error)
    return best_codes


def _round_e2m1_(a: torch.Tensor) -> torch.Tensor:
    """Round magnitudes to E2M1 in place: nearest, ties to even, saturating at 6.

    The step between neighbours is half the value's power of two, and 0.5 below 1. Adding and subtracting
    1.5 * 2**23 steps leaves a whole number of them, rounded half to even.
    """
    a.clamp_max_(E2M1_MAX)
    power = (a.view(torch.int32) & 0x7F800000).view(torch.float32)
    steps = power.clamp_min_(1.0).mul_(0.5 * 1.5 * 2**23)
    return a.add_(steps).sub_(steps)


def _scale_codes(amax: torch.Tensor, largest: float, global_scale: torch.Tensor) -> torch.Tensor:
    """E4M3 codes of amax / largest / global_scale, saturating at 448."""
    scale = (_divide(amax, largest) / global_scale).clamp_max_(E4M3_MAX)
    return scale.to(torch.float8_e4m3fn).view(torch.uint8)


def _total(codes: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """What an E2M1 value of the block is multiplied by."""
    return codes.view(torch.float8_e4m3fn).float() * global_scale


def _scaled(blocks: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """blocks / total; zero, of either sign, where a block's scale is zero."""
    return blocks / torch.where(total > 0, total, torch.inf)[..., None]


def _divide(x: torch.Tensor, divisor: float) -> torch.Tensor:
    """IEEE division. On CUDA, dividing by a Python number multiplies by its reciprocal: one bit off."""
    return x / torch.full((), divisor, dtype=x.dtype, device=x.device)


def byte_pairs(device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(256,): the two values of each byte in `dtype`, as one integer, so that one gather fetches both."""
    byte = torch.arange(256, device=device)
    pairs = torch.stack([decode_e2m1(byte >> 4), decode_e2m1(byte & 15)], dim=1).to(dtype)
    return pairs.view(torch.int64 if dtype.itemsize == 4 else torch.int32).view(256)


def check_quantize(x: torch.Tensor, rounding: str, global_scale: torch.Tensor | None) -> None:
    check_float("quantize_nvfp4", x, ndim=2)
    check_nvfp4_columns("quantize_nvfp4", x.shape[1])
    if x.shape[0] == 0:
        raise ValueError("quantize_nvfp4 needs at least one row, got none")
    if rounding not in ROUNDINGS:
        raise ValueError(f"quantize_nvfp4 needs rounding as one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    if global_scale is not None and (
        global_scale.dtype != torch.float32 or global_scale.shape not in ((), (x.shape[0], 1))
    ):
        expected = f"() or {(x.shape[0], 1)}"
        raise ValueError(
            f"quantize_nvfp4 needs global_scale as float32 {expected}, got {describe(global_scale)}"
        )
