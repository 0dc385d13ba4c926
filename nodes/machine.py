"""Which arithmetic a device has for 4- and 8-bit products, and what Apply DMPQ makes of it.

The rule of where NVFP4 activations are worth it is `sixbit_core.config.default_precision`'s.
"""

from dataclasses import replace

import torch

from ..kernels import int8_backend
from ..sixbit_core.config import DMPQConfig, default_precision
from ..sixbit_core.router import WITHOUT_NVFP4

FP4, INT8, REFERENCE = "fp4", "int8", "reference"
PATHS = {FP4: "FP4 and INT8", INT8: "INT8", REFERENCE: "reference"}
COMPUTES = ("auto", "emulate")
_INT8_FROM = (8, 0)  # lowest compute capability that the INT8 kernels run on


def compute_path(device_type: str, capability: tuple[int, int] | None, hip: bool = False) -> str:
    """FP4 units, INT8 units, or neither (every product as the reference kernels do it).

    Args:
        device_type: as torch spells it.
        capability: compute capability of an NVIDIA GPU, else None.
        hip: an AMD GPU, which torch calls "cuda" too.
    """
    if device_type != "cuda" or hip or capability is None:
        return REFERENCE
    if default_precision(capability)[0] == "dmpq":
        return FP4
    return INT8 if capability >= _INT8_FROM else REFERENCE


def path_of(device: torch.device) -> str:
    """`compute_path` of a device at hand."""
    hip = torch.version.hip is not None
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" and not hip else None
    path = compute_path(device.type, capability, hip)
    return path if path == REFERENCE else path_by(int8_backend(device), path)


def path_by(backend: str, path: str) -> str:
    """What a GPU's path is under the backend that multiplies INT8 there: only Triton's has FP4 products."""
    return {"triton": path, "kitchen": INT8, "int_mm": INT8}.get(backend, REFERENCE)


def default_dmpq(path: str) -> DMPQConfig | None:
    """Activations of 6-bit weights where no node says: INT8 where that is fast, else None, as they come."""
    return None if path == REFERENCE else DMPQConfig(router="int8")


def fit_to_machine(config: DMPQConfig, path: str, compute: str) -> tuple[DMPQConfig, str]:
    """The settings that run on this path, and one line that says what will run.

    Without FP4 units "auto" takes INT8 for every router that would use NVFP4, which there is slower than INT8
    and coarser; "emulate" takes its numbers wherever it runs.
    """
    if path != FP4 and config.router not in WITHOUT_NVFP4:
        if compute == "auto":
            return replace(config, router="int8"), (
                "INT8 activations: no FP4 units here (compute: emulate runs NVFP4 numerics, slower)"
            )
        return config, f"{PATHS[path]}, NVFP4 emulated, router {config.router}"
    slow = " kernels, right but slow" if path == REFERENCE else " units"
    return config, f"{PATHS[path]}{slow}, router {config.router}"
