import pytest
import torch
from sixbit_diffusion.kernels import block_hadamard, linear_w4a4, linear_w4a8, linear_w4a16, quantize_nvfp4
from sixbit_diffusion.sixbit_core.formats import FORMATS
from sixbit_diffusion.sixbit_core.linear import mixed_linear
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight

KERNELS = {"nvfp4": (4, linear_w4a4), "int8": (8, linear_w4a8), "bf16": (16, linear_w4a16)}


def make_weight(rows: int, columns: int, hadamard: int) -> QuantizedWeight:
    raw = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    parts = quantize_nvfp4(block_hadamard(raw, hadamard) if hadamard > 1 else raw)
    return QuantizedWeight(*parts, rows, columns, hadamard)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("hadamard", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_format_runs_its_kernel_on_any_rank(name, hadamard, dtype):
    weight, bias = make_weight(48, 64, hadamard), torch.arange(48.0)
    x = torch.randn(2, 3, 5, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    bits, kernel = KERNELS[name]
    y = mixed_linear(x, weight, bias, name)
    flat = kernel(x.reshape(30, 64), weight.data, weight.scale, weight.global_scale, bias, hadamard)
    assert torch.equal(y, flat.reshape(2, 3, 5, 48)) and y.dtype == dtype
    assert FORMATS[name].bits == bits and FORMATS[name].name == name


def test_finer_formats_come_nearer_to_the_decoded_weight():
    weight = make_weight(48, 64, 64)
    x = torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(2))
    exact = x @ weight.dequantize().T
    errors = [(mixed_linear(x, weight, None, name) - exact).norm() / exact.norm() for name in KERNELS]
    assert 0.05 < errors[0] < 0.15 and 0.002 < errors[1] < 0.02 and errors[2] < 1e-5


def test_wrong_format_and_width_are_named():
    weight = make_weight(16, 32, 0)
    with pytest.raises(ValueError, match="nvfp4, int8, bf16, got 'fp8'"):
        mixed_linear(torch.ones(1, 32), weight, None, "fp8")
    with pytest.raises(ValueError, match="32 wide"):
        mixed_linear(torch.ones(1, 16), weight, None, "int8")
