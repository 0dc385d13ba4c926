"""Every Triton kernel compiles for every architecture that we name, without a GPU, within its limits.

Compiling is all that this shows: that the kernels use the right units, fit in shared memory and keep their
numbers in registers. Whether they are right is tested by the interpreter, and on a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).with_name("compile_kernels.py")
KIB = 1024
# Shared memory that one block may take (CUDA C++ programming guide, compute capabilities).
SHARED_LIMIT = {80: 163 * KIB, 86: 99 * KIB, 89: 99 * KIB, 90: 227 * KIB, 100: 227 * KIB, 120: 99 * KIB}
MMA_INT8 = "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32"
TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])
INT8_PRODUCT = {
    80: MMA_INT8,
    86: MMA_INT8,
    89: MMA_INT8,
    90: "wgmma.mma_async.sync.aligned.m64",
    # Triton 3.6 does not use the INT8 units of sm_100 (measured; 3.9 does).
    100: "tcgen05.mma.cta_group::1.kind::i8" if TRITON >= (3, 9) else "s8",
    120: MMA_INT8,
}
FP4_PRODUCT = {
    100: "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale",
    120: "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale",
}
DESCRIBED = {90, 100, 120}  # INT8 tiles go by tensor descriptors, and by pointers at odd widths
POINTERS = {f"scaled_gemm i8{to} by pointers{k}" for to in ("", " to fp32") for k in ("", ", uneven")}
# Of three tiles, each with results of two types; those with descriptors four more times, by pointers.
CANDIDATES = {80: 6, 86: 6, 89: 6, 100: 6 + 3 * 4, 120: 6 + 1 * 4}
ROW_KERNELS = {
    "coefficients",
    "gate_residual",
    "norm_rotary",
    "norm_modulate_int8",
    "gelu_int8",
    "gelu_int8 unmeasured",
    "quantize_nvfp4 rotated",
    "quantize_nvfp4 per row",
    "quantize_nvfp4 search",
    "row_amax",
    "dequantize_nvfp4 rotated",
    "dequantize_nvfp4 plain",
    "block_hadamard",
}
EVERY_DTYPE = {86, 120}
KERNELS = {
    "quantize_int8 rotated bf16",
    "quantize_int8 wide bf16",
    "quantize_int8 plain bf16",
    "norm_modulate bf16",
    "cast_nvfp4_to_int8",
    "scaled_gemm i8",
    "scaled_gemm i8 to fp32",
    "scaled_gemm bf16",
    "block_measures partial",
    "block_measures final",
    "magnitudes partial",
    "magnitudes final",
    "apply_delta",
}

Compiled = dict[str, dict]


def compile_for(arch: int, *only: str) -> Compiled:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), str(arch), *only]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return {row.pop("name"): row for row in rows}


def spills(name: str, built: dict) -> bool:
    """Whether it does and must not: rows at odd addresses are rare, and stored value by value."""
    return "by pointers" not in name and bool(built.get("stack") or built.get("local"))


@pytest.fixture(scope="module")
def compiled() -> dict[int, Future]:
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {arch: pool.submit(compile_for, arch) for arch in SHARED_LIMIT}


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_kernels_compile_within_limits(arch: int, compiled: dict[int, Future]):
    kernels = compiled[arch].result()
    dtypes = ("bf16", "fp16", "fp32") if arch in EVERY_DTYPE else ("bf16",)
    expected = KERNELS | {f"{name} {dtype}" for name in ROW_KERNELS for dtype in dtypes}
    expected |= {"fp4_gemm"} if arch in FP4_PRODUCT else set()
    expected |= POINTERS if arch in DESCRIBED else set()
    assert set(kernels) == expected
    for name, built in kernels.items():
        assert built["shared"] <= SHARED_LIMIT[arch], name
    for name in (name for name in kernels if name.startswith("scaled_gemm i8")):
        products = kernels[name]["products"]
        assert any(INT8_PRODUCT[arch] in p and "f16" not in p for p in products), name
    if arch == 90:
        assert any(p.endswith("s32.s8.s8") for p in kernels["scaled_gemm i8"]["products"])
    if arch in FP4_PRODUCT:
        assert any(p.startswith(FP4_PRODUCT[arch]) for p in kernels["fp4_gemm"]["products"])


@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_kernels_spill_no_registers(arch: int, compiled: dict[int, Future]):
    kernels = compiled[arch].result()
    if not all("stack" in built for built in kernels.values()):
        pytest.skip("this Triton ships no cuobjdump, so that spills cannot be read")
    assert not [name for name, built in kernels.items() if spills(name, built)]


@pytest.mark.slow
@pytest.mark.parametrize("arch", CANDIDATES)  # all but 90, whose table was measured
def test_tiles_that_may_be_timed_compile_within_limits(arch: int):
    candidates = compile_for(arch, "candidate")
    assert len(candidates) == CANDIDATES[arch]
    for name, built in candidates.items():
        assert built["shared"] <= SHARED_LIMIT[arch], name
        assert any(INT8_PRODUCT[arch] in product for product in built["products"]), name
        assert not spills(name, built), name
