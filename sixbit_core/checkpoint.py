"""Open a checkpoint, whatever shape it comes in, and check it before anything is loaded.

A diffusers folder (of a pipeline or of its transformer), a shard index, or one
safetensors file with diffusers or native names, plain or quantized: all become a
`Checkpoint` with native names, whose family was found by its tensors, whose tensors are
all there and of the right shape, and are read one by one when asked for.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from .families import ModelFamily, Shape, find_family, to_native
from .fingerprint import ADDED_TABLES, fingerprint, sample_range
from .host_formats import check_layer, decode, renewed
from .locate import collect
from .quantized import (
    COMPANIONS,
    PLAIN_FORMAT,
    ROTATED_FORMAT,
    QuantizedWeight,
    check_global_scale,
    read_mark,
    rotation_of,
    tiled_shape,
)
from .safetensors_file import CheckpointError, TensorInfo, read_bytes, read_tensor

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]

_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
_EXTRAS = (*COMPANIONS, "input_scale", "pre_quant_scale")
_NVFP4 = (PLAIN_FORMAT, ROTATED_FORMAT)
_LONGEST_MARK = 4096  # bytes
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """An opened checkpoint. Holds no tensor and no open file.

    Attributes:
        path: what was opened.
        family: found by the tensors.
        metadata: of the file, or of the first shard.
        config: config.json beside the weights, or the one a quantized copy carries; None without.
        infos: native name -> place in a file, as stored.
        shapes: native name -> shape as unquantized, without the companions of quantized layers.
        formats: layer -> its comfy_quant entry, for those in NVFP4.
        coded: the same for those in an 8-bit format of the host, which are read decoded.
    """

    path: Path
    family: ModelFamily
    metadata: Mapping[str, str]
    config: dict[str, object] | None
    infos: Mapping[str, TensorInfo]
    shapes: Mapping[str, Shape]
    formats: Mapping[str, Mapping[str, object]]
    coded: Mapping[str, Mapping[str, object]]

    def keys(self) -> tuple[str, ...]:
        """Native names of all stored tensors."""
        return tuple(self.infos)

    def shape(self, name: str) -> Shape:
        """Shape as stored."""
        return self._info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """Type that `tensor` gives: as stored, of what is read decoded that of the published weights."""
        if self._mark(name) is not None:
            return getattr(torch, self.family.native_dtype)
        return self._info(name).dtype

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored, a weight of `coded` decoded; read now, on the CPU."""
        stored, mark = read_tensor(self._info(name)), self._mark(name)
        if mark is None:
            return stored
        scale = self.infos.get(f"{name}_scale")
        return decode(stored, None if scale is None else read_tensor(scale), mark, self.dtype(name))

    def _mark(self, name: str) -> Mapping[str, object] | None:
        layer, _, part = name.rpartition(".")
        return self.coded.get(layer) if part == "weight" else None

    def finite(
        self, name: str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor there and in that type. CheckpointError where it then holds NaN or Inf."""
        tensor = self.tensor(name).to(device=device, dtype=dtype)
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{self.path}: {name} holds NaN or Inf; download the checkpoint again")
        return tensor

    def quantized(self, layer: str) -> QuantizedWeight:
        """The NVFP4 weight of a quantized layer ("blocks.0.q").

        Raises:
            CheckpointError: the layer is not quantized, or in another way.
        """
        if layer not in self.formats:
            raise CheckpointError(f"{self.path}: {layer} is not quantized; read {layer}.weight")
        try:
            return QuantizedWeight.from_state_dict(self._tensor_or_mark, layer)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    def _tensor_or_mark(self, name: str) -> torch.Tensor:
        """A tensor, or the mark of a layer, which may stand in the header alone."""
        layer, _, part = name.rpartition(".")
        if part != "comfy_quant":
            return self.tensor(name)
        return torch.tensor(list(json.dumps(self.formats[layer]).encode()), dtype=torch.uint8)

    @property
    def is_quantized(self) -> bool:
        """Whether it holds NVFP4; one in 8-bit formats of the host alone is taken as a source is."""
        return bool(self.formats)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(info.nbytes for info in self.infos.values())

    @cached_property
    def fingerprint(self) -> str:
        """See `fingerprint`; that of the source where a quantized copy stores it."""
        stored = self.metadata.get("sixbit_fingerprint")
        if stored and self.is_quantized:
            return stored
        shapes = {name: info.shape for name, info in self.infos.items()}
        return fingerprint(shapes, self._sample)

    def _sample(self, name: str) -> bytes:
        info = self.infos[name]
        return bytes(read_bytes(info, *sample_range(info.nbytes)))

    def _info(self, name: str) -> TensorInfo:
        if name not in self.infos:
            raise CheckpointError(f"{self.path}: {name} is missing")
        return self.infos[name]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open and check a checkpoint; reads headers only.

    Args:
        path: a diffusers pipeline or transformer folder, a `….safetensors.index.json`, or a
            safetensors file with diffusers or native names, bare or under a known prefix.

    Raises:
        CheckpointError: one line that names the file or tensor and what to do.
    """
    path = Path(path)
    infos, metadata, config = collect(path)
    infos, old = renewed(_unprefixed(infos))
    infos = _native(path, infos)
    marks = {**{to_native(layer): mark for layer, mark in old.items()}, **_formats(path, infos, metadata)}
    formats = {layer: mark for layer, mark in marks.items() if mark.get("format") in _NVFP4}
    coded = {layer: mark for layer, mark in marks.items() if layer not in formats}
    try:
        for layer, mark in coded.items():
            check_layer(layer, mark, infos)
        shapes = _logical_shapes(infos, formats, coded)
        family = find_family(shapes)
        _check(family, shapes)
        _check_types(infos, shapes, marks)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if "sixbit_config" in metadata:
        config = _stored_config(path, metadata["sixbit_config"])
    return Checkpoint(path, family, metadata, config, infos, shapes, formats, coded)


def _unprefixed(infos: dict[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Without the prefix of a full checkpoint, and without what is outside it (VAE, text encoder)."""
    for prefix in _PREFIXES:
        inside = {n[len(prefix) :]: info for n, info in infos.items() if n.startswith(prefix)}
        if inside:
            return inside
    return infos


def _native(path: Path, infos: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    renamed: dict[str, TensorInfo] = {}
    for name, info in infos.items():
        native = to_native(name)
        if native in renamed:
            raise CheckpointError(
                f"{path}: {native} is there twice, also as its diffusers name; keep one of the two"
            )
        renamed[native] = info
    return renamed


def _stored_config(path: Path, text: str) -> dict[str, object]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its sixbit_config is no JSON; quantize the source again") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: its sixbit_config is no JSON object; quantize the source again")
    return config


def _formats(
    path: Path, infos: Mapping[str, TensorInfo], metadata: Mapping[str, str]
) -> dict[str, dict[str, object]]:
    formats: dict[str, dict[str, object]] = {}
    try:
        listed = json.loads(metadata.get("_quantization_metadata", "{}")).get("layers", {})
        for name, mark in listed.items():
            bare = next((name[len(p) :] for p in _PREFIXES if name.startswith(p)), name)
            formats[to_native(bare)] = dict(mark)
        for name, info in infos.items():
            if name.endswith(".comfy_quant"):
                if info.nbytes > _LONGEST_MARK:
                    raise ValueError(f"{name} is no mark")
                formats[name.removesuffix(".comfy_quant")] = read_mark(read_tensor(info))
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its quantization entries are damaged; download it again") from error
    return formats


def _logical_shapes(
    infos: Mapping[str, TensorInfo], formats: Mapping[str, Mapping], coded: Mapping[str, Mapping]
) -> dict[str, Shape]:
    hidden = {f"{layer}.{extra}" for layer in (*formats, *coded) for extra in _EXTRAS}
    shapes = {name: info.shape for name, info in infos.items() if name not in hidden}
    for name, info in infos.items():
        if 0 in info.shape:
            raise ValueError(f"{name} is {list(info.shape)}, which holds no value; download it again")
    for layer, mark in formats.items():
        for name in (f"{layer}.{part}" for part in ("weight", "weight_scale", "weight_scale_2")):
            if name not in infos:
                raise ValueError(f"{name} is missing; quantize or download the file again")
        if f"{layer}.pre_quant_scale" in infos:
            raise ValueError(
                f"{layer} was quantized with smoothing, which is not supported; quantize the original "
                "checkpoint with `sixbit quantize`"
            )
        stored, scales = infos[f"{layer}.weight"], infos[f"{layer}.weight_scale"]
        if stored.dtype != torch.uint8 or len(stored.shape) != 2:
            raise ValueError(f"{layer}.weight must be 2-D uint8, is {stored.dtype} {stored.shape}")
        rows, columns = stored.shape[0], 2 * stored.shape[1]
        shapes[f"{layer}.weight"] = (rows, columns)
        rotation_of(mark, layer, columns)
        if scales.shape != tiled_shape(rows, columns):
            raise ValueError(f"{layer}.weight_scale is {scales.shape}, needs {tiled_shape(rows, columns)}")
        if scales.dtype != torch.float8_e4m3fn:
            raise ValueError(f"{layer}.weight_scale is {_spelt(scales.dtype)}, needs float8_e4m3fn")
        single = infos[f"{layer}.weight_scale_2"]
        if single.dtype != torch.float32 or single.shape not in ((), (1,)):
            found = f"{_spelt(single.dtype)} {list(single.shape)}"
            raise ValueError(f"{layer}.weight_scale_2 is {found}, needs one float32")
        check_global_scale(read_tensor(single), layer)
    return shapes


def _check_types(
    infos: Mapping[str, TensorInfo], shapes: Mapping[str, Shape], marks: Mapping[str, Mapping]
) -> None:
    """What no quantization entry explains is in a type that holds the values themselves."""
    for name in sorted(set(shapes) - ADDED_TABLES):
        if name.removesuffix(".weight") not in marks and infos[name].dtype not in _PLAIN:
            raise ValueError(
                f"{name} is {_spelt(infos[name].dtype)}; needed is a checkpoint in bf16, fp16 or fp32, "
                "or one that `sixbit quantize` wrote"
            )


def _spelt(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check(family: ModelFamily, shapes: Mapping[str, Shape]) -> None:
    """Every tensor is there, of the right shape, and none is unknown."""
    needed = family.tensor_shapes()
    known = {**family.optional_shapes(), **needed}
    missing = [name for name in needed if name not in shapes]
    if missing:
        others = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(f"{missing[0]}{others} is missing for {family.label}; download it again")
    for name, shape in shapes.items():
        if name not in known:
            raise ValueError(f"{name} is not part of {family.label}; this variant is not supported")
        if len(shape) != len(known[name]) or any(
            w not in (-1, n) for n, w in zip(shape, known[name], strict=True)
        ):
            raise ValueError(f"{name} is {list(shape)}, {family.label} needs {list(known[name])}")
