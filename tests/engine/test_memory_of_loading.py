"""Reading a quantized file takes the file's size and little more, and never a 16-bit copy."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sixbit_diffusion.sixbit_core.families.cogvideox import SMALL
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight
from sixbit_diffusion.sixbit_core.safetensors_file import StreamWriter

ROOM = 256 * 2**20
# As the 2B, a third of its layers: 1 GB in 16 bits; making its sincos table takes half that for a moment.
FAMILY = replace(
    SMALL, layers=10, heads=30, time_embed_dim=512, text_embed_dim=1024, rotary=False, sample_size=(60, 90)
)
LOADING = """
import sys
from pathlib import Path
import tests.conftest
import torch
from sixbit_diffusion.engine.facts import CLIP_DEFAULTS, ModelFacts
from sixbit_diffusion.engine.transformer import build_transformer
from sixbit_diffusion.sixbit_core.checkpoint import open_checkpoint

def peak():
    return next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024

checkpoint = open_checkpoint(Path(sys.argv[1]))
config = {**CLIP_DEFAULTS, **checkpoint.family.diffusers_config(checkpoint.shapes)}
config |= dict(sample_height=60, sample_width=90, sample_frames=49, use_rotary_positional_embeddings=False)
facts = ModelFacts("", checkpoint, Path(sys.argv[1]).parent, config, 8, 4)
before = peak()
model = build_transformer(facts, "search", torch.device("cpu"), torch.float32)
print(peak() - before)
"""


@pytest.fixture(scope="module")
def quantized_file(tmp_path_factory):
    """A quantized checkpoint of `FAMILY`, of bytes as they come."""
    path = tmp_path_factory.mktemp("large") / "quantized.safetensors"
    shapes, layers = FAMILY.tensor_shapes(), {*FAMILY.block_layers(), *FAMILY.modulation_layers()}
    one_of, tensors = {}, {}  # layers of a shape share their bytes
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer not in layers or layer == name:
            tensors[name] = one_of.setdefault(shape, torch.zeros(shape, dtype=torch.bfloat16))
            continue
        if shape not in one_of:
            data = torch.ones(shape[0], shape[1] // 2, dtype=torch.uint8)
            scale = torch.ones(shape[0], shape[1] // 16).to(torch.float8_e4m3fn)
            one_of[shape] = QuantizedWeight(data, scale, torch.ones(()), *shape)
        tensors |= one_of[shape].state_dict(layer)
    entries = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
    with StreamWriter(path, entries, {}) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    yield path
    path.unlink()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_a_quantized_file_takes_its_size(quantized_file: Path):
    pytest.importorskip("diffusers")
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LOADING, str(quantized_file)], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    size, peak = quantized_file.stat().st_size, int(done.stdout)
    assert 300 * 2**20 < size < peak + 2**20 and peak < size + ROOM
