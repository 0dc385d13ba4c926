"""Compile every Triton kernel for one architecture, without a GPU, and print what came out as JSON lines.

Run by `test_compile.py` in a process of its own, since kernels that are interpreted cannot be compiled:

    python tests/kernels/compile_kernels.py 90 [a part of the kernels' names]

Tiles that may be timed (`kernels/tuner.py`) are compiled only where that part is "candidate".
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = re.compile(r"\b((?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\.\S+)")


ROW_DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
EVERY_DTYPE = {86, 120}  # the oldest and the newest GPUs of least shared memory; elsewhere bfloat16 alone
CANDIDATE = "candidate"
SIXTEENS = {"K", "N", "x_row_stride", "row_stride", "count", "D", "padded"}
RESULTS = ("bf16", "fp32")  # of products: the usual and the widest
WEIGHT = {"data_ptr": "*u8", "scale_ptr": "*u8", "global_ptr": "*fp32"}
SCALE_TYPES = {
    "row_scale_ptr": "*fp32",
    "column_scale_ptr": "*fp32",
    "bias_ptr": "*bf16",
    "M": "i32",
    "N": "i32",
    "K": "i32",
    "column_stride": "i32",
}
GEMM_TYPES = {"y_ptr": "*bf16", **SCALE_TYPES}


@dataclass(frozen=True)
class Job:
    """One kernel as its launcher would compile it: pointer and integer types, constants, options."""

    name: str
    kernel: object
    types: dict[str, str]
    constants: dict[str, object]
    options: dict[str, object] = field(default_factory=dict)
    odd: frozenset[str] = frozenset()  # sizes that are no multiples of 16


def main(arch: int, only: str = "") -> None:
    if importlib.util.find_spec("sixbit_diffusion") is None:
        spec = importlib.util.spec_from_file_location(
            "sixbit_diffusion", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
        )
        sys.modules["sixbit_diffusion"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["sixbit_diffusion"])
    named = candidate_jobs if only == CANDIDATE else jobs
    for job in (job for job in named(arch) if only in job.name):
        print(json.dumps({"name": job.name, **compile_job(job, arch)}), flush=True)


def jobs(arch: int) -> Iterator[Job]:
    """Every kernel, with the tiles that the launchers take on this architecture."""
    from sixbit_diffusion.kernels import cast_triton, delta_triton, gemm_triton, measures_triton

    for dtype in ROW_DTYPES if arch in EVERY_DTYPE else ("bf16",):
        yield from row_jobs(dtype)
        yield from whole_row_jobs(dtype, (arch // 10, arch % 10))
        yield from block_jobs(dtype)
    yield Job(
        "cast_nvfp4_to_int8",
        cast_triton.cast_nvfp4_to_int8_kernel,
        {**WEIGHT, "q_ptr": "*i8", "channel_ptr": "*fp32", "N": "i32", "K": "i32", "global_stride": "i32"},
        {"BLOCK_N": cast_triton.ROWS, "BLOCK_BYTES": cast_triton.BYTES},
    )
    yield from gemm_jobs(gemm_triton, (arch // 10, arch % 10))
    yield from measure_jobs(measures_triton)
    yield Job(
        "apply_delta",
        delta_triton.apply_delta_kernel,
        {"x_ptr": "*bf16", "delta_ptr": "*bf16", "y_ptr": "*bf16", "count": "i32"},
        {"BLOCK": delta_triton.BLOCK},
    )


def row_jobs(dtype: str) -> Iterator[Job]:
    """Quantization and rotation of rows of `dtype`, and decoding to it."""
    from sixbit_diffusion.kernels import hadamard_triton, nvfp4_decode_triton, nvfp4_triton

    product = ROW_DTYPES[dtype]
    rotated = {"HADAMARD": 128, "FACTOR": 128**-0.5}
    plain = {"HADAMARD": 1, "FACTOR": 1.0}
    sizes = {"M": "i32", "K": "i32", "x_row_stride": "i32"}
    nvfp4 = {"x_ptr": f"*{dtype}", **WEIGHT, **sizes, "global_stride": "i32"}
    tile = {"BLOCK_M": nvfp4_triton.ROWS, "BLOCK_K": nvfp4_triton.COLUMNS}
    small = {"BLOCK_M": nvfp4_triton.CHOOSING_ROWS, "BLOCK_K": nvfp4_triton.COLUMNS}
    for label, given, rounding, constants in (
        ("rotated", False, 0, {**rotated, **tile}),
        ("per row", False, 0, {**plain, **tile}),
        ("search", True, 2, {**plain, **small}),
    ):
        yield Job(
            f"quantize_nvfp4 {label} {dtype}",
            nvfp4_triton.quantize_nvfp4_kernel,
            nvfp4,
            {
                "SCALE_RANGE": 2688.0,
                "GIVEN_GLOBAL": given,
                "ROUNDING": rounding,
                "PRODUCT": product,
                **constants,
            },
        )
    yield Job(
        f"row_amax {dtype}",
        nvfp4_triton.row_amax_kernel,
        {"x_ptr": f"*{dtype}", "amax_ptr": "*fp32", **sizes},
        tile,
    )
    yield Job(
        f"block_hadamard {dtype}",
        hadamard_triton.block_hadamard_kernel,
        {"x_ptr": f"*{dtype}", "y_ptr": f"*{dtype}", "M": "i32", "K": "i32"},
        {**rotated, "PRODUCT": product, "BLOCK_M": hadamard_triton.ROWS, "BLOCK_K": 128},
    )
    rows, width = nvfp4_decode_triton.TILE
    for label, rotation in (("rotated", rotated), ("plain", plain)):
        yield Job(
            f"dequantize_nvfp4 {label} {dtype}",
            nvfp4_decode_triton.dequantize_nvfp4_kernel,
            {**WEIGHT, "out_ptr": f"*{dtype}", "N": "i32", "K": "i32", "global_stride": "i32"},
            {"WITH_GLOBAL": True, **rotation, "BLOCK_N": rows, "BLOCK_BYTES": width},
        )


def whole_row_jobs(dtype: str, capability: tuple[int, int]) -> Iterator[Job]:
    """The passes over whole rows, at the widths of CogVideoX-5B; the fullest in every type."""
    from sixbit_diffusion.kernels import row_tiles, rows_triton
    from sixbit_diffusion.kernels.row_tiles import GELU, NORM, PLAIN

    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    cases = [
        ("norm_modulate_int8", NORM, 3072, 128, True, True),
        ("gelu_int8", GELU, 12288, 128, True, True),
        ("gelu_int8 unmeasured", GELU, 12288, 128, True, False),
        ("quantize_int8 rotated", PLAIN, 3072, 128, True, False),
        ("quantize_int8 wide", PLAIN, 12288, 128, True, False),
        ("quantize_int8 plain", PLAIN, 3072, 1, True, False),
        ("norm_modulate", NORM, 3072, 1, False, False),
    ]
    for label, prologue, width, block, quantize, outliers in cases if dtype == "bf16" else cases[:3]:
        tile = row_tiles.row_tile(width, torch_dtype, prologue, capability, block, outliers)
        yield Job(
            f"{label} {dtype}",
            rows_triton.rows_kernel,
            {
                "text_ptr": f"*{dtype}",
                "video_ptr": f"*{dtype}",
                "coefficients_ptr": f"*{dtype}",
                "y_ptr": "*i8" if quantize else f"*{dtype}",
                "scale_ptr": "*fp32",
                "partial_ptr": "*fp32",
                "B": "i32",
                "T": "i32",
                "V": "i32",
                "row_stride": "i32",
                "eps": "fp32",
            },
            {
                "K": width,
                "ROWS": tile.rows,
                "PARTS": tile.parts,
                "CHUNKS": tile.chunks,
                "COLUMNS": row_tiles.COLUMNS,
                "GROUP": tile.group,
                "PROLOGUE": prologue,
                "QUANTIZE": quantize,
                "OUTLIERS": outliers,
                "HADAMARD": block,
                "FACTOR": block**-0.5,
                "PRODUCT": ROW_DTYPES[dtype],
                "STAGES": tile.stages,
                "AHEAD": tile.ahead,
                "INTERPRETED": False,
            },
            {"num_warps": tile.warps, "enable_fp_fusion": True},
        )


def block_jobs(dtype: str) -> Iterator[Job]:
    """The other passes of a block."""
    from sixbit_diffusion.kernels import fused_triton, rotary_triton

    pointer = f"*{dtype}"
    yield Job(
        f"coefficients {dtype}",
        fused_triton.coefficients_kernel,
        {
            **dict.fromkeys(("weight_ptr", "bias_ptr", "scale_ptr", "shift_ptr"), pointer),
            "out_ptr": "*fp32",
            **dict.fromkeys(
                ("D", "padded", "scale_item", "scale_stream", "shift_item", "shift_stream"), "i32"
            ),
        },
        {"WITH_WEIGHT": True, "WITH_BIAS": True, "BLOCK": fused_triton.COEFFICIENTS},
    )
    rows, columns = fused_triton.GATE_TILE
    tensors = ("text_ptr", "video_ptr", "y_ptr", "gate_ptr", "new_text_ptr", "new_video_ptr")
    yield Job(
        f"gate_residual {dtype}",
        fused_triton.gate_residual_kernel,
        {
            **dict.fromkeys(tensors, pointer),
            **dict.fromkeys(("T", "V", "D", "gate_item", "gate_stream"), "i32"),
        },
        {"BLOCK_M": rows, "BLOCK_D": columns},
    )
    norms = ("qkv_ptr", "q_weight_ptr", "q_bias_ptr", "k_weight_ptr", "k_bias_ptr")
    yield Job(
        f"norm_rotary {dtype}",
        rotary_triton.norm_rotary_kernel,
        {
            **dict.fromkeys(norms, pointer),
            **dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32"),
            **dict.fromkeys(("tokens", "text_tokens", "heads"), "i32"),
            "eps": "fp32",
        },
        {
            **dict.fromkeys(("NORM_Q", "NORM_K", "ROTARY"), True),
            "SIZE": 64,
            "LANES": 64,
            "HEADS": rotary_triton.VALUES // 64,
        },
    )


def candidate_jobs(arch: int) -> Iterator[Job]:
    """The INT8 product with every other tile that may be timed on this architecture."""
    from sixbit_diffusion.kernels import gemm_triton

    for number, tile in enumerate(gemm_triton.int8_tiles((arch // 10, arch % 10))[1:], 1):
        yield from int8_jobs(gemm_triton, f"scaled_gemm i8 {CANDIDATE} {number}", tile)


def int8_jobs(gemm_triton: object, name: str, tile: object) -> Iterator[Job]:
    """The INT8 product with a tile, as every size and every type of a result has it.

    Float32 is the widest result. A tile with descriptors goes by pointers where the rows of the result do not
    start at multiples of 16 bytes, so only where N is no multiple of 16.
    """
    for result in RESULTS:
        to = "" if result == "bf16" else f" to {result}"
        yield gemm_job(gemm_triton, f"{name}{to}", "i8", 1, tile, result)
        for even in (True, False) if tile.descriptors else ():
            depth = "" if even else ", uneven"
            pointers = replace(tile, descriptors=False)
            job = gemm_job(gemm_triton, f"{name}{to} by pointers{depth}", "i8", 1, pointers, result)
            yield replace(job, constants=job.constants | {"EVEN_K": even}, odd=frozenset("N"))


def gemm_jobs(gemm_triton: object, capability: tuple[int, int]) -> Iterator[Job]:
    """The products: INT8 and bfloat16 operands everywhere, NVFP4 where the hardware has them."""
    yield from int8_jobs(gemm_triton, "scaled_gemm i8", gemm_triton.gemm_tile(capability, torch.int8))
    tile = gemm_triton.gemm_tile(capability, torch.bfloat16)
    yield gemm_job(gemm_triton, "scaled_gemm bf16", "bf16", 2, tile)
    if gemm_triton.has_fp4(capability):
        tile = gemm_triton.fp4_tile(capability)
        yield Job(
            "fp4_gemm",
            gemm_triton.fp4_gemm_kernel,
            {"a_ptr": "*u8", "b_ptr": "*u8", "a_scale_ptr": "*u8", "b_scale_ptr": "*u8", **GEMM_TYPES},
            {
                "WITH_BIAS": True,
                "BLOCK_M": tile.m,
                "BLOCK_N": tile.n,
                "BLOCK_K": tile.k_bytes * 2,
                "GROUP_M": tile.group_m,
            },
            {"num_warps": tile.warps, "num_stages": tile.stages},
        )


def gemm_job(
    gemm_triton: object, name: str, operand: str, itemsize: int, tile: object, result: str = "bf16"
) -> Job:
    """The product of operands of this type, cut up this way."""
    block_k = tile.k_bytes // itemsize
    if tile.descriptors:
        kernel, options = gemm_triton.described_gemm_kernel, {}
        types = {
            "a_desc": f"tensordesc<{operand}[{tile.m}, {block_k}]>",
            "b_desc": f"tensordesc<{operand}[{tile.n}, {block_k}]>",
            "y_desc": f"tensordesc<{result}[{tile.m}, {tile.n}]>",
        }
    else:
        kernel, options = gemm_triton.scaled_gemm_kernel, {"EVEN_K": True}
        types = {"a_ptr": f"*{operand}", "b_ptr": f"*{operand}", "y_ptr": f"*{result}"}
    return Job(
        name,
        kernel,
        {**types, **SCALE_TYPES},
        {
            **options,
            "WITH_BIAS": True,
            "BLOCK_M": tile.m,
            "BLOCK_N": tile.n,
            "BLOCK_K": block_k,
            "GROUP_M": tile.group_m,
        },
        {"num_warps": tile.warps, "num_stages": tile.stages},
    )


def measure_jobs(measures_triton: object) -> Iterator[Job]:
    """What a run observes."""
    chunk = {"CHUNK": measures_triton.CHUNK, "BLOCK": measures_triton.BLOCK}
    tensors = {"inp_ptr": "*bf16", "out_ptr": "*bf16", "previous_ptr": "*bf16", "partial_ptr": "*fp32"}
    strides = {"count": "i32", "inp_stride": "i32", "out_stride": "i32", "previous_stride": "i32"}
    yield Job(
        "block_measures partial",
        measures_triton.block_measures_partial_kernel,
        {**tensors, **strides},
        {"WITH_PREVIOUS": True, **chunk},
    )
    final = {"partial_ptr": "*fp32", "result_ptr": "*fp32", "chunks": "i32"}
    yield Job(
        "block_measures final",
        measures_triton.block_measures_final_kernel,
        final,
        {"WITH_PREVIOUS": True, "BLOCK": measures_triton.FINAL_BLOCK},
    )
    yield Job(
        "magnitudes partial",
        measures_triton.magnitudes_partial_kernel,
        {"x_ptr": "*bf16", "partial_ptr": "*fp32", "count": "i32", "x_stride": "i32"},
        chunk,
    )
    yield Job(
        "magnitudes final",
        measures_triton.magnitudes_final_kernel,
        {**final, "count": "i32"},
        {"BLOCK": measures_triton.FINAL_BLOCK},
    )


def compile_job(job: Job, arch: int) -> dict[str, object]:
    """Compile, and say how much shared memory, stack and local memory it takes and which products it uses."""
    names = list(job.kernel.arg_names)
    signature = {name: "constexpr" if name in job.constants else job.types[name] for name in names}
    constants = {(names.index(name),): value for name, value in job.constants.items()}
    # Pointers are aligned and sizes multiples of 16, as the launcher finds them at model sizes.
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in job.types.items()
        if kind.startswith("*") or name in SIXTEENS - job.odd
    }
    source = ASTSource(fn=job.kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": False, **job.options}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    products = sorted(set(PRODUCT.findall(built.asm["ptx"])))
    return {"shared": built.metadata.shared, "products": products, **usage(built.asm.get("cubin"))}


def usage(cubin: bytes | None) -> dict[str, object]:
    """Registers, stack and local bytes from the cuobjdump that Triton ships; nothing if there is none."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if cubin is None or not tool.exists():
        return {}
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    text = said.stdout + said.stderr
    return {key.lower(): int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
