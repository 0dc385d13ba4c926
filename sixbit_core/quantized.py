"""An NVFP4 weight and its place in a checkpoint.

    W = H(e2m1 · scale · global_scale)

with one E4M3 `scale` per 16 values along K and one float32 `global_scale`; H is the
block Hadamard transform the weight was rotated with (its own inverse), or nothing.

In a file (ComfyUI's quantized layout) layer X is
`X.weight` uint8 [N, K/2], `X.weight_scale` float8_e4m3fn in cuBLAS' tiled order,
`X.weight_scale_2` float32 [], `X.comfy_quant` JSON as uint8: {"format": "nvfp4"}, or
{"format": "sixbit_nvfp4", "hadamard": 128} where rotated, which a host that does not know
rotation refuses instead of drawing noise. The JSON is padded with blanks to 64 bytes, so
that sizes are known before the weights are seen and all tensors stay aligned.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from ..kernels import block_hadamard, dequantize_nvfp4, tile_scales, untile_scales
from ..kernels.checks import LARGEST_HADAMARD

PLAIN_FORMAT = "nvfp4"
ROTATED_FORMAT = "sixbit_nvfp4"
BLOCK = 16
COMPANIONS = ("weight_scale", "weight_scale_2", "comfy_quant")
_MARK_BYTES = 64


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A Linear's weight [N, K] in NVFP4.

    Attributes:
        data: (N, K/2) uint8, two E2M1 codes a byte, the even element in the high nibble.
        scale: (N, K/16) float8_e4m3fn decode scales, row-major.
        global_scale: () float32.
        out_features, in_features: N and K.
        hadamard: block size of the rotation along K; 0 or 1 where not rotated.
    """

    data: torch.Tensor
    scale: torch.Tensor
    global_scale: torch.Tensor
    out_features: int
    in_features: int
    hadamard: int = 0

    def __post_init__(self) -> None:
        rows, columns = self.out_features, self.in_features
        shapes = tuple(self.data.shape), tuple(self.scale.shape), self.global_scale.numel()
        if columns % BLOCK or shapes != ((rows, columns // 2), (rows, columns // BLOCK), 1):
            raise ValueError(
                f"an NVFP4 weight [{rows}, {columns}] needs data [N, K/2], scales [N, K/16] and one global "
                f"scale, got {shapes[0]}, {shapes[1]} and {shapes[2]}"
            )

    @property
    def rotated(self) -> bool:
        return self.hadamard > 1

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return sum(t.numel() * t.element_size() for t in (self.data, self.scale, self.global_scale))

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same weight on another device."""
        moved = {name: getattr(self, name).to(device) for name in ("data", "scale", "global_scale")}
        return replace(self, **moved)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The decoded weight (N, K), rotated back."""
        weight = dequantize_nvfp4(self.data, self.scale, self.global_scale)
        return (block_hadamard(weight, self.hadamard) if self.rotated else weight).to(dtype)

    def state_dict(self, name: str) -> dict[str, torch.Tensor]:
        """The four tensors of layer `name` as they stand in a file, in the order of `file_entries`."""
        mark: dict[str, object] = {"format": PLAIN_FORMAT}
        if self.rotated:
            mark = {"format": ROTATED_FORMAT, "hadamard": self.hadamard}
        text = json.dumps(mark).encode().ljust(_MARK_BYTES)
        tensors = {
            f"{name}.weight": self.data,
            f"{name}.weight_scale": tile_scales(self.scale),
            f"{name}.weight_scale_2": self.global_scale.reshape(()),
            f"{name}.comfy_quant": torch.tensor(list(text), dtype=torch.uint8),
        }
        planned = file_entries(name, self.out_features, self.in_features)
        return {key: tensors[key] for key, _, _ in planned}

    @classmethod
    def from_state_dict(cls, get: Callable[[str], torch.Tensor], name: str) -> "QuantizedWeight":
        """Read layer `name` through `get`, which returns the tensor of a full key.

        Raises:
            ValueError: another format than NVFP4, or shapes that do not fit together.
        """
        mark = read_mark(get(f"{name}.comfy_quant"))
        if mark.get("format") not in (PLAIN_FORMAT, ROTATED_FORMAT):
            raise ValueError(
                f"{name} has format {mark.get('format')!r}; needed is {PLAIN_FORMAT} or {ROTATED_FORMAT}: "
                "quantize the original checkpoint with `sixbit quantize`"
            )
        data = get(f"{name}.weight")
        if data.dtype != torch.uint8 or data.ndim != 2:
            raise ValueError(
                f"{name}.weight must be a 2-D uint8 tensor, got {data.dtype} {tuple(data.shape)}"
            )
        rows, columns = data.shape[0], 2 * data.shape[1]
        tiled = get(f"{name}.weight_scale")
        if tuple(tiled.shape) != tiled_shape(rows, columns):
            raise ValueError(
                f"{name}.weight_scale must be {tiled_shape(rows, columns)}, got {tuple(tiled.shape)}"
            )
        scale = untile_scales(tiled, rows, columns // BLOCK)
        global_scale = get(f"{name}.weight_scale_2").float().reshape(())
        check_global_scale(global_scale, name)
        return cls(data, scale, global_scale, rows, columns, rotation_of(mark, name, columns))


def read_mark(tensor: torch.Tensor) -> dict[str, object]:
    """The JSON of an `X.comfy_quant` tensor.

    Raises:
        ValueError: it holds no JSON object.
    """
    try:
        mark = json.loads(bytes(tensor.to(torch.uint8).reshape(-1).tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError("a comfy_quant tensor holds no JSON; download the file again") from error
    if not isinstance(mark, dict):
        raise ValueError("a comfy_quant tensor holds no JSON object; download the file again")
    return mark


def rotation_of(mark: Mapping[str, object], name: str, columns: int) -> int:
    """Block size of the rotation along K that a layer's mark states; 0 for a plain layer.

    Raises:
        ValueError: a rotated layer without a power of two from 2 to 128 that divides `columns`.
    """
    if mark.get("format") != ROTATED_FORMAT:
        return 0
    size = mark.get("hadamard")
    if type(size) is not int or not 2 <= size <= LARGEST_HADAMARD or size & (size - 1) or columns % size:
        raise ValueError(
            f"{name} is marked {ROTATED_FORMAT} with hadamard {size!r}; needed is a power of two from 2 to "
            f"{LARGEST_HADAMARD} that divides {columns}: quantize the original checkpoint again"
        )
    return size


def check_global_scale(scale: torch.Tensor, name: str) -> None:
    """Raise ValueError unless the one global scale of layer `name` is finite and not negative."""
    value = float(scale)
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name}.weight_scale_2 is {value}, needs a finite scale; download the file again")


def tiled_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the tiled scales of a weight [rows, columns]: padded to 128 x 4 scales."""
    return -(-rows // 128) * 128, -(-columns // BLOCK // 4) * 4


def file_entries(name: str, rows: int, columns: int) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    """Names, types and shapes of the tensors that layer `name` with a weight [rows, columns] becomes.

    Raises:
        ValueError: a size that the file layout cannot hold without padding.
    """
    if rows % BLOCK or columns % BLOCK:
        raise ValueError(f"{name} is [{rows}, {columns}]; NVFP4 needs multiples of {BLOCK} in both")
    return [
        (f"{name}.weight", torch.uint8, (rows, columns // 2)),
        (f"{name}.weight_scale", torch.float8_e4m3fn, tiled_shape(rows, columns)),
        (f"{name}.weight_scale_2", torch.float32, ()),
        (f"{name}.comfy_quant", torch.uint8, (_MARK_BYTES,)),
    ]
