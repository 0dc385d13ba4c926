"""Without Triton everything imports and the references serve; with it, every op has a twin."""

from __future__ import annotations

import errno
import importlib.util
import re
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
            raise self.error

block = Block()
sys.meta_path.insert(0, block)
import torch
init = ROOT + "/__init__.py"
for i, block.error in enumerate((
    ModuleNotFoundError("absent", name="triton"),
    ModuleNotFoundError("absent", name="triton.knobs"),
    ImportError("DLL load failed\\nsecond line"),
)):
    spec = importlib.util.spec_from_file_location(f"pack{i}", init, submodule_search_locations=[ROOT])
    sys.modules[f"pack{i}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[f"pack{i}"])
    kernels = importlib.import_module(f"pack{i}.kernels")
    weight = kernels.quantize_nvfp4(torch.ones(16, 32))
    y = kernels.linear_w4a8(torch.ones(2, 32), *weight)
    assert torch.allclose(y, torch.full((2, 16), 32.0), rtol=1e-3), y
    assert kernels.quantize_int8.select(torch.ones(2, 32)) == "reference"
    assert set(kernels.quantize_int8.implementations) == {"reference", "half"}
    print(kernels.backend_line())
"""


def test_without_triton_the_references_serve():
    code = BLOCKED.replace("ROOT", repr(str(ROOT)))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    reasons = (
        "Triton is not installed",
        "Triton is older than 3.6",
        "Triton cannot be imported: DLL load failed",
    )
    assert ran.stdout.splitlines() == [
        f"Kernels: {reason}; the PyTorch references serve." for reason in reasons
    ]


@pytest.mark.parametrize("product", kernels.linear_torch.SPOKEN)
def test_the_status_of_a_gpu_without_triton_says_how_it_multiplies(monkeypatch, product):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(kernels.linear_torch, "_product_of", lambda device: product)
    monkeypatch.setattr(kernels, "_NO_TRITON", "Triton is not installed")
    spoken = kernels.linear_torch.SPOKEN[product]
    assert kernels.backend_line() == (f"Kernels: Triton is not installed; {spoken}; PyTorch serves the rest.")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_op_has_a_twin():
    assert len(OPS) == 19
    for op in OPS.values():  # Triton's first: the others are for where it does not run
        assert list(op.implementations)[:2] == ["reference", "triton"]
    assert set(kernels.int8_linear.implementations) == {"reference", "triton", *kernels.linear_torch.PRODUCTS}
    assert set(kernels.linear_w4a16.implementations) == {"reference", "triton", "half"}


def test_the_status_is_one_sentence():
    line = kernels.backend_line()
    assert line.startswith("Kernels: ") and line.endswith(".") and "\n" not in line
    if not torch.cuda.is_available():
        assert "references serve" in line


@pytest.mark.parametrize(
    "triton, capability, seconds",
    [(True, (8, 9), 20), (True, (9, 0), 0), (False, (8, 9), 0)],  # the table of 9.0 was measured
)
def test_tuning_is_told_beforehand(monkeypatch, triton, capability, seconds):
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(kernels.support_triton, "supported", lambda x: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    device = torch.device("cpu")  # as if it were a GPU
    assert kernels.int8_backend(device) == ("triton" if triton else "reference")
    assert kernels.tuning_seconds(device) == seconds


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_gpu_that_is_too_old_is_told(monkeypatch):
    from sixbit_diffusion.kernels import support_triton

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    reason = support_triton.reason_against.__wrapped__(0)  # past the cache
    assert reason == "the Triton kernels need compute capability 8.0, this GPU has 7.5"
    monkeypatch.setattr(torch.version, "hip", "6.0")
    assert "AMD" in support_triton.reason_against.__wrapped__(0)


@pytest.fixture
def support(monkeypatch):
    """`support_triton` on a GPU that is new enough, with nothing remembered; `fail(error)` sets its probe."""
    support_triton = pytest.importorskip("sixbit_diffusion.kernels.support_triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(support_triton.probe, "verdict", lambda *_: "")  # its own tests: test_probe.py

    def fail(error: Exception | None) -> None:
        def probe(_device: int) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(support_triton, "_probe", probe)

    support_triton.fail = fail
    support_triton.reason_against.cache_clear()
    yield support_triton
    support_triton.reason_against.cache_clear()
    del support_triton.fail


PASSING = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    OSError(errno.ENOSPC, "No space left on device"),
]
LASTING = [
    RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
    RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
    FileNotFoundError(errno.ENOENT, "No such file or directory", "/usr/bin/gcc"),
    subprocess.CalledProcessError(1, "gcc"),
    ImportError("DLL load failed"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_what_passes_is_raised_and_forgotten(support, error):
    support.fail(error)
    with pytest.raises(type(error), match=re.escape(str(error))):
        support.reason_against(0)
    support.fail(None)
    assert support.reason_against(0) == ""


@pytest.mark.parametrize("error", LASTING, ids=str)
def test_what_lasts_is_told_and_remembered(support, error):
    support.fail(error)
    reason = support.reason_against(0)
    assert "does not run here: " + str(error) in reason and "\n" not in reason
    support.fail(None)
    assert support.reason_against(0) == reason


def test_a_failed_compilation_is_told(support):
    from triton.errors import TritonError

    support.fail(TritonError("ptxas\nfatal: unknown target"))
    assert support.reason_against(0).endswith("does not run here: fatal: unknown target")


def test_a_bug_is_no_reason(support):
    support.fail(TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        support.reason_against(0)


def test_arguments_may_be_named(monkeypatch, support):
    support.fail(None)
    x = torch.zeros(2, 16)
    assert all(not support.supported(**{name: x}) for name in ("x", "data", "inp"))
    assert kernels.quantize_int8.select(x=x) == "reference"
    assert kernels.dequantize_nvfp4.select(dtype=torch.float16, data=x, scale=x) == "reference"
