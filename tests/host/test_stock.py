"""A file of `sixbit quantize --compatible` loads in the host without this pack, with the weights it holds."""

from pathlib import Path

import pytest
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint

pytest.importorskip("diffusers")
from host_cases import VARIANTS, Variant, make_transformer


@pytest.mark.parametrize("variant", ["5b", "1.5"])
def test_a_compatible_file_is_read_by_the_stock_loader(host, tmp_path: Path, variant: str) -> None:
    published = {**VARIANTS[variant].changes, "in_channels": 16, "out_channels": 16}  # the host counts on it
    make_transformer(Variant(variant, published)).save_pretrained(tmp_path / "tiny")
    target = tmp_path / "compatible.safetensors"
    summary = quantize_checkpoint(tmp_path / "tiny", target, QuantizeConfig("rtn", compatible=True))
    found = host.run("stock", file=target)
    assert found["different"] == [] and found["packed"] == summary.layers, found["log"][-2000:]
