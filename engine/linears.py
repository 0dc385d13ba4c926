"""A Linear that keeps its weight in NVFP4: y = x · Wᵀ + bias, in the precision that a run asks for."""

from dataclasses import replace

import torch
from torch import nn

from ..kernels import linear_w4a16
from ..sixbit_core.quantized import QuantizedWeight


class QuantizedLinear(nn.Module):
    """Stands where a diffusers `nn.Linear` stood.

    By itself it computes with 16-bit activations (W4A16); a run that routes precision replaces `forward` for
    its own duration. Its tensors are buffers: they move with `.to(device)`, and must never be cast. A weight
    that waits in host memory (`waiting`) is read from there at each call.
    """

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.hadamard = weight.hadamard
        self.register_buffer("data", weight.data)
        self.register_buffer("scale", weight.scale)
        self.register_buffer("global_scale", weight.global_scale)
        self.register_buffer("bias", bias)

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight as it lies on the device now."""
        return QuantizedWeight(
            self.data, self.scale, self.global_scale, self.out_features, self.in_features, self.hadamard
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` (..., in_features) to (..., out_features), same dtype."""
        rows = x.reshape(-1, self.in_features)
        y = linear_w4a16(rows, self.data, self.scale, self.global_scale, self.bias, self.hadamard)
        return y.reshape(*x.shape[:-1], self.out_features)


def waiting(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    """The weight in host memory, pinned where `device` is a GPU; its one global scale on the device."""
    data, scale = weight.data.cpu(), weight.scale.cpu()
    if device.type == "cuda":  # pinned memory a GPU can read
        data, scale = data.pin_memory(), scale.pin_memory()
    return replace(weight, data=data, scale=scale, global_scale=weight.global_scale.to(device))
