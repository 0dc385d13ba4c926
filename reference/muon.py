"""Muon: momentum whose every matrix is made orthogonal before the step.

    m <- mu m + (1 - mu) g
    u  = NS5((1 - mu) g + mu m)
    w <- (1 - lr wd) w - lr 0.2 sqrt(max(rows, columns)) u

NS5 is five steps of the quintic Newton-Schulz iteration (Jordan et al. 2024); the factor gives updates the
size of AdamW's, so that one learning rate serves both (Liu et al. 2025, arXiv 2502.16982). Matrices of one
shape are updated together, and nothing waits for the device, so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections import defaultdict

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """[n, rows, columns] with all singular values pushed towards 1; float32, computed in bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    wide = x.shape[1] <= x.shape[2]
    x = x if wide else x.mT
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x if wide else x.mT).float()


class Muon(torch.optim.Optimizer):
    """For matrices only. `lr` may be a tensor on the parameters' device.

    Args:
        matrices: two-dimensional parameters.
        lr: learning rate.
        momentum: mu above.
        weight_decay: wd above.
    """

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        lr: float | torch.Tensor,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """One update from the gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                by_shape[p.shape].append(p)
            for shape, members in by_shape.items():
                self._update(members, group, 0.2 * max(shape) ** 0.5)

    def _update(self, members: list[torch.nn.Parameter], group: dict, factor: float) -> None:
        for p in members:
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        grads = torch.stack([p.grad for p in members])
        moments = [self.state[p]["momentum"] for p in members]
        torch._foreach_lerp_(moments, list(grads.unbind(0)), 1 - group["momentum"])
        update = orthogonalize(grads.lerp(torch.stack(moments), group["momentum"])) * (group["lr"] * factor)
        for p, u in zip(members, update.unbind(0), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(u)
