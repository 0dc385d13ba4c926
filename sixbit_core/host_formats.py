"""Weights that ComfyUI quantized in its own 8-bit formats: values with a scale, decoded as they are read.

    W = data · scale

`X.weight` [N, K] int8 or float8 (which may stand as uint8), `X.weight_scale` float32: one, or [N, 1], one a
row of an INT8 weight; without one 1. What else a layer may carry is of its input and does not matter here.
Files of before ComfyUI's `comfy_quant` entries name them otherwise: `scaled_fp8`, `X.scale_weight`,
`X.scale_input`.
Source of the layout: ComfyUI's QUANTIZATION.md and its table of formats, 0.33.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .safetensors_file import TensorInfo

Mark = Mapping[str, object]


@dataclass(frozen=True)
class HostFormat:
    """One of ComfyUI's formats.

    Attributes:
        storage: types that its data may be stored in, the first what they are.
        rows: whether a scale may be per row.
    """

    storage: tuple[torch.dtype, ...]
    rows: bool = False


HOST_FORMATS = {
    "int8_tensorwise": HostFormat((torch.int8,), rows=True),
    "float8_e4m3fn": HostFormat((torch.float8_e4m3fn, torch.uint8)),
    "float8_e5m2": HostFormat((torch.float8_e5m2, torch.uint8)),
}
_OLD_FLAG = "scaled_fp8"
_OLD_NAMES = {"scale_weight": "weight_scale", "scale_input": "input_scale"}


def renewed(infos: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], dict[str, Mark]]:
    """Tensors under today's names, and the marks of layers that an old file implies."""
    if _OLD_FLAG not in infos:
        return dict(infos), {}
    renamed: dict[str, TensorInfo] = {}
    marks: dict[str, Mark] = {}
    for name, info in infos.items():
        layer, _, part = name.rpartition(".")
        if name != _OLD_FLAG:
            renamed[f"{layer}.{_OLD_NAMES[part]}" if part in _OLD_NAMES else name] = info
        if part == "scale_weight":
            marks[layer] = {"format": "float8_e4m3fn"}
    return renamed, marks


def check_layer(layer: str, mark: Mark, infos: Mapping[str, TensorInfo]) -> None:
    """Raise ValueError where a layer is in a format that is not read, or its tensors do not fit it."""
    name = mark.get("format")
    known = HOST_FORMATS.get(name) if isinstance(name, str) else None
    inner = mark.get("params")
    if known is None or mark.get("convrot") or (isinstance(inner, Mapping) and inner.get("convrot")):
        shown = f"{name} with convrot" if known else name
        raise ValueError(
            f"{layer} is in the format {shown!r}, which this pack does not read; take a file in bf16, "
            f"{', '.join(HOST_FORMATS)} or nvfp4, or load this one with ComfyUI's Load Diffusion Model"
        )
    if f"{layer}.weight" not in infos:
        raise ValueError(f"{layer}.weight is missing; download the file again")
    data, scale = infos[f"{layer}.weight"], infos.get(f"{layer}.weight_scale")
    if data.dtype not in known.storage or len(data.shape) != 2:
        found = f"{_spelt(data.dtype)} {list(data.shape)}"
        raise ValueError(
            f"{layer}.weight is {found}, {name} needs 2-D {_spelt(known.storage[0])}; download the file again"
        )
    if scale is None and not known.rows:
        return
    rows = data.shape[0]
    shapes = [(), (1,), *([(rows, 1), (1, 1)] if known.rows else [])]
    if scale is None or scale.dtype != torch.float32 or scale.shape not in shapes:
        if known.rows and scale is not None and len(scale.shape) == 1 and scale.shape[0] > 1:
            raise ValueError(
                f"{layer}.weight_scale is {list(scale.shape)}, by which ComfyUI multiplies columns; "
                f"this pack reads one scale, or one a row as [{rows}, 1]: store them in that shape"
            )
        found = "missing" if scale is None else f"{_spelt(scale.dtype)} {list(scale.shape)}"
        needed = "one float32, or one a row" if known.rows else "one float32"
        raise ValueError(f"{layer}.weight_scale is {found}, needs {needed}; download the file again")


def decode(data: torch.Tensor, scale: torch.Tensor | None, mark: Mark, dtype: torch.dtype) -> torch.Tensor:
    """The weight (N, K) of a checked layer in `dtype`."""
    stored = HOST_FORMATS[str(mark["format"])].storage[0]
    values = (data if data.dtype == stored else data.view(stored)).float()
    if scale is not None:
        values = values * scale
    return values.to(dtype)


def _spelt(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
