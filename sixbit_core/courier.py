"""Groups of tensors that wait in host memory, carried there and back beside the work of a GPU.

Python runs far ahead of a GPU, so buffers made anew for each tensor would pile up on it. A few slots, one
ring for each direction, bound what is on its way; a slot is used again after an event, for which streams wait
and Python never does. Each direction has a stream of its own. On a CPU all of it is plain copies, in the same
order through the same slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

AHEAD_BYTES = 128 * 2**20  # fetched before it is asked for: a block of the 5B with guidance
MOST_AHEAD = 8
FEWEST_AHEAD = 2
OUTGOING = 2


def slots_ahead(size: int) -> int:
    """Groups of `size` bytes that are fetched ahead at most."""
    return min(max(AHEAD_BYTES // max(size, 1), FEWEST_AHEAD), MOST_AHEAD)


def pinned_bytes(size: int) -> int:
    """What PyTorch pins for `size` bytes: the next power of two."""
    return 1 << max(size - 1, 1).bit_length()


def bytes_on_device(size: int) -> int:
    """What a courier of groups of `size` bytes takes on the device."""
    return (slots_ahead(size) + 1 + OUTGOING) * size


@dataclass
class _Slot:
    bytes: torch.Tensor  # (n,) uint8 on the device
    free: torch.cuda.Event | None = None  # after it the slot may be written


@dataclass
class _Ring:
    """Slots for groups of one size on one device."""

    outgoing: deque[_Slot]
    idle: deque[_Slot]  # of those for what comes in


@dataclass
class _Parcel:
    host: torch.Tensor  # (n,) uint8: the group's tensors one after the other
    parts: tuple[tuple[torch.Size, torch.dtype], ...]
    device: torch.device
    written: torch.cuda.Event | None = None  # the copy in host memory is whole after it


@dataclass
class _Streams:
    """The two directions of one device; None without one that has streams."""

    out: torch.cuda.Stream | None = None
    back: torch.cuda.Stream | None = None


@dataclass
class _Coming:
    slot: _Slot
    arrived: torch.cuda.Event | None


@dataclass
class Courier:
    """Keeps groups of tensors in host memory under keys. What is `expect`ed is fetched ahead."""

    _parcels: dict[Hashable, _Parcel] = field(default_factory=dict)
    _rings: dict[tuple[torch.device, int], _Ring] = field(default_factory=dict)
    _streams: dict[torch.device, _Streams] = field(default_factory=dict)
    _queue: deque[Hashable] = field(default_factory=deque)
    _coming: dict[Hashable, _Coming] = field(default_factory=dict)
    _lent: tuple[_Ring, _Slot] | None = None

    def send(self, key: Hashable, group: Sequence[torch.Tensor]) -> None:
        """Keep copies of the tensors of a group, all on one device, under `key`, in place of what was there.

        Those of the widest type come first, so that each lies where its type may.
        """
        device, size = group[0].device, sum(x.nbytes for x in group)
        parts = tuple((x.shape, x.dtype) for x in group)
        ring = self._ring(device, size)
        slot = ring.outgoing[0]
        ring.outgoing.rotate(-1)
        _wait(device, slot.free)
        for place, x in zip(_views(slot.bytes, parts), group, strict=True):
            place.copy_(x)
        old = self._parcels.get(key)
        if old is None or old.parts != parts or old.device != device:
            self.drop(key)
            old = self._parcels[key] = _Parcel(_host_memory(slot.bytes), parts, device)
        elif key in self._coming:
            self._recall(key)
        stream = self._of(device).out
        _wait_for_main(device, stream)
        with _on(stream):
            old.host.copy_(slot.bytes, non_blocking=stream is not None)
        old.written = slot.free = _mark(stream)

    def expect(self, keys: Iterable[Hashable]) -> None:
        """Say what will be fetched next, in this order; keys that hold nothing are passed over."""
        for key in list(self._coming):
            self._recall(key)
        self._queue = deque(key for key in keys if key in self._parcels)
        self._start()

    def fetch(self, key: Hashable) -> tuple[torch.Tensor, ...]:
        """The group kept under `key`, on its device, until the next `fetch`. KeyError if there is none."""
        parcel = self._parcels[key]
        self._release()
        if key not in self._coming:
            self._make_room(parcel)
            self._begin(key)
        coming = self._coming.pop(key)
        _wait(parcel.device, coming.arrived)
        self._lent = self._ring_of(parcel), coming.slot
        self._start()
        return _views(coming.slot.bytes, parcel.parts)

    def drop(self, key: Hashable) -> None:
        """Forget what is kept under `key`, if anything is."""
        if key in self._coming:
            self._recall(key)
        self._parcels.pop(key, None)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._parcels

    def _start(self) -> None:
        """Fetch ahead while slots are idle."""
        while self._queue:
            key = self._queue[0]
            parcel = self._parcels.get(key)
            if parcel is not None and key not in self._coming:
                if not self._ring_of(parcel).idle:
                    return
                self._begin(key)
            self._queue.popleft()

    def _begin(self, key: Hashable) -> None:
        parcel = self._parcels[key]
        slot = self._ring_of(parcel).idle.popleft()
        stream = self._of(parcel.device).back
        with _on(stream):
            for event in (slot.free, parcel.written):
                if stream is not None and event is not None:
                    stream.wait_event(event)
            slot.bytes.copy_(parcel.host, non_blocking=stream is not None)
        self._coming[key] = _Coming(slot, _mark(stream))

    def _make_room(self, parcel: _Parcel) -> None:
        """See to it that a slot of the parcel's size is idle: what was fetched last can be fetched again."""
        ring = self._ring_of(parcel)
        if not ring.idle:
            same = [key for key in self._coming if self._ring_of(self._parcels[key]) is ring]
            self._recall(same[-1])
            self._queue.appendleft(same[-1])

    def _recall(self, key: Hashable) -> None:
        """Give up what was fetched ahead. The main stream waits for it, and so does what follows there."""
        coming, parcel = self._coming.pop(key), self._parcels[key]
        _wait(parcel.device, coming.arrived)
        coming.slot.free = coming.arrived
        self._ring_of(parcel).idle.append(coming.slot)

    def _release(self) -> None:
        """What the last `fetch` gave has been used by all that is queued on the main stream by now."""
        if self._lent is not None:
            ring, slot = self._lent
            if slot.bytes.is_cuda:
                slot.free = torch.cuda.current_stream(slot.bytes.device).record_event()
            ring.idle.append(slot)
            self._lent = None

    def _ring(self, device: torch.device, size: int) -> _Ring:
        ring = self._rings.get((device, size))
        if ring is None:
            streams = self._of(device)
            ring = self._rings[device, size] = _Ring(
                _slots(OUTGOING, size, device, streams.out),
                _slots(slots_ahead(size) + 1, size, device, streams.back),  # one is lent, the others come
            )
        return ring

    def _ring_of(self, parcel: _Parcel) -> _Ring:
        return self._ring(parcel.device, parcel.host.nbytes)

    def _of(self, device: torch.device) -> _Streams:
        if device not in self._streams:
            cuda = device.type == "cuda"
            self._streams[device] = (
                _Streams(torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else _Streams()
            )
        return self._streams[device]


def _slots(count: int, size: int, device: torch.device, stream: torch.cuda.Stream | None) -> deque[_Slot]:
    """Slots that `stream` uses beside the main one, in whose order their memory was used before."""
    slots: deque[_Slot] = deque()
    for _ in range(count):
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        free = None
        if stream is not None:
            memory.record_stream(stream)
            free = torch.cuda.current_stream(device).record_event()
        slots.append(_Slot(memory, free))
    return slots


def _views(memory: torch.Tensor, parts: Iterable[tuple[torch.Size, torch.dtype]]) -> tuple[torch.Tensor, ...]:
    """Tensors of these shapes and types that lie in `memory` (n,) uint8, one after the other."""
    views, at = [], 0
    for shape, dtype in parts:
        end = at + shape.numel() * dtype.itemsize
        views.append(memory[at:end].view(dtype).view(shape))
        at = end
    return tuple(views)


def _host_memory(x: torch.Tensor) -> torch.Tensor:
    """Memory for a copy of `x`, pinned for one on a GPU: only then is a copy not waited for."""
    try:
        return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
    except RuntimeError as error:
        raise RuntimeError(
            f"no host memory for another {pinned_bytes(x.nbytes) / 2**20:.0f} MiB of residuals; put the "
            "delta cache on the GPU in NVFP4 (gpu-nvfp4), or make the clip smaller"
        ) from error


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _mark(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    return None if stream is None else stream.record_event()


def _wait(device: torch.device, event: torch.cuda.Event | None) -> None:
    """The main stream waits."""
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)


def _wait_for_main(device: torch.device, stream: torch.cuda.Stream | None) -> None:
    """`stream` waits for what is queued on the main one."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(device))
