"""Files in ComfyUI's own number formats, made and read by a real host: what we read of them is bit for bit
what the host reads, and what we do not read is refused before loading, by its name."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sixbit_diffusion.sixbit_core.families import to_native

pytest.importorskip("diffusers")
from host_cases import VARIANTS, Variant, make_transformer

READ = {
    "int8_tensorwise": "int8_tensorwise",
    "int8_rowwise": "int8_tensorwise",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "nvfp4": "nvfp4",
    "scaled_fp8": "float8_e4m3fn",
    "marked_in_the_header": "int8_tensorwise",
}
REFUSED = {
    "int8_convrot": "int8_tensorwise with convrot",
    "mxfp8": "mxfp8",
    "convrot_w4a4": "convrot_w4a4",
    "asym_w4a8_int8": "asym_w4a8_int8",
}
INSTEAD = (
    "take a file in bf16, int8_tensorwise, float8_e4m3fn, float8_e5m2 or nvfp4, or load this one with "
    "ComfyUI's Load Diffusion Model"
)


@pytest.fixture(scope="module")
def results(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("diffusion_models")
    published = {**VARIANTS["5b"].changes, "in_channels": 16, "out_channels": 16}  # the host counts on it
    state = make_transformer(Variant("5b", published)).state_dict()
    native = {to_native(name): tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(native, folder / "tiny.safetensors")
    return {"folder": folder, **host.run("formats", folder=folder)["results"]}


def test_every_format_of_the_host_is_tried(results: dict) -> None:
    assert results["all_are_tried"] == []


def test_what_the_host_reads_the_type_of_is_decoded(results: dict) -> None:
    assert results["nvfp4_patch_embedding"] is True


@pytest.mark.parametrize("case", READ)
def test_a_format_that_is_read(results: dict, case: str) -> None:
    assert results[case] == {"different": [], "formats": {READ[case]: 4}, "copy": True, "finite": True}


@pytest.mark.parametrize("case", REFUSED)
def test_a_format_that_is_refused(results: dict, case: str) -> None:
    path = Path(results["folder"]) / f"{case}.safetensors"
    said = f"{path}: blocks.0.q is in the format {REFUSED[case]!r}, which this pack does not read; {INSTEAD}"
    assert results[case] == said
