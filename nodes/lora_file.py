"""LoRA files of CogVideoX: whichever program trained them, as low-rank pairs by native layer name.

    y += scale * (x downᵀ) upᵀ,    scale = alpha / rank, or alpha / √rank (rsLoRA); 1 where no alpha is told

| written by | a key |
|---|---|
| diffusers | `transformer.transformer_blocks.0.attn1.to_q.lora_A.weight`, once `….to_q.lora.down.weight` |
| PEFT | `base_model.model.transformer_blocks.0.attn1.to_q.lora_A.default.weight` |
| kohya and its kin | `lora_unet_transformer_blocks_0_attn1_to_q.lora_down.weight` |
| ComfyUI | `diffusion_model.blocks.0.q.lora_A.weight` |

alpha stands in a tensor `X.alpha`, in diffusers' `lora_adapter_metadata`, or in PEFT's adapter_config.json.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..sixbit_core.families import FAMILIES, to_native
from ..sixbit_core.safetensors_file import CheckpointError, TensorInfo, read_header, read_tensor

Size = tuple[int, int]  # (out_features, in_features)
_PAIR = re.compile(r"(?P<layer>.+?)[._]lora[._](?P<part>A|B|down|up)(\.\w+)?\.weight")
_PARTS = {"A": "down", "B": "up", "down": "down", "up": "up"}
_DORA = ("dora_scale", "lora_magnitude_vector")
_PREFIXES = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.")
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lora_")
CONFIG = "adapter_config.json"


@dataclass(frozen=True, eq=False)
class LowRank:
    """One low-rank change of a Linear: `down` (r, K), `up` (N, r), and the factor it counts with."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def to(self, device: torch.device, dtype: torch.dtype) -> "LowRank":
        """The same on a device, in a type."""
        return LowRank(self.down.to(device, dtype), self.up.to(device, dtype), self.scale)


@dataclass(frozen=True, eq=False)
class LoraFile:
    """What a file says of a model: its changes by native layer name, and the keys that say nothing of it."""

    layers: Mapping[str, LowRank]
    unmatched: tuple[str, ...]


def read_lora(path: Path, linears: Mapping[str, Size]) -> LoraFile:
    """Read a LoRA file for a model.

    Args:
        path: a safetensors file.
        linears: native name -> (out, in) of every Linear of the model.

    Raises:
        CheckpointError: no safetensors file, a kind of change that is not low-rank alone (DoRA), one of
            another model, or none of this model; one line.
    """
    infos, metadata = read_header(path)
    config = _config(path, metadata)
    if config.get("use_dora") or any(part in key for key in infos for part in _DORA):
        raise CheckpointError(f"{path.name} is a DoRA, which is not supported; use a plain LoRA")
    names = _Names(linears)
    pairs: dict[str, dict[str, str]] = {}  # native layer -> part -> key
    for key in infos:
        layer, part = _split(key)
        native = names.native(layer) if layer else None
        if native is not None:
            pairs.setdefault(native, {})[part] = key
    layers = {
        native: _low_rank(path, infos, keys, config, native, linears[native])
        for native, keys in pairs.items()
        if {"down", "up"} <= set(keys)
    }
    if not layers:
        raise CheckpointError(
            f"{path.name} holds no low-rank pair for a CogVideoX of this kind, only keys like "
            f"{next(iter(infos), 'none')}; take a LoRA made for this model"
        )
    used = {key for native in layers for key in pairs[native].values()}
    return LoraFile(layers, tuple(key for key in infos if key not in used))


class _Names:
    """Finds the native name of a layer under any of its names."""

    def __init__(self, linears: Mapping[str, Size]) -> None:
        self._linears = linears
        self._flat: dict[str, str] = {}
        for native in linears:
            for name in (native, *(family.to_diffusers(native) for family in FAMILIES.values())):
                self._flat[name.replace(".", "_")] = native

    def native(self, layer: str) -> str | None:
        dotted = layer
        while prefix := next((p for p in _PREFIXES if dotted.startswith(p)), None):
            dotted = dotted.removeprefix(prefix)
        if (found := to_native(dotted)) in self._linears:
            return found
        flat = [layer.removeprefix(prefix).lstrip("_") for prefix in _FLAT_PREFIXES]
        return next((self._flat[name] for name in flat if name in self._flat), None)


def _split(key: str) -> tuple[str | None, str]:
    """(layer, "down", "up" or "alpha") of a key; (None, "") of any other."""
    if key.endswith(".alpha"):
        return key.removesuffix(".alpha"), "alpha"
    found = re.fullmatch(_PAIR, key)
    if found is None:
        return None, ""
    layer = found["layer"].replace(".processor.", ".")
    return (f"{layer}.0" if layer.endswith("attn1.to_out") else layer), _PARTS[found["part"]]


def _low_rank(
    path: Path,
    infos: Mapping[str, TensorInfo],
    keys: Mapping[str, str],
    config: Mapping[str, object],
    native: str,
    size: Size,
) -> LowRank:
    down, up = (read_tensor(infos[keys[part]]) for part in ("down", "up"))
    rank = down.shape[0] if down.ndim == 2 else 0
    if not rank or up.ndim != 2 or (up.shape[0], down.shape[1]) != size or up.shape[1] != rank:
        found = f"{list(up.shape)} times {list(down.shape)}"
        raise CheckpointError(
            f"{path.name}: {native} is {found}, this model's is {list(size)}; take a LoRA made for this model"
        )
    if not (down.is_floating_point() and up.is_floating_point()):
        raise CheckpointError(f"{path.name}: {native} is {down.dtype}, needed are floats; take a plain LoRA")
    if "alpha" in keys:
        told = read_tensor(infos[keys["alpha"]])
        alpha = float(told) if told.numel() == 1 else math.nan
    else:
        alpha = _alpha(config, _split(keys["down"])[0] or native, rank)
    if not math.isfinite(alpha):
        raise CheckpointError(f"{path.name}: the alpha of {native} is no number; download it again")
    return LowRank(down, up, alpha / (rank**0.5 if config.get("use_rslora") else rank))


def _alpha(config: Mapping[str, object], layer: str, rank: int) -> float:
    """alpha of a layer by PEFT's configuration; the rank where there is none, NaN where it is no number."""
    patterns = config.get("alpha_pattern")
    for pattern, alpha in (patterns if isinstance(patterns, dict) else {}).items():
        if layer == pattern or layer.endswith(f".{pattern}"):
            return float(alpha) if isinstance(alpha, (int, float)) else math.nan
    alpha = config.get("lora_alpha")
    return float(alpha) if isinstance(alpha, (int, float)) else float(rank)


def _config(path: Path, metadata: Mapping[str, str]) -> dict[str, object]:
    """PEFT's configuration, as diffusers keeps it in the file or PEFT beside it, or nothing."""
    text = metadata.get("lora_adapter_metadata")
    beside = path.with_name(CONFIG)
    try:
        if text is None and path.name.startswith("adapter_model") and beside.is_file():
            text = beside.read_text(encoding="utf-8")
        found = json.loads(text or "{}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path.name}: its configuration is no readable JSON; download it again"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name}: its configuration is no JSON object; download it again")
    return {key.removeprefix("transformer."): value for key, value in found.items()}
