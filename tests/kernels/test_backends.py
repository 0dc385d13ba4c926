"""Without Triton everything imports and the references serve; with it, every op has a twin."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sixbit_diffusion import kernels

ROOT = Path(__file__).resolve().parents[2]
OPS = {name: op for name, op in vars(kernels).items() if isinstance(op, kernels.Op)}

BLOCKED = """
import importlib.util, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ImportError("blocked")

sys.meta_path.insert(0, Block())
import torch
init = ROOT + "/__init__.py"
spec = importlib.util.spec_from_file_location("pack", init, submodule_search_locations=[ROOT])
sys.modules["pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["pack"])
from pack import kernels
weight = kernels.quantize_nvfp4(torch.ones(16, 32))
y = kernels.linear_w4a8(torch.ones(2, 32), *weight)
assert torch.allclose(y, torch.full((2, 16), 32.0), rtol=1e-3), y
assert set(kernels.quantize_int8.implementations) == {"reference"}
print(kernels.backend_line())
"""


def test_without_triton_the_references_serve():
    code = BLOCKED.replace("ROOT", repr(str(ROOT)))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "Kernels: Triton is not installed; the PyTorch references serve."


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_op_has_a_twin():
    assert len(OPS) == 13
    assert all(set(op.implementations) == {"reference", "triton"} for op in OPS.values())


def test_the_status_is_one_sentence():
    line = kernels.backend_line()
    assert line.startswith("Kernels: ") and line.endswith(".") and "\n" not in line
    if not torch.cuda.is_available():
        assert "references serve" in line


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_gpu_that_is_too_old_is_told(monkeypatch):
    from sixbit_diffusion.kernels import support_triton

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    reason = support_triton.reason_against.__wrapped__(0)
    assert reason == "the Triton kernels need compute capability 8.0, this GPU has 7.5"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in support_triton.reason_against.__wrapped__(0)
