"""Stop a run at the first latent that is not finite, one step late so that no step waits for it."""

import torch


class FiniteWatch:
    """Sees the latents after every step; raises for a step when the next one is done, or at the end."""

    def __init__(self) -> None:
        self._waiting: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None

    def saw(self, step: int, latents: torch.Tensor) -> None:
        """Note the latents after `step` (from 0). Raises RuntimeError if those before were not finite."""
        flag = torch.isfinite(latents).all()
        done = None
        if flag.is_cuda:
            host = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag = host.copy_(flag, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        self.end()
        self._waiting = (step, flag, done)

    def end(self) -> None:
        """Raise RuntimeError if the latents last seen are not finite."""
        if self._waiting is None:
            return
        step, flag, done = self._waiting
        self._waiting = None
        if done is not None:
            done.synchronize()
        if not flag.item():
            raise RuntimeError(
                f"the latents are not finite (NaN or infinity) after step {step + 1}: stopped, "
                "since the clip would be black"
            )
