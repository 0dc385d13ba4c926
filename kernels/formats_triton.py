"""Device functions of the number formats, shared by the Triton kernels.

Written in integers and float32 arithmetic that rounds as PyTorch does, since the interpreter's cast to
float8 is wrong and its libdevice lacks `rint`. Adding and subtracting 1.5 * 2**23 rounds a float32 below
2**22 half to even.
"""

import triton
import triton.language as tl

LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)
SMALLEST_SCALE = tl.constexpr(2.0**-126)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23


@triton.jit
def round_half_even(x):
    return (x + _ROUND) - _ROUND


@triton.jit
def finite_abs(x):
    """|x|, with NaN as infinity, since maxima do not carry NaN."""
    magnitude = tl.abs(x)
    return tl.where(magnitude <= LARGEST_FLOAT, magnitude, float("inf"))


@triton.jit
def scale_from_amax(amax, LARGEST: tl.constexpr):
    """amax / LARGEST; 1 for zeros, NaN where amax is not finite."""
    scale = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    scale = tl.where(scale >= SMALLEST_SCALE, scale, 1.0)
    return tl.where(amax <= LARGEST_FLOAT, scale, float("nan"))


@triton.jit
def int8_scales(amax, FACTOR: tl.constexpr):
    """(scale, inverse) of rows of this largest magnitude: amax / 127 * FACTOR, and 127 / amax.

    1 and 0 for rows of zeros, NaN and 0 where amax is not finite.
    """
    quotient = tl.div_rn(amax, tl.full(amax.shape, 127.0, tl.float32))
    finite = amax <= LARGEST_FLOAT
    used = finite & (quotient >= SMALLEST_SCALE)
    scale = tl.where(finite, tl.where(used, quotient * FACTOR, 1.0), float("nan"))
    inverse = tl.div_rn(tl.full(amax.shape, 127.0, tl.float32), tl.where(used, amax, 1.0))
    return scale, tl.where(used, inverse, 0.0)


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(x, AXIS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The largest |x| along an axis, NaN or infinity if one is not finite. (A reduction of our own takes the
    interpreter seconds.)"""
    if INTERPRETED:
        return tl.max(finite_abs(x), axis=AXIS)
    else:
        return tl.reduce(tl.abs(x), AXIS, _larger_or_nan)


@triton.jit
def int8_of_product(x, inverse):
    """x * inverse, the product exact, rounded half to even: the sum has the integer in its low byte."""
    return tl.fma(x, inverse, _ROUND).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def encode_e4m3(x):
    """int32 codes of values in [0, 448], nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponent bias 127 to 7, 3 bits of mantissa
    subnormal = round_half_even(x * 512.0).to(tl.int32)
    return tl.where(x < 0.015625, subnormal, normal)


@triton.jit
def decode_e4m3(code):
    """float32 of int32 codes 0 to 255. Subnormals by a product and a sum, both exact: GPUs convert integers
    at an eighth of the rate."""
    magnitude = code & 0x7F
    normal = ((magnitude + 960) << 20).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, normal * 2.0 - 0.015625, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 128, -value, value)


@triton.jit
def round_e2m1(a):
    """Round magnitudes to E2M1, ties to the even code, saturating at 6."""
    a = tl.minimum(a, 6.0)
    power = (a.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    steps = tl.maximum(power, 1.0) * 6291456.0  # half of 1.5 * 2**23
    return (a + steps) - steps


@triton.jit
def encode_e2m1(scaled):
    """int32 codes 0 to 15 of float32 values."""
    rounded = round_e2m1(tl.abs(scaled))
    normal = (rounded.to(tl.int32, bitcast=True) >> 22) - 252
    code = tl.where(rounded < 1.0, (rounded * 2.0).to(tl.int32), normal)
    return code | ((scaled.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def decode_e2m1(code):
    """float32 of int32 codes 0 to 15; the subnormal as above."""
    magnitude = code & 7
    normal = ((magnitude + 252) << 22).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, normal * 2.0 - 1.0, normal)
    return tl.where(code >= 8, -value, value)


@triton.jit
def hadamard_signs(HADAMARD: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr):
    """(BLOCK_K, BLOCK_K) of DTYPE: the sign matrix of HADAMARD on the diagonal, zero elsewhere."""
    i = tl.arange(0, BLOCK_K)[:, None]
    j = tl.arange(0, BLOCK_K)[None, :]
    parity = i & j & (HADAMARD - 1)
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    signs = tl.where(i // HADAMARD == j // HADAMARD, 1.0 - 2.0 * (parity & 1).to(tl.float32), 0.0)
    return signs.to(DTYPE)


@triton.jit
def rotate(x, signs, HADAMARD: tl.constexpr, FACTOR: tl.constexpr):
    """Float32 of a tile, rotated along its columns if HADAMARD > 1."""
    if HADAMARD == 1:
        return x.to(tl.float32)
    else:
        return rotate_sums(x, signs, HADAMARD) * FACTOR


@triton.jit
def rotate_sums(x, signs, HADAMARD: tl.constexpr):
    """`rotate` without its factor: the sums and differences.

    16-bit numbers are multiplied by `signs` on the tensor cores, in a type that holds them exactly, with
    float32 sums. Float32 ones have no such product, and one of plain additions spills registers.
    """
    if HADAMARD == 1:
        return x.to(tl.float32)
    elif x.dtype == tl.float32:
        return butterflies(x, HADAMARD)
    else:
        return tl.dot(x.to(signs.dtype), signs, input_precision="ieee")


@triton.jit
def butterflies(y, HADAMARD: tl.constexpr):
    """The sign matrix times a float32 tile, in blocks along its columns: sums and differences, log2 times."""
    for stage in tl.static_range(7):  # blocks of at most 128
        if (1 << stage) < HADAMARD:
            pairs = tl.reshape(y, (y.shape[0], y.shape[1] // (2 << stage), 2, 1 << stage))
            a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), y.shape)
    return y
