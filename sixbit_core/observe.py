"""Measures of a run, brought to the host without stopping it.

A decision in Python needs a number on the host, and reading one waits for the GPU. So nothing is read
while an evaluation runs: measures stay on the device as they are made, `flush` gathers them into one
tensor and starts one copy into pinned memory, and `read` waits for it when the next evaluation begins,
whose decisions are made from them.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

Reading = tuple[Any, list[float]]


class NonFiniteError(RuntimeError):
    """A block put out NaN or infinity."""


@dataclass
class _Transfer:
    keys: list[tuple[Hashable, int]]  # key and number of its values, in the order of `values`
    values: torch.Tensor  # (n,) float32 on the host, valid once `done` has passed
    done: torch.cuda.Event | None


class Observer:
    """Collects small device tensors under keys; one asynchronous transfer a `flush`."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything. The only place that names the fields."""
        self._keys: list[tuple[Hashable, int]] = []
        self._pending: list[torch.Tensor] = []
        self._transfers: list[_Transfer] = []

    def record(self, key: Hashable, values: torch.Tensor) -> None:
        """Keep `values` (any shape, float, on the device) under `key` for the next transfer."""
        values = values.detach().reshape(-1).float()
        self._keys.append((key, values.numel()))
        self._pending.append(values)

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
        self._transfers.append(_Transfer(self._keys, values, done))
        self._keys, self._pending = [], []

    def read(self) -> list[Reading]:
        """All measures since the last read, in the order of recording; waits for their transfers."""
        self.flush()
        readings: list[Reading] = []
        for transfer in self._transfers:
            if transfer.done is not None:
                transfer.done.synchronize()
            values, start = transfer.values.tolist(), 0
            for key, count in transfer.keys:
                readings.append((key, values[start : start + count]))
                start += count
        self._transfers = []
        return readings
