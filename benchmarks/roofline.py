"""ESTIMATES of one forward on cards that nobody here has: `python benchmarks/roofline.py [--config 5b]`.

    time = linears + attention + passes over rows
         = ops / (share * rate) + ops / (share * bf16 rate) + bytes / (share * bandwidth)

Rates are the vendors' dense peaks. Shares of them are, for the H200, what one reached (its own kernels.json
where there is one; the linears' share then holds quantization and weight cast); for the other cards they are
ASSUMED. Nothing here is a measurement but the columns that say so. Results: benchmarks/results/roofline.json.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import RESULTS, register


@dataclass(frozen=True)
class Card:
    """Dense peaks: bf16 with float32 sums and INT8 in T(FL)OP/s, memory in GB/s and GB."""

    name: str
    bf16: float
    int8: float
    bandwidth: float
    memory: float


@dataclass(frozen=True)
class Work:
    """One forward of a CFG batch: trillions of operations; billions of (token, channel) values a block."""

    linears: float
    attention: float
    values: float
    blocks: int


@dataclass(frozen=True)
class Shares:
    """What is reached of the peaks, and what eager diffusers moves beside its products.

    Attributes:
        linear_bf16, linear_int8: of the tensor rate.
        attention: of the bf16 rate.
        copy: of the bandwidth, by a copy; `rows`: of that, by our passes over rows.
        eager_bytes: a value and block, all of diffusers' unfused passes together.
    """

    linear_bf16: float = 0.71
    linear_int8: float = 0.55
    attention: float = 0.42
    copy: float = 0.89
    rows: float = 0.70
    eager_bytes: float = 519.0


ASSUMED = Shares(linear_bf16=0.80, linear_int8=0.65, attention=0.75, copy=0.90)
H200 = Card("H200", 989, 1979, 4800, 141)
CARDS = (
    Card("RTX 3060", 25.6, 102, 360, 12),
    Card("RTX 3090", 71, 284, 936, 24),
    Card("RTX 4070 Ti", 80.2, 321, 504, 12),
    Card("RTX 4090", 165, 661, 1008, 24),
    Card("RTX 5070 Ti", 87.9, 352, 896, 16),
    Card("RTX 5090", 209, 838, 1792, 32),
    H200,
)
OUR_BYTES = {  # a value and block: read once, written once
    "norm, modulate, quantize (two)": 2 * 3,
    "norm and rotation of q and k": 8,
    "quantize the attention's output": 3,
    "gelu, quantize": 12,
    "gate and residual (two)": 2 * 6,
    "measures": 4,
}


def main() -> None:
    """Estimate and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", choices=("2b", "5b", "1.5-5b"), default="5b")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of kernels.json and model-*.json"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "roofline.json")
    given = parser.parse_args()
    register()
    from sixbit_diffusion.engine.files import write_json

    shares, measured = measured_shares(given.results), measured_forward(given.results, given.config)
    todo = work(given.config)
    rows = [row(card, todo, shares if card is H200 else ASSUMED) for card in CARDS]
    rows[-1] |= {f"measured_{name}": value for name, value in measured.items()}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        given.out,
        {
            "estimate": True,
            "config": given.config,
            "h200": vars(shares),
            "others": vars(ASSUMED),
            "rows": rows,
        },
    )
    print(
        f"ESTIMATES for {given.config}, ms a forward; H200: {vars(shares)}; others, assumed: {vars(ASSUMED)}"
    )
    for one in rows:
        print(
            "  ".join(
                f"{key} {value if isinstance(value, str) else round(value, 2)}" for key, value in one.items()
            )
        )


def work(config: str) -> Work:
    """Operations and values of a forward."""
    from model_parts import CONFIGS

    family, (frames, height, width) = CONFIGS[config].family, CONFIGS[config].latents
    tokens = frames // (family.patch_size_t or 1) * (height // 2) * (width // 2) + CONFIGS[config].text
    rows, blocks = 2 * tokens, family.layers
    linears = 2 * 12 * family.width**2 * rows * blocks
    attention = 4 * tokens**2 * family.width * 2 * blocks
    return Work(linears * 1e-12, attention * 1e-12, rows * family.width * 1e-9, blocks)


def row(card: Card, todo: Work, shares: Shares) -> dict[str, Any]:
    """What a forward would take on a card, eager bf16 and ours, in ms."""
    attention = todo.attention / (card.bf16 * shares.attention)
    bandwidth = card.bandwidth * shares.copy
    moved = todo.values * todo.blocks / bandwidth
    eager = todo.linears / (card.bf16 * shares.linear_bf16) + attention + moved * shares.eager_bytes
    passes = moved * sum(OUR_BYTES.values()) / shares.rows
    ours = todo.linears / (card.int8 * shares.linear_int8) + attention + passes
    floor = todo.linears / card.int8 + todo.attention / card.bf16 + moved * sum(OUR_BYTES.values())
    return {
        "card": card.name,
        "eager_ms": eager * 1e3,
        "ours_ms": ours * 1e3,
        "times": eager / ours,
        "floor_ms": floor * 1e3,
        "attention_share_of_ours": attention / ours,
    }


def measured_shares(results: Path) -> Shares:
    """Shares from kernels.json where it was measured on an H200, else those of the class."""
    path = results / "kernels.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"machine": ""}
    if H200.name not in found["machine"]:
        return Shares()
    rows = {entry["name"]: entry for entry in found["rows"]}
    wide = [rows[f"w4a8.{shape}"] for shape in ("3072x9216", "3072x12288", "12288x3072")]
    rate = [entry["ours_tops"] for entry in wide]
    passes = [rows[name]["share_of_copy"] for name in ("norm_quant", "gelu_quant")]
    bf16 = [entry["ours_tops"] * entry["ours_ms"] / entry["bf16_ms"] for entry in wide]
    return Shares(
        linear_bf16=sum(bf16) / len(bf16) / H200.bf16,
        linear_int8=sum(rate) / len(rate) / H200.int8,
        copy=1e3 * rows["copy"]["terabytes_per_second"] / H200.bandwidth,
        rows=sum(passes) / len(passes),
    )


def measured_forward(results: Path, config: str) -> dict[str, float]:
    """Milliseconds of forwards in model-CONFIG.json, by who ran them."""
    path = results / f"model-{config}.json"
    if not path.is_file():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {r["name"].split(".")[1]: r["ms"] for r in rows if r["name"].startswith("forward.")}


if __name__ == "__main__":
    main()
