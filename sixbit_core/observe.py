"""Measures of a run, brought to the host without stopping it.

A decision in Python needs a number on the host, and reading one waits for the GPU. So nothing is read
while an evaluation runs: measures stay on the device as they are made, `flush` gathers them into one
tensor and starts one copy into pinned memory, and `read` waits for it when the next evaluation begins,
whose decisions are made from them.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Reading = tuple[Any, list[float]]
_Place = tuple[Hashable, int, int]  # key, first of its values, number of its values


class NonFiniteError(RuntimeError):
    """A block put out NaN or infinity."""


@dataclass
class _Transfer:
    places: list[_Place]
    values: torch.Tensor  # (n,) float32 on the host, valid once `done` has passed
    done: torch.cuda.Event | None


class Observer:
    """Collects small device tensors under keys; one asynchronous transfer a `flush`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything. The only place that names the fields."""
        self._places: list[_Place] = []
        self._pending: list[torch.Tensor] = []
        self._count = 0  # values pending
        self._transfers: list[_Transfer] = []

    def record(self, key: Hashable, values: torch.Tensor) -> None:
        """Keep `values` (any shape, float, on the device) under `key` for the next transfer."""
        self._places.append((key, self._count, values.numel()))
        self._keep(values)

    def record_rows(self, key: Hashable, values: torch.Tensor, rows: Sequence[int]) -> None:
        """Keep those `rows` of `values` (B, …), each under `key`, as one tensor."""
        size = values.numel() // values.shape[0]
        self._places.extend((key, self._count + row * size, size) for row in rows)
        self._keep(values)

    def flush(self) -> None:
        """Start the copy of all that was recorded since the last flush; does not wait for it."""
        if not self._pending:
            return
        gathered = torch.cat(self._pending)
        done = None
        if gathered.is_cuda:
            values = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
            values.copy_(gathered, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        else:
            values = gathered.cpu()
        self._transfers.append(_Transfer(self._places, values, done))
        self._places, self._pending, self._count = [], [], 0

    def read(self) -> list[Reading]:
        """All measures since the last read, in the order of recording; waits for their transfers."""
        self.flush()
        readings: list[Reading] = []
        for transfer in self._transfers:
            if transfer.done is not None:
                transfer.done.synchronize()
            values = transfer.values.tolist()
            readings.extend((key, values[first : first + size]) for key, first, size in transfer.places)
        self._transfers = []
        return readings

    def _keep(self, values: torch.Tensor) -> None:
        values = values.detach().reshape(-1).float()
        self._count += values.numel()
        self._pending.append(values)
