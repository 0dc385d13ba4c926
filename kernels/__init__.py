"""Number formats and fused operations: float32 references in plain PyTorch, and faster twins of them.

Every op is an `Op` (see `dispatch`): calling it runs the first twin that can take the arguments, else the
reference. Without Triton everything here imports; the references serve, and on a GPU `linear_torch`.
"""

from __future__ import annotations

try:
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

if not _NO_TRITON:
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
from . import linear_torch  # after Triton's: of the twins that can, the first one registered runs

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
    status = _NO_TRITON or support_triton.status()
    if "kernels on" in status:
        return f"Kernels: {status}."
    products = linear_torch.status()
    rest = "the PyTorch references serve" + (" the rest" if products else "")
    return f"Kernels: {'; '.join(filter(None, (status, products, rest)))}."
