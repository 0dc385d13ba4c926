"""What of the nodes needs no host: packed weights, hardware paths, file lists, clip checks."""

from pathlib import Path

import pytest
import torch
from sixbit_diffusion.nodes.files import REFERENCE, find_model, list_models, quantized_copy
from sixbit_diffusion.nodes.machine import compute_path, fit_to_machine, path_by
from sixbit_diffusion.nodes.packed import pack, packed_size, requantize, unpack
from sixbit_diffusion.sixbit_core.config import DMPQConfig
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_linear


@pytest.mark.parametrize("rotation", ["on", "off"])
def test_packing_is_exact(rotation: str) -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    quantized = quantize_linear(weight, QuantizeConfig(rotation=rotation))
    packed = pack(quantized)
    assert packed.dtype == torch.uint8 and packed.shape == (packed_size(48, 64),)
    back = unpack(packed, 48, 64, quantized.hadamard)
    assert torch.equal(back.dequantize(), quantized.dequantize())
    assert back.data.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


def test_requantizing_a_decoded_weight_keeps_it() -> None:
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    once = requantize(weight, 64)
    assert once.hadamard == 64
    error = (once.dequantize() - weight).norm() / weight.norm()
    again = requantize(once.dequantize(), 64).dequantize()
    assert error < 0.12 and (again - once.dequantize()).norm() / weight.norm() < 0.03


def test_a_packed_weight_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"packed weight \[48, 64\] is 1732 bytes"):
        unpack(torch.zeros(10, dtype=torch.uint8), 48, 64, 0)


@pytest.mark.parametrize(
    ("device", "capability", "hip", "path"),
    [
        ("cuda", (7, 0), False, "reference"),
        ("cuda", (7, 5), False, "reference"),
        ("cuda", (8, 0), False, "int8"),
        ("cuda", (8, 6), False, "int8"),
        ("cuda", (8, 9), False, "int8"),
        ("cuda", (9, 0), False, "int8"),
        ("cuda", (10, 0), False, "fp4"),
        ("cuda", (12, 0), False, "fp4"),
        ("cuda", None, True, "reference"),
        ("mps", None, False, "reference"),
        ("cpu", None, False, "reference"),
    ],
)
def test_path_of_every_device(device: str, capability: tuple[int, int], hip: bool, path: str) -> None:
    assert compute_path(device, capability, hip) == path


@pytest.mark.parametrize(
    ("backend", "of_fp4", "of_int8"),
    [
        ("triton", "fp4", "int8"),
        ("kitchen", "int8", "int8"),
        ("int_mm", "int8", "int8"),
        ("half", "reference", "reference"),
        ("reference", "reference", "reference"),
    ],
)
def test_without_triton_there_is_no_fp4_and_int8_where_it_pays(backend, of_fp4, of_int8) -> None:
    assert (path_by(backend, "fp4"), path_by(backend, "int8")) == (of_fp4, of_int8)


@pytest.mark.parametrize(
    ("path", "compute", "router", "runs"),
    [
        ("int8", "auto", "auto", "int8"),
        ("int8", "auto", "nvfp4", "int8"),
        ("int8", "auto", "bf16", "bf16"),
        ("int8", "auto", "int8-protect", "int8-protect"),
        ("reference", "auto", "auto", "int8"),
        ("reference", "auto", "int8-protect", "int8-protect"),
        ("reference", "auto", "nvfp4", "int8"),
        ("int8", "emulate", "nvfp4", "nvfp4"),
        ("fp4", "auto", "nvfp4", "nvfp4"),
        ("reference", "emulate", "nvfp4", "nvfp4"),
    ],
)
def test_router_that_runs(path: str, compute: str, router: str, runs: str) -> None:
    config, line = fit_to_machine(DMPQConfig(router=router), path, compute)
    assert config.router == runs and "\n" not in line and line


def test_model_list_shows_files_and_sharded_folders_once(tmp_path: Path) -> None:
    (tmp_path / "sharded").mkdir()
    for name in ("model-00001-of-00002", "model-00002-of-00002"):
        (tmp_path / "sharded" / f"{name}.safetensors").touch()
    (tmp_path / "sharded" / "model.safetensors.index.json").touch()
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "single.safetensors").touch()
    (tmp_path / "note.txt").touch()
    names = [name for name in list_models([tmp_path]) if name != REFERENCE]
    assert names == ["sharded/", "sub/single.safetensors"]
    assert find_model("sharded/", [tmp_path]) == tmp_path / "sharded"
    assert quantized_copy(tmp_path / "sharded").name == "sharded-6bit.safetensors"
    assert quantized_copy(tmp_path / "sub" / "single.safetensors").name == "single-6bit.safetensors"
    with pytest.raises(ValueError, match="there is no model gone"):
        find_model("gone", [tmp_path])
