"""The report of one clip, and the lines that begin and end a run."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..kernels import backend_line, tuning_seconds
from ..sixbit_core.metrics import psnr, ssim
from ..sixbit_core.report import spelled_bytes
from .facts import ModelFacts
from .machine import Machine, peak_memory_bytes, versions
from .pipeline import LoadedModel
from .sample import ClipSpec, Sampled, cache_size
from .settings import RunSettings
from .transformer import full_precision_bytes, weight_bytes

SECONDS = ("load", "text", "sample", "decode", "total")


def make_report(
    model: LoadedModel,
    settings: RunSettings,
    machine: Machine,
    clip: ClipSpec,
    run: Sampled,
    seconds: dict[str, float],
    command: str = "",
) -> dict[str, Any]:
    """The report of one clip; `psnr_db` and `ssim` stay null until it is compared.

    Args:
        seconds: by the names of `SECONDS`.
    """
    decided = run.report.to_dict()
    return {
        "model": model.facts.name,
        "fingerprint": model.facts.checkpoint.fingerprint,
        "precision": settings.precision,
        "cache": "off" if settings.cache is None else "tdc",
        "cache_settings": decided.pop("cache"),
        "steps": clip.steps,
        "cfg": clip.cfg,
        "seed": clip.seed,
        "size": list(clip.size),
        "frames": clip.frames,
        **decided,
        "note": settings.note or decided["note"],
        "seconds": {name: round(seconds[name], 4) for name in SECONDS},
        "seconds_per_step": round(seconds["sample"] / clip.steps, 6),
        "weight_bytes": weight_bytes(model.transformers[settings.weights]),
        "weight_bytes_full_precision": full_precision_bytes(model.facts),
        "peak_memory_bytes": peak_memory_bytes(machine.device),
        "psnr_db": None,
        "ssim": None,
        "machine": f"{machine.device.type}: {machine.name}",
        "versions": versions(),
        "command": command,
    }


def compare_clips(frames: np.ndarray, full: np.ndarray) -> dict[str, float]:
    """PSNR and SSIM of two clips of (T, H, W, 3) uint8, for a report."""
    a, b = torch.from_numpy(frames), torch.from_numpy(full)
    return {"psnr_db": round(psnr(a, b), 4), "ssim": round(ssim(a, b), 6)}


def status_line(model: LoadedModel, settings: RunSettings, machine: Machine, clip: ClipSpec) -> str:
    """What this machine is about to do: device, kernels, precision, and the bytes it will hold."""
    number = str(model.dtype).removeprefix("torch.")
    words = [f"{model.facts.name} on {machine.device.type} ({machine.name}), {number}: {settings.label()}"]
    words.append(f"transformer {spelled_bytes(weight_bytes(model.use(settings.weights)))}")
    if settings.cache is not None:
        held = cache_bytes(model.facts, settings, clip, model.dtype)
        words.append(f"delta cache {spelled_bytes(held)} ({settings.cache.location})")
    if settings.tunes and (seconds := tuning_seconds(model.device)):
        words.append(f"tuning up to {seconds:.0f} s")
    return "; ".join([*words, backend_line()])


def cache_bytes(facts: ModelFacts, settings: RunSettings, clip: ClipSpec, dtype: torch.dtype) -> int:
    """Bytes that a full delta cache takes for a clip."""
    return cache_size(facts, clip, dtype)(settings.cache.location)


def done_line(report: dict[str, Any], out: Path) -> str:
    """What came of a run."""
    height, width = report["size"]
    words = [
        f"{out}: {report['frames']} frames of {height}x{width} in {report['seconds']['total']:.1f} s "
        f"({report['seconds_per_step']:.3f} s a step)"
    ]
    if report["average_activation_bits"] is not None:
        words.append(
            f"{report['average_activation_bits']:.2f} activation bits "
            f"({report['effective_activation_bits']:.2f} with skips)"
        )
    words.append(f"{100 * (report['skipped_fraction'] or 0):.0f} % of block evaluations skipped")
    words.append(
        f"weights {report['weight_bytes_full_precision'] / report['weight_bytes']:.2f}x smaller than 16-bit"
    )
    if report["psnr_db"] is not None:
        words.append(f"PSNR {report['psnr_db']:.1f} dB and SSIM {report['ssim']:.3f} against full precision")
    return "; ".join(words)
