import json

import pytest
import torch
from sixbit_diffusion.kernels import block_hadamard, quantize_nvfp4
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight, file_entries, read_mark, rotation_of


def weight(rows=48, columns=80, hadamard=0, seed=0):
    exact = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    turned = block_hadamard(exact, hadamard)
    return exact, QuantizedWeight(*quantize_nvfp4(turned), rows, columns, hadamard)


@pytest.mark.parametrize(("columns", "hadamard"), [(80, 0), (80, 16), (384, 128), (16, 16)])
def test_file_and_back(columns, hadamard):
    _, quantized = weight(48, columns, hadamard)
    stored = quantized.state_dict("blocks.0.q")
    assert [(k, v.dtype, tuple(v.shape)) for k, v in stored.items()] == file_entries(
        "blocks.0.q", 48, columns
    )
    back = QuantizedWeight.from_state_dict(stored.__getitem__, "blocks.0.q")
    assert (back.out_features, back.in_features, back.hadamard) == (48, columns, hadamard)
    assert torch.equal(back.data, quantized.data) and torch.equal(back.global_scale, quantized.global_scale)
    assert torch.equal(back.scale.view(torch.uint8), quantized.scale.view(torch.uint8))


def test_marks_are_what_hosts_look_for():
    plain = weight()[1].state_dict("x")["x.comfy_quant"]
    rotated = weight(hadamard=16)[1].state_dict("x")["x.comfy_quant"]
    assert json.loads(plain.numpy().tobytes()) == {"format": "nvfp4"}
    assert json.loads(rotated.numpy().tobytes()) == {"format": "sixbit_nvfp4", "hadamard": 16}


@pytest.mark.parametrize("hadamard", [0, 16])
def test_dequantize_gives_the_weight_back(hadamard):
    exact, quantized = weight(hadamard=hadamard)
    decoded = quantized.dequantize()
    assert 0.05 < (decoded - exact).norm() / exact.norm() < 0.11
    assert quantized.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_even_element_is_in_the_high_nibble():
    quantized = QuantizedWeight(*quantize_nvfp4(torch.tensor([[6.0, -0.5] + [0.0] * 14])), 1, 16)
    assert quantized.data[0, 0] == 0x79  # 6 is code 7, -0.5 is code 9


def test_nbytes_counts_what_is_held():
    assert weight(64, 128)[1].nbytes == 64 * 64 + 64 * 8 + 4


def broken(**changes):
    stored = weight(16, 32)[1].state_dict("x")
    return {**stored, **{f"x.{key}": value for key, value in changes.items()}}.__getitem__


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"comfy_quant": torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8)}, "float8"),
        ({"comfy_quant": torch.tensor([1, 2], dtype=torch.uint8)}, "no JSON"),
        ({"comfy_quant": torch.tensor(list(b"[1]"), dtype=torch.uint8)}, "no JSON object"),
        ({"comfy_quant": torch.tensor(list(b"[" * 100_000), dtype=torch.uint8)}, "no JSON"),
        ({"weight_scale_2": torch.tensor(float("nan"))}, "x.weight_scale_2 is nan, needs a finite scale"),
        ({"weight": torch.zeros(16, 16)}, r"x.weight must be a 2-D uint8"),
        ({"weight_scale": torch.zeros(16, 2).to(torch.float8_e4m3fn)}, r"x.weight_scale must be \(128, 4\)"),
    ],
)
def test_what_is_no_nvfp4_layer(changes, message):
    with pytest.raises(ValueError, match=message):
        QuantizedWeight.from_state_dict(broken(**changes), "x")


@pytest.mark.parametrize("hadamard", [None, 0, 1, 3, 24, 64, -16, 16.0, True, "16"])
def test_a_rotated_layer_needs_its_block_size(hadamard):
    mark = {"format": "sixbit_nvfp4"} | ({} if hadamard is None else {"hadamard": hadamard})
    text = torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"x is marked sixbit_nvfp4 .* power of two from 2 to 128 that divides 32"
    ):
        QuantizedWeight.from_state_dict(broken(comfy_quant=text), "x")


def test_a_rotation_is_no_larger_than_the_kernels_take():
    with pytest.raises(ValueError, match="hadamard 256; needed is a power of two from 2 to 128"):
        rotation_of({"format": "sixbit_nvfp4", "hadamard": 256}, "x", 512)
    assert rotation_of({"format": "sixbit_nvfp4", "hadamard": 128}, "x", 512) == 128


def test_shapes_that_do_not_belong_together():
    data, scale, global_scale = quantize_nvfp4(torch.ones(4, 32))
    with pytest.raises(ValueError, match=r"NVFP4 weight \[4, 64\]"):
        QuantizedWeight(data, scale, global_scale, 4, 64)


def test_a_layer_that_would_need_padding_is_refused():
    with pytest.raises(ValueError, match="multiples of 16"):
        weight(24, 32)[1].state_dict("x")


def test_reads_a_mark_with_blanks():
    text = b'{"format": "nvfp4"}   '
    assert read_mark(torch.tensor(list(text), dtype=torch.uint8)) == {"format": "nvfp4"}


def test_comfy_kitchen_decodes_the_same():
    kitchen = pytest.importorskip("comfy_kitchen", reason="comfy-kitchen is not installed")
    if not hasattr(kitchen, "dequantize_nvfp4"):
        pytest.skip("this comfy-kitchen has no dequantize_nvfp4")
    _, quantized = weight(64, 256)
    stored = quantized.state_dict("x")
    with kitchen.use_backend("eager"):
        theirs = kitchen.dequantize_nvfp4(
            stored["x.weight"], stored["x.weight_scale_2"], stored["x.weight_scale"], torch.float32
        )
    torch.testing.assert_close(theirs, quantized.dequantize(), rtol=1e-6, atol=1e-7)
