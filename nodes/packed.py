"""One tensor for an NVFP4 weight, so that the host can move, offload and count it like any other.

    packed = data (N*K/2 bytes) | scale (N*K/16 bytes, E4M3) | global scale (4 bytes, float32)

uint8, one-dimensional. K and N are multiples of 16, so every part starts on a 16-byte boundary and is a view.
"""

import torch

from ..kernels import block_hadamard, quantize_nvfp4
from ..sixbit_core.quantized import BLOCK, QuantizedWeight

_GLOBAL_BYTES = 4


def packed_size(out_features: int, in_features: int) -> int:
    """Bytes of a packed weight."""
    return out_features * in_features // 2 + out_features * in_features // BLOCK + _GLOBAL_BYTES


def pack(weight: QuantizedWeight) -> torch.Tensor:
    """The weight as one uint8 tensor, see the module."""
    scalar = weight.global_scale.float().reshape(1)
    parts = (weight.data, weight.scale.contiguous(), scalar)
    return torch.cat([part.contiguous().view(torch.uint8).reshape(-1) for part in parts])


def unpack(packed: torch.Tensor, out_features: int, in_features: int, hadamard: int) -> QuantizedWeight:
    """The weight of a packed tensor, as views of it. Raises ValueError where the size does not fit."""
    needed = packed_size(out_features, in_features)
    if packed.dtype != torch.uint8 or packed.numel() != needed:
        raise ValueError(
            f"a packed weight [{out_features}, {in_features}] is {needed} bytes of uint8, "
            f"got {packed.numel()} of {packed.dtype}"
        )
    data_bytes = out_features * in_features // 2
    data, scale, scalar = packed.split([data_bytes, needed - data_bytes - _GLOBAL_BYTES, _GLOBAL_BYTES])
    return QuantizedWeight(
        data.view(out_features, in_features // 2),
        scale.view(torch.float8_e4m3fn).view(out_features, in_features // BLOCK),
        scalar.view(torch.float32).reshape(()),
        out_features,
        in_features,
        hadamard,
    )


def requantize(weight: torch.Tensor, hadamard: int) -> QuantizedWeight:
    """A decoded weight (N, K), changed by someone, back into NVFP4 with the rotation it had."""
    turned = block_hadamard(weight.float(), hadamard) if hadamard > 1 else weight.float()
    data, scale, global_scale = quantize_nvfp4(turned)
    return QuantizedWeight(data, scale, global_scale, *weight.shape, hadamard=hadamard)
