"""The picture of `quality.py`: PSNR against cost, a curve for each method, 95 % intervals."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from parts import interval
from quality_methods import ROUTERS
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.rows import Row

Point = tuple[float, float, float, float]  # cost, PSNR, its interval


def curves(results: Row, twin: int, steps: int) -> dict[str, list[Point]]:
    """Every method's points, by cost: one for each part that it stands in."""
    mark = f"-s{twin}-{steps}"
    parts = [name for name in results["parts"] if f"{name}-".find(f"{mark}-") > 0]
    found: dict[str, list[Point]] = {}
    for part in parts:
        by_method: dict[str, list[Row]] = {}
        kind = " router" if part.startswith("routers-") else ""  # random is a way to skip, too
        for row in results["rows"]:
            if row["part"] == part and {"psnr_db", "cost", "unit"} <= row.keys():
                name = row["unit"]
                by_method.setdefault(name + (kind if name in ROUTERS else ""), []).append(row)
        for method, rows in by_method.items():
            psnr = interval([row["psnr_db"] for row in rows])
            point = (sum(row["cost"] for row in rows) / len(rows), psnr["mean"], *psnr["interval"])
            found.setdefault(method, []).append(point)
    return {method: sorted(points) for method, points in found.items()}


def draw(results: Row, twin: int, steps: int, target: Path) -> None:
    """Write the picture. InputError where there is nothing to draw."""
    found: Mapping[str, list[Point]] = curves(results, twin, steps)
    if not found:
        raise InputError(f"no rows of twin {twin} at {steps} steps to draw; run the parts first")
    figure, axes = pyplot.subplots(figsize=(12, 7), layout="constrained")
    colours = pyplot.get_cmap("tab20")
    for number, (method, points) in enumerate(sorted(found.items())):
        cost, mean, low, high = zip(*points, strict=True)
        spread = [
            [m - a for m, a in zip(mean, low, strict=True)],
            [b - m for m, b in zip(mean, high, strict=True)],
        ]
        marker = "osD^v<>PX"[number // 20 % 9]
        axes.errorbar(cost, mean, spread, label=method, marker=marker, color=colours(number % 20), capsize=2)
    axes.set_xlabel("cost, as a share of full precision's")
    axes.set_ylabel("PSNR against full precision, dB")
    axes.set_title(f"{steps} steps, outliers x{twin}")
    figure.legend(fontsize=7, ncols=2, loc="outside right upper")
    axes.grid(alpha=0.3)
    figure.savefig(target, dpi=140)
    pyplot.close(figure)
    print(target)
