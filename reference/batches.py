"""What a training step of the transformer sees: random clips, captions, times and noise.

Clips with two objects and clips that spin are the hardest to learn; each kind may be drawn more often than
the data hold it. Within a kind every clip is as likely as another.
"""

from __future__ import annotations

import torch

from .models import make_scheduler
from .tokenizer import load_tokenizer, token_ids
from .world import MOTIONS

EMPTY_SHARE = 0.1  # of the captions


class Batches:
    """Random clips, captions, times and noise, all made on the device.

    Args:
        data: the tensors that `encode_clips` writes.
        batch: clips a step.
        pair_share: how often a clip with two objects is drawn; None: as often as the data hold them.
        spin_share: likewise for clips that spin.

    Raises:
        ValueError: for shares that the data cannot give, or data of an earlier version.
    """

    def __init__(
        self,
        data: dict[str, torch.Tensor],
        batch: int,
        pair_share: float | None = None,
        spin_share: float | None = None,
    ):
        missing = sorted({"latents", "tokens", "count", "motion"} - data.keys())
        if missing:
            raise ValueError(f"latents.safetensors lacks {', '.join(missing)}: run the stage `encode` again")
        self.latents, self.tokens, self.batch = data["latents"], data["tokens"], batch
        self.device = device = self.latents.device
        pair, spin = data["count"] == 2, data["motion"] == MOTIONS.index("spinning")
        group = torch.where(pair, 1, torch.where(spin, 2, 0))
        self.order = group.argsort(stable=True)
        sizes = group.bincount(minlength=3)
        self.sizes, self.starts = sizes.float(), sizes.cumsum(0) - sizes
        shares = group_shares(sizes.tolist(), pair_share, spin_share)
        self.bounds = torch.tensor(shares[:2], device=device).cumsum(0)
        self.last = max(i for i, share in enumerate(shares) if share > 0)  # sums of shares may end below 1
        self.empty = token_ids(load_tokenizer(), [""])[0].to(device)
        alphas = make_scheduler().alphas_cumprod.to(device, torch.float32)
        self.signal, self.noise = alphas.sqrt(), (1 - alphas).sqrt()

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x_t [B, 9, 16, 16, 16], t [B] int64, token ids [B, 32], v like x_t in float32."""
        n, device = self.batch, self.device
        clip = self.draw_clips(n)
        ids = self.tokens[clip, torch.randint(self.tokens.shape[1], (n,), device=device)].long()
        ids = torch.where(torch.rand(n, 1, device=device) < EMPTY_SHARE, self.empty, ids)
        steps = len(self.signal)
        t = (torch.arange(n, device=device) + torch.rand(n, device=device)) * (steps / n)
        t = t.long().clamp_(max=steps - 1)
        x0 = self.latents[clip].float()
        noise = torch.randn_like(x0)
        a, b = self.signal[t].view(-1, 1, 1, 1, 1), self.noise[t].view(-1, 1, 1, 1, 1)
        return a * x0 + b * noise, t, ids, a * noise - b * x0

    def draw_clips(self, n: int) -> torch.Tensor:
        """[n] int64 places of clips: a group by its share, then any clip of it."""
        group = torch.bucketize(torch.rand(n, device=self.device), self.bounds, right=True)
        group = group.clamp_(max=self.last)
        inside = (torch.rand(n, device=self.device) * self.sizes[group]).long()
        return self.order[self.starts[group] + inside]


def group_shares(sizes: list[int], pair: float | None, spin: float | None) -> list[float]:
    """Shares of (one object not spinning, two objects, one spinning), from their sizes where none are given.

    Raises:
        ValueError: for shares that do not fit, or of a group that is empty.
    """
    pair = sizes[1] / sum(sizes) if pair is None else pair
    spin = sizes[2] / sum(sizes) if spin is None else spin
    shares = [1 - pair - spin, pair, spin]
    if any(share < -1e-9 or (share > 1e-9 and not size) for share, size in zip(shares, sizes, strict=True)):
        raise ValueError(
            f"shares of pairs and spinning clips needed to fit the data, got {pair:.3f} and {spin:.3f} "
            f"for {sizes[1]} and {sizes[2]} of {sum(sizes)} clips: lower them or encode other clips"
        )
    return [max(0.0, share) for share in shares]
