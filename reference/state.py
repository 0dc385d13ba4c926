"""State of the `transformer` stage between two commands: WORK/state.safetensors and WORK/state.json.

Tensors are named by their role and their parameter: `weight.`, `average.` and each moment of its optimizer.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from .ema import EMA

_MOMENTS = ("exp_avg", "exp_avg_sq", "step", "momentum")


def save_state(
    work: Path,
    networks: nn.Module,
    ema: EMA,
    optimizers: list[torch.optim.Optimizer],
    record: dict[str, float | bool],
) -> None:
    """Write `work`/state.safetensors and `work`/state.json, the latter with `record`."""
    tensors: dict[str, torch.Tensor] = {}
    for (name, parameter), average in zip(networks.named_parameters(), ema.averages, strict=True):
        tensors[f"weight.{name}"] = parameter.detach()
        tensors[f"average.{name}"] = average
        for optimizer in optimizers:
            moments = optimizer.state.get(parameter, {})
            tensors |= {f"{key}.{name}": moments[key] for key in _MOMENTS if key in moments}
    save_file({k: t.contiguous().cpu() for k, t in tensors.items()}, work / "state.part")
    (work / "state.part").replace(work / "state.safetensors")
    (work / "state.json").write_text(json.dumps(record) + "\n")


def load_state(
    work: Path, networks: nn.Module, ema: EMA, optimizers: list[torch.optim.Optimizer], warm: bool
) -> tuple[int, float]:
    """Take up a stopped stage: (steps, seconds) done so far, zeros when there is no state.

    Raises:
        ValueError: when the stage started otherwise: from a pipeline (`warm`), or from fresh weights.
    """
    if not (work / "state.json").exists():
        return 0, 0.0
    record = json.loads((work / "state.json").read_text())
    if record.get("warm", False) != warm:
        raise ValueError(
            f"{work} holds a stage that began {'with' if record.get('warm') else 'without'} --from: "
            "resume it so, or give another --work"
        )
    tensors = load_file(work / "state.safetensors")
    for (name, parameter), average in zip(networks.named_parameters(), ema.averages, strict=True):
        parameter.data.copy_(tensors[f"weight.{name}"])
        average.copy_(tensors[f"average.{name}"])
        keys = [key for key in _MOMENTS if f"{key}.{name}" in tensors]
        owner = next(
            o for o in optimizers if any(p is parameter for g in o.param_groups for p in g["params"])
        )
        owner.state[parameter] = {key: tensors[f"{key}.{name}"].to(parameter.device) for key in keys}
    return int(record["step"]), float(record["elapsed"])
