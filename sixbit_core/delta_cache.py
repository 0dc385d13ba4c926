"""Temporal delta cache: the residual Δ = Y − X of a block, kept per block and stream for a later step.

One Δ per block and stream is enough: the change r = ‖Δ_new − Δ_old‖₂ / ‖Δ_old‖₂ needs the older one only
while the newer is made. Source: 6Bit-Diffusion (arXiv 2603.18742), TDC.

Where Δ waits, `delta_codecs` says; from host memory it is fetched ahead of its use. A rounded Δ is off by its
rounding error q, and that would pass for change: q is measured when Δ is stored and taken out, r = sqrt(max(
r_measured² − q², 0)), since rounding errors do not correlate with Δ.

Most blocks skip the same evaluations, which then last as long as the way from host memory. So there the sum
of Δ over each span of `SPAN` blocks is kept as well, X after the last minus X before the first: where all of
them were computed in one evaluation and all are skipped, the first adds the sum, the others nothing.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch

from ..kernels import apply_delta, block_measures
from .courier import Courier
from .delta_codecs import CODECS, SPAN, Payload, resolve_location
from .layout import Stream

Pair = tuple[torch.Tensor, torch.Tensor]  # of the video, of the text
Shape = tuple[int, int, int]  # video tokens, text tokens, width


@dataclass
class _Entry:
    payload: Payload  # empty where it is away
    bytes: int
    shape: Shape
    dtype: torch.dtype
    device: torch.device
    evaluation: int  # at which Δ was made
    rounding: torch.Tensor | None  # (1,) relative error of the payload, on the device; None if exact


@dataclass(frozen=True)
class _Begun:
    """A span whose blocks are being computed one after the other.

    Attributes:
        next: the block that must come next.
        inp: what the first block got.
        out: what the last one gave, held so that nothing else comes to lie there.
        last: its `_identity` then.
    """

    evaluation: int
    next: int
    inp: Pair
    out: Pair
    last: tuple[object, ...]


class DeltaCache:
    """Residuals of `blocks` transformer blocks for one sampling run, by block and stream.

    Without `sums` no sum over a span is kept or used, wherever Δ waits.
    """

    def __init__(self, location: str, blocks: int, sums: bool = True) -> None:
        self.location, self.blocks = resolve_location(location), blocks
        self._codec = CODECS[self.location]
        self._sums = sums and self._codec.away
        self.reset()

    def reset(self) -> None:
        """Forget every residual. The only place that names the fields."""
        self._entries: dict[tuple[int, Stream], _Entry] = {}  # a span is under -1 minus its first block
        self._begun: dict[Stream, _Begun] = {}
        self._together = [False] * self.blocks  # blocks that are skipped with all of their span
        self._courier = Courier()
        self.bytes = 0
        self.peak_bytes = 0

    def holds(self, block: int, stream: Stream, video: torch.Tensor, text: torch.Tensor) -> bool:
        """Whether a Δ for inputs like these is kept; one of another size, dtype or device is dropped."""
        entry = self._entries.get((block, stream))
        if entry is None:
            return False
        if (entry.shape, entry.dtype, entry.device) == (_shape(video, text), video.dtype, video.device):
            return True
        self._drop((block, stream))
        return False

    def expect(self, streams: Sequence[Stream], skips: Sequence[bool]) -> None:
        """Say that all blocks will be asked about these streams, block by block, and which are skipped."""
        if not self._codec.away:
            return
        if self._sums:
            self._together = [all(skips[n] for n in self._span(block)) for block in range(self.blocks)]
        places = ((block, stream) for block in range(self.blocks) for stream in streams)
        self._courier.expect(key for place in places if (key := self._key(*place)) is not None)

    def evaluation(self, block: int, stream: Stream) -> int:
        """The evaluation at which the kept Δ was made. KeyError if there is none."""
        return self._entries[block, stream].evaluation

    def change(self, block: int, stream: Stream, inp: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Γ and the change of Δ against the kept one.

        Args:
            inp, out: (N, D) the block's video tokens of one stream; a Δ must be kept for it.

        Returns:
            (2,) float32 on the device, the change not yet divided by the evaluations in between.
        """
        entry = self._entries[block, stream]
        previous = self._decode((block, stream))[: inp.shape[0]]
        measures = block_measures(inp[None], out[None], previous[None])[0]
        if entry.rounding is None:
            return measures
        corrected = (measures[1:].square() - entry.rounding.square()).clamp(min=0).sqrt()
        return torch.cat([measures[:1], corrected])

    def store(
        self,
        block: int,
        stream: Stream,
        evaluation: int,
        inp: tuple[torch.Tensor, torch.Tensor],
        out: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Keep Δ = out − inp, in place of an older one.

        Args:
            evaluation: the present one.
            inp, out: (video (N, D), text (T, D)) of one stream before and after the block.
        """
        self._keep_difference((block, stream), evaluation, inp, out)
        if not self._sums:
            return
        span = self._span(block)
        begun = self._begun.pop(stream, None)
        if block == span[0]:
            begun = _Begun(evaluation, block, inp, inp, _identity(inp))
        if begun is None or (begun.evaluation, begun.next, begun.last) != (evaluation, block, _identity(inp)):
            return  # not every block of the span, or something changed what one gave before the next got it
        if block == span[-1]:
            self._keep_difference((-1 - span[0], stream), evaluation, begun.inp, out)
        else:
            self._begun[stream] = replace(begun, next=block + 1, out=out, last=_identity(out))

    def _keep_difference(self, key: tuple[int, Stream], evaluation: int, inp: Pair, out: Pair) -> None:
        """Keep out − inp under a block or, whose changes nobody asks for, a span."""
        video, text = inp
        delta = video.new_empty((video.shape[0] + text.shape[0], video.shape[1]))
        torch.sub(out[0], video, out=delta[: video.shape[0]])
        torch.sub(out[1], text, out=delta[video.shape[0] :])
        payload = self._codec.encode(delta)
        rounding = None
        if not self._codec.exact and key[0] >= 0:
            kept = self._codec.decode(payload, video.dtype)[: video.shape[0]]
            rounding = block_measures(video[None], out[0][None], kept[None])[0, 1:]
        self._forget(key)
        size = sum(part.nbytes for part in payload)
        if self._codec.away:
            self._courier.send(key, payload)
            payload = ()
        entry = _Entry(payload, size, _shape(video, text), video.dtype, video.device, evaluation, rounding)
        self._entries[key] = entry
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def apply(
        self,
        block: int,
        stream: Stream,
        video: torch.Tensor,
        text: torch.Tensor,
        scale: float = 1.0,
        out: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`video` (N, D) and `text` (T, D) plus the kept Δ, the video's times `scale`; in `out` or anew.

        Of a span that is skipped together the first block adds all of it and the others nothing; `scale` must
        then be 1.

        Raises:
            KeyError: if none is kept.
            ValueError: for another scale of a sum.
        """
        self._begun.pop(stream, None)  # what a span began with is not needed any more
        key = self._key(block, stream)
        if scale != 1.0 and (key is None or key[0] < 0):
            raise ValueError("a sum of residuals cannot be scaled: make the cache without sums")
        if key is None:
            pairs = zip((video, text), out, strict=True)
            return tuple(x if place is None else place.copy_(x) for x, place in pairs)
        delta = self._decode(key)
        moved, still = delta[: video.shape[0]], delta[video.shape[0] :]
        moved = moved if scale == 1.0 else moved * scale
        return apply_delta(video, moved, out[0]), apply_delta(text, still, out[1])

    def passes(self, block: int, stream: Stream) -> bool:
        """Whether `apply` gives what it gets, the span's first block having added all of it."""
        return self._key(block, stream) is None

    def keep(self, streams: Collection[Stream]) -> None:
        """Drop the residuals of every other stream."""
        for key in [key for key in self._entries if key[1] not in streams]:
            self._drop(key)

    def clear(self) -> None:
        """Free every tensor. `peak_bytes` stays."""
        self.keep(())
        self._begun.clear()
        self._courier = Courier()

    def _span(self, block: int) -> range:
        first = block - block % SPAN
        return range(first, min(first + SPAN, self.blocks))

    def _key(self, block: int, stream: Stream) -> tuple[int, Stream] | None:
        """Of the residual that a block takes: its own, its span's, or none where that is added already."""
        span = self._span(block)
        sum_of_span = self._entries.get((-1 - span[0], stream))
        if not self._together[block] or sum_of_span is None:
            return block, stream
        kept = [self._entries.get((n, stream)) for n in span]
        if any(entry is None or entry.evaluation != sum_of_span.evaluation for entry in kept):
            return block, stream
        return (-1 - block, stream) if block == span[0] else None

    def _decode(self, key: tuple[int, Stream]) -> torch.Tensor:
        """The kept Δ; one that was away is valid until the next is asked for."""
        entry = self._entries[key]
        payload = self._courier.fetch(key) if self._codec.away else entry.payload
        return self._codec.decode(payload, entry.dtype)

    def _drop(self, key: tuple[int, Stream]) -> None:
        self._forget(key)
        self._courier.drop(key)

    def _forget(self, key: tuple[int, Stream]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.bytes


def _identity(pair: Pair) -> tuple[object, ...]:
    """What two tensors share that are the same one. A change in place shows where PyTorch counts them: not in
    inference mode, where a caller who expects any makes the cache without sums."""
    return tuple((x.data_ptr(), x.shape, x.dtype, None if x.is_inference() else x._version) for x in pair)


def _shape(video: torch.Tensor, text: torch.Tensor) -> Shape:
    return video.shape[0], text.shape[0], video.shape[1]
