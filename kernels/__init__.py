"""Number formats and fused operations: float32 references in plain PyTorch, and faster twins of them.

Every op is an `Op` (see `dispatch`): calling it runs the first twin that can take the arguments, else the
reference. Without Triton everything here imports and the references serve.
"""

from __future__ import annotations

try:
    import triton as _triton  # noqa: F401  (only to see whether it is there)
except ImportError:
    _HAS_TRITON = False
else:
    _HAS_TRITON = True

from .cast import cast_nvfp4_to_int8
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

if _HAS_TRITON:
    from . import (  # noqa: F401  (importing a module of twins registers them)
        cast_triton,
        delta_triton,
        fused_triton,
        hadamard_triton,
        linear_triton,
        measures_triton,
        nvfp4_decode_triton,
        nvfp4_triton,
        rotary_triton,
        rows_triton,
        support_triton,
    )

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
    "int8_linear",
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
    "untile_scales",
    "use_backend",
]


def backend_line() -> str:
    """One sentence for people: which kernels this machine will run, and why not others."""
    status = support_triton.status() if _HAS_TRITON else "Triton is not installed"
    serves = "" if "kernels on" in status else "; the PyTorch references serve"
    return f"Kernels: {status}{serves}."
