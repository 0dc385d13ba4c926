"""Speed of the ops on a GPU: `python benchmarks/kernels.py`; results in benchmarks/results/kernels.json.

linear_w4a8 with quantization and weight cast against F.linear in bf16, against the ways that serve without
Triton (`linear_torch`) and, where it is importable, against comfy-kitchen's int8_linear with rotation; passes
over rows by the bytes that they must move (read once, written once), as a share of what a copy on the same
card moves. Random data; medians of CUDA events.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import RESULTS, device_of, elapsed_ms, median_ms, register, relative, write_result

CHECKED_ROWS = 256


@dataclass(frozen=True)
class Size:
    """Rows of a CFG batch, and the widths of a model."""

    batch: int
    text: int
    video: int
    width: int
    copy_bytes: int

    @property
    def rows(self) -> int:
        return self.batch * (self.text + self.video)


SIZES = {"5b": Size(2, 226, 17550, 3072, 1 << 30), "tiny": Size(2, 6, 58, 256, 1 << 20)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", choices=SIZES, default="5b", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "kernels.json")
    given = parser.parse_args()
    register()
    torch.manual_seed(0)
    size, device = SIZES[given.config], device_of(given.device)
    with torch.inference_mode(), torch.device(device):
        bars, rows = linears(size, device, given.repeats)
        more_bars, more_rows = row_passes(size, device, given.repeats)
    write_result(given.out, device, {**bars, **more_bars}, [*rows, *more_rows])


def linears(size: Size, device: torch.device, repeats: int) -> tuple[dict[str, float], list[dict]]:
    """The linears of a block: q, k and v as one product of three weights, the others as they are."""
    from sixbit_diffusion.kernels import hadamard_block_size, hadamard_quantize_int8, int8_linear, int8_weight

    width, bars, rows = size.width, {}, []
    for inner, outer, parts in (
        (width, width, 1),
        (width, 3 * width, 3),
        (width, 4 * width, 1),
        (4 * width, width, 1),
    ):
        x = torch.randn(size.rows, inner, dtype=torch.bfloat16)
        dense = torch.randn(outer, inner, dtype=torch.bfloat16) * inner**-0.5
        bias = torch.randn(outer, dtype=torch.bfloat16)
        block = hadamard_block_size(inner)
        weights = [_nvfp4(part, block) for part in dense.chunk(parts)]

        def ours(linear=int8_linear, x=x, block=block, weights=weights, bias=bias) -> torch.Tensor:
            return linear(*hadamard_quantize_int8(x, block), *int8_weight(weights), bias, x.dtype)

        def stock(x=x, dense=dense, bias=bias) -> torch.Tensor:
            return torch.nn.functional.linear(x, dense, bias)

        calls: dict[str, Callable] = {"ours": ours, "bf16": stock}
        calls |= {f"without_triton_{name}": _by(name, ours) for name in _products(device)}
        kitchen = _kitchen(x, outer, bias)
        if kitchen is not None:
            calls["kitchen"] = kitchen
        ms = median_ms(calls, device, repeats, ahead=True)
        name = f"{inner}x{outer}"
        bars[f"kernel.w4a8.{name}"] = ms["bf16"] / ms["ours"]
        if kitchen is not None:
            bars[f"kernel.w4a8_vs_kitchen.{name}"] = ms["kitchen"] / ms["ours"]
        exact = x[:CHECKED_ROWS].float() @ _decoded(weights, block).T + bias.float()
        rows.append(
            {
                "name": f"w4a8.{name}",
                "rows": size.rows,
                **{f"{call}_ms": value for call, value in ms.items()},
                "ours_tops": 2e-9 * size.rows * inner * outer / ms["ours"],
                "error_against_decoded_weight": relative(ours()[:CHECKED_ROWS], exact),
            }
        )
    return bars, rows


def row_passes(size: Size, device: torch.device, repeats: int) -> tuple[dict[str, float], list[dict]]:
    """Every pass over the rows of a block, against the bandwidth of a copy."""
    from sixbit_diffusion import kernels as k

    batch, text_tokens, width = size.batch, size.text, size.width
    source = torch.randint(0, 255, (size.copy_bytes,), dtype=torch.uint8)
    target = torch.empty_like(source)
    copied = median_ms({"copy": lambda: target.copy_(source)}, device, repeats, ahead=True)["copy"]
    bandwidth = 2 * size.copy_bytes / copied  # bytes a millisecond

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16)

    text, video = random(batch, text_tokens, width), random(batch, size.video, width)
    norm, scale, shift, gate = (random(width), random(width)), *(random(batch, 2, width) for _ in range(3))
    joined = text_tokens + size.video
    narrow, other, wide, qkv = (random(batch, joined, factor * width) for factor in (1, 1, 4, 3))
    head, angles = 64, torch.rand(size.video, 64) * 6
    tables, pair = (angles.cos(), angles.sin()), (random(head), random(head))
    modulation, block = (text, video, *norm, 1e-5, scale, shift), k.hadamard_block_size(width)
    value = size.rows * width  # values of one (B, N, D) tensor; 2 bytes each, 1 as INT8
    passes: dict[str, tuple[int, Callable]] = {
        "norm_quant": (3 * value, lambda: k.norm_modulate_int8(*modulation, block)),
        "norm_quant_outliers": (3 * value, lambda: k.norm_modulate_int8(*modulation, block, True)),
        "gelu_quant": (12 * value, lambda: k.gelu_int8(wide, block)),
        "gelu_quant_outliers": (12 * value, lambda: k.gelu_int8(wide, block, True)),
        "hadamard_quant": (3 * value, lambda: k.hadamard_quantize_int8(narrow.flatten(0, 1), block)),
        "hadamard_quant_wide": (12 * value, lambda: k.hadamard_quantize_int8(wide.flatten(0, 1), block)),
        "norm_modulate": (4 * value, lambda: k.norm_modulate(*modulation)),
        "norm_rotary": (
            8 * value,
            lambda: k.norm_rotary_(qkv, width // head, pair, pair, 1e-6, tables, text_tokens),
        ),
        "gate_residual": (6 * value, lambda: k.gate_residual(text, video, narrow, gate)),
        "outlier_ratio": (2 * value, lambda: k.outlier_ratio(narrow)),
        "block_measures": (4 * value, lambda: k.block_measures(narrow, other)),
        "apply_delta": (6 * value, lambda: k.apply_delta(narrow, other)),
    }
    ms = median_ms({name: call for name, (_, call) in passes.items()}, device, repeats, ahead=True)
    shares = {name: moved / ms[name] / bandwidth for name, (moved, _) in passes.items()}
    bars = {f"kernel.{name}_share": shares[name] for name in ("norm_quant", "gelu_quant")}
    rows = [{"name": "copy", "ms": copied, "terabytes_per_second": bandwidth * 1e-9}]
    rows += [{"name": name, "ms": ms[name], "share_of_copy": shares[name]} for name in passes]
    return bars, rows


def _nvfp4(dense: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from sixbit_diffusion.kernels import block_hadamard, quantize_nvfp4

    return quantize_nvfp4(block_hadamard(dense.float(), block))


def _decoded(weights: list, block: int) -> torch.Tensor:
    from sixbit_diffusion.kernels import block_hadamard, dequantize_nvfp4

    return torch.cat([block_hadamard(dequantize_nvfp4(*weight), block) for weight in weights])


def _products(device: torch.device) -> list[str]:
    """Ways of `int8_linear` without Triton that this machine has."""
    from sixbit_diffusion.kernels.linear_torch import PRODUCTS, kitchen_multiplies

    has_kitchen = kitchen_multiplies("cuda" if device.type == "cuda" else "eager")
    return [name for name in PRODUCTS if name != "kitchen" or has_kitchen]


def _by(product: str, call: Callable) -> Callable:
    """`call` as it is without Triton: its product in this way, the rest in 16 bits."""
    from sixbit_diffusion.kernels import int8_linear, use_backend

    def without_triton() -> torch.Tensor:
        with use_backend("half"):
            return call(int8_linear.implementations[product][0])

    return without_triton


def _kitchen(x: torch.Tensor, outer: int, bias: torch.Tensor) -> Callable | None:
    """comfy-kitchen's INT8 linear with rotation, on weights of the same size; None where it is not there."""
    try:
        import comfy_kitchen
    except ImportError:
        return None
    weight = torch.randint(-127, 128, (outer, x.shape[1]), dtype=torch.int8)
    scale = torch.tensor(1e-3)

    def call() -> torch.Tensor:
        return comfy_kitchen.int8_linear(x, weight, scale, bias, x.dtype, convrot=True)

    elapsed_ms(call, x.device)  # what it cannot take shows here
    return call


if __name__ == "__main__":
    main()
