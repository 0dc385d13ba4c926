"""Number formats and fused operations: float32 references in plain PyTorch, and faster twins of them.

Every op is an `Op` (see `dispatch`): calling it runs the first twin that can take the arguments, else the
reference. Without Triton everything here imports; the references serve, and on a GPU `linear_torch` and
`rows_torch`.
"""

from __future__ import annotations

import torch

try:
    import triton as _triton  # noqa: F401
    import triton.knobs as _knobs  # noqa: F401  (only to see whether they are there)
    import triton.tools.tensor_descriptor as _descriptors  # noqa: F401
except ModuleNotFoundError as error:
    _NO_TRITON = "Triton is not installed" if error.name == "triton" else "Triton is older than 3.6"
except (
    ImportError,
    OSError,
    RuntimeError,
    AttributeError,
) as error:  # a library that is missing
    _NO_TRITON = f"Triton cannot be imported: {(str(error).strip().splitlines() or [repr(error)])[0]}"
else:
    _NO_TRITON = ""

from .cast import cast_nvfp4_to_int8, int8_weight
from .delta import apply_delta
from .dispatch import Op, use_backend
from .fused import gate_residual, gelu_int8, norm_modulate, norm_modulate_int8
from .hadamard import block_hadamard, hadamard_block_size, hadamard_quantize_int8, hadamard_quantize_nvfp4
from .int8 import quantize_int8
from .linear import int8_linear, linear_w4a4, linear_w4a8, linear_w4a16
from .measures import block_measures, magnitudes, outlier_ratio, ratio_of
from .nvfp4 import dequantize_nvfp4, quantize_nvfp4
from .rotary import norm_rotary_
from .scale_tiles import tile_scales, untile_scales
from .tuner import process_tuner, tuning

if not _NO_TRITON:
    from . import (  # noqa: F401  (importing a module of twins registers them)
        cast_triton,
        delta_triton,
        fused_triton,
        gemm_triton,
        hadamard_triton,
        linear_triton,
        measures_triton,
        nvfp4_decode_triton,
        nvfp4_triton,
        rotary_triton,
        rows_triton,
        support_triton,
    )
from . import linear_torch, rows_torch  # noqa: F401  (after Triton's: the first twin that can is run)

__all__ = [
    "Op",
    "apply_delta",
    "backend_line",
    "block_hadamard",
    "block_measures",
    "cast_nvfp4_to_int8",
    "dequantize_nvfp4",
    "gate_residual",
    "gelu_int8",
    "hadamard_block_size",
    "hadamard_quantize_int8",
    "hadamard_quantize_nvfp4",
    "int8_backend",
    "int8_linear",
    "int8_weight",
    "linear_w4a4",
    "linear_w4a8",
    "linear_w4a16",
    "magnitudes",
    "norm_modulate",
    "norm_modulate_int8",
    "norm_rotary_",
    "outlier_ratio",
    "quantize_int8",
    "quantize_nvfp4",
    "ratio_of",
    "tile_scales",
    "tuning",
    "tuning_seconds",
    "untile_scales",
    "use_backend",
]


def backend_line() -> str:
    """One sentence for people: which kernels this machine will run, and why not others."""
    status = _NO_TRITON or support_triton.status()
    if "kernels on" in status:
        return f"Kernels: {status}."
    products = linear_torch.status()
    rest = "PyTorch serves the rest" if products else "the PyTorch references serve"
    return f"Kernels: {'; '.join(filter(None, (status, products, rest)))}."


def int8_backend(device: torch.device) -> str:
    """What multiplies INT8 on a device: "triton", one of `linear_torch.PRODUCTS`, or "reference"."""
    x = torch.empty(0, device=device)
    if not _NO_TRITON and support_triton.supported(x):
        return "triton"
    return linear_torch.int8_product(x) or "reference"


def tuning_seconds(device: torch.device) -> float:
    """How long tuning may still take on a device in this process; 0 where its tiles are not timed."""
    if int8_backend(device) != "triton":
        return 0.0
    tiles = gemm_triton.int8_tiles(torch.cuda.get_device_capability(device))
    return process_tuner().seconds_left() if len(tiles) > 1 else 0.0
