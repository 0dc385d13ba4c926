"""Which arithmetic a device has for 4- and 8-bit products, and what Apply DMPQ makes of it."""

from dataclasses import replace

import torch

from ..sixbit_core.config import NATIVE_FP4, DMPQConfig

FP4, INT8, REFERENCE = "fp4", "int8", "reference"
COMPUTES = ("auto", "emulate")
_INT8_FROM = (8, 0)  # lowest compute capability that the INT8 kernels run on
_NEEDS_FP4 = ("nvfp4", "gamma", "static", "static-time", "random")


def compute_path(device_type: str, capability: tuple[int, int] | None, hip: bool = False) -> str:
    """FP4 units, INT8 units, or neither (every product as the reference kernels do it).

    Args:
        device_type: as torch spells it.
        capability: compute capability of an NVIDIA GPU, else None.
        hip: an AMD GPU, which torch calls "cuda" too.
    """
    if device_type != "cuda" or hip or capability is None:
        return REFERENCE
    if capability >= NATIVE_FP4:
        return FP4
    return INT8 if capability >= _INT8_FROM else REFERENCE


def path_of(device: torch.device) -> str:
    """`compute_path` of a device at hand."""
    hip = torch.version.hip is not None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" and not hip else None
    return compute_path(device.type, capability, hip)


def fit_to_machine(config: DMPQConfig, path: str, compute: str) -> tuple[DMPQConfig, str]:
    """The settings that run on this path, and one line that says what will run.

    On INT8 units alone NVFP4 activations would be slower than INT8 and no smaller, so "auto" takes INT8.
    """
    if compute == "auto" and path == INT8 and config.router in ("auto", *_NEEDS_FP4):
        return replace(config, router="int8"), (
            "INT8 activations: this GPU has no FP4 units (compute: emulate runs NVFP4 numerics on it, slower)"
        )
    spelled = {
        FP4: "FP4 and INT8 units",
        INT8: "INT8 units, NVFP4 emulated" if compute == "emulate" else "INT8 units",
        REFERENCE: "reference kernels, right but slow",
    }
    return config, f"{spelled[path]}, router {config.router}"
