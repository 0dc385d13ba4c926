"""The methods of each part of `quality.py`, and the thresholds that are solved for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from methods import FewerSteps, Method, Ours, Stepwise
from parts import BALANCED, FIXED
from rivals import RECIPES, MakeRival
from sixbit_diffusion.engine.settings import Choice
from sixbit_diffusion.engine.step_cache import EasyCache
from sixbit_diffusion.sixbit_core.predictor import Predictor
from sixbit_diffusion.sixbit_core.safetensors_file import read_header, read_tensor
from sixbit_diffusion.sixbit_core.sample_inputs import FILE_NAME
from step_caches import TeaCache

GPTQ = "gptq"
UNCACHED = replace(BALANCED, cache="off")
FULL_CACHED = Choice(precision="full", preset="balanced")
W4A8_CACHED = Choice(precision="w4a8", preset="balanced")
SOLVED_ROUTERS = ("gamma", "gamma-time")
ROUTERS = (*SOLVED_ROUTERS, "static", "static-time", "protect", "random")
SKIPS: dict[str, dict[str, object]] = {
    "error-budget": {},
    "block-budget": {"policy": "block-budget"},
    "scaled": {"scaled": True},
    "block-budget scaled": {"policy": "block-budget", "scaled": True},
    "groups of 3": {"group": 3},
    "groups of 3 scaled": {"group": 3, "scaled": True},
    "whole step": {"group": 0},
    "whole step scaled": {"group": 0, "scaled": True},
    "random": {"policy": "random"},
    "random anywhere": {"policy": "random", "start": 0.0, "max_skips": 1000},
    "uniform": {"policy": "uniform"},
}
EASY, TEA, FEWER = "easycache", "teacache", "fewer steps"
CACHED = ("error-budget", "random")
LOWEST, HIGHEST = 1e-3, 3.0  # thresholds of skipping that are tried, on a logarithmic axis


@dataclass(frozen=True)
class Solvable:
    """A method with one number to solve.

    Attributes:
        make: number -> method.
        what: of its rows' values the one that shall have `target`.
        low, high: between which the number is looked for, on a logarithmic axis where that is asked for.
        rising: whether the value rises with the number.
        tolerance: of the value.
    """

    make: Callable[[float], Method]
    what: str
    target: float
    low: float
    high: float
    logarithmic: bool = False
    rising: bool = True
    tolerance: float = 0.01


def to_solve_routers(bits: float, predictor: Predictor) -> dict[str, Solvable]:
    """Routers with a threshold, which lies among the errors that calibration saw."""
    errors = [error for fit in predictor.linears.values() for error in fit.error_by_progress]
    return {
        name: Solvable(
            partial(_router, name, bits),
            "average_activation_bits",
            bits,
            min(errors),
            max(errors),
            rising=False,
        )
        for name in SOLVED_ROUTERS
    }


def to_solve_skips(share: float, coefficients: list[float]) -> dict[str, Solvable]:
    """Every cache, and those on top of W4A8."""
    makers: dict[str, Callable[[float], Method]]
    makers = {f"w4a8 {name}": partial(_cached, name, True) for name in CACHED}  # the longest runs first
    makers["w4a8 error-budget without pdr"] = partial(_cached, "error-budget", False)
    makers |= {name: partial(_skip, name) for name in SKIPS}
    makers[EASY] = _easy
    makers[TEA] = partial(_tea, coefficients)
    return {
        name: Solvable(make, "skipped_fraction", share, LOWEST, HIGHEST, True, tolerance=0.003)
        for name, make in makers.items()
    }


def weights_methods() -> list[Method]:
    """Roundings of the weights; what W4A8 and W4A4 add."""
    w4a16, w4a8 = FIXED["w4a16"], FIXED["w4a8"]
    return [
        Ours("w4a16 rtn", w4a16, weights="rtn"),
        Ours("w4a16 search", w4a16),
        Ours("w4a16 gptq", w4a16, weights=GPTQ),
        Ours("w4a8 search", w4a8, "w4a16 search"),
        Ours("w4a8 gptq", w4a8, "w4a16 gptq", weights=GPTQ),
        Ours("w4a4 search", FIXED["w4a4"], "w4a16 search"),
    ]


def router_methods(bits: float, solved: Mapping[str, float]) -> list[Method]:
    """Every router at the same bits, beside the same weights with 16-bit activations."""
    return [
        Ours("w4a16", FIXED["w4a16"]),
        *(_router(name, bits, solved[name]) for name in SOLVED_ROUTERS),
        *(_router(name, bits, None) for name in ROUTERS if name not in SOLVED_ROUTERS),
    ]


def skip_methods(share: float, solved: Mapping[str, float], coefficients: list[float]) -> list[Method]:
    """Skipping in full precision."""
    return [
        *(_skip(name, solved[name]) for name in SKIPS),
        _easy(solved[EASY]),
        _tea(coefficients, solved[TEA]),
        FewerSteps(FEWER, 1 - share),
    ]


def cached_methods(solved: Mapping[str, float]) -> list[Method]:
    """Skipping in W4A8, with PDR and without."""
    return [
        Ours("w4a8", FIXED["w4a8"]),
        *(_cached(name, True, solved[f"w4a8 {name}"]) for name in CACHED),
        _cached("error-budget", False, solved["w4a8 error-budget without pdr"]),
    ]


def rival_methods(work: Path) -> list[Method]:
    """W4A8 and W4A4 of other papers beside the pack's."""
    return [
        Ours("w4a8", FIXED["w4a8"]),
        Ours("w4a8 gptq", FIXED["w4a8"], weights=GPTQ),
        Ours("dmpq", UNCACHED),
        *(
            Ours(name, FIXED["w4a8"], make_run=MakeRival(recipe, partial(input_maxima, work)))
            for name, recipe in RECIPES.items()
        ),
    ]


def whole_methods() -> list[Method]:
    """The balanced preset as it ships, and with GPTQ weights."""
    return [
        Ours("w4a8", FIXED["w4a8"]),
        Ours("dmpq", UNCACHED, "w4a8"),
        Ours("whole", BALANCED, "dmpq"),
        Ours("whole gptq", BALANCED, weights=GPTQ),
        Ours("paper preset", replace(BALANCED, preset="paper")),
    ]


def input_maxima(work: Path, name: str) -> torch.Tensor:
    """(K,) max|x| over the sample inputs of a linear that calibration kept in `work`."""
    infos, _ = read_header(work / FILE_NAME)
    return read_tensor(infos[name]).float().abs().amax(0)


def _router(name: str, bits: float, theta: float | None) -> Method:
    return Ours(name, replace(UNCACHED, router=name, bits=bits), "w4a16", {"theta": theta})


def _skip(name: str, threshold: float) -> Method:
    return Ours(name, FULL_CACHED, cache={**SKIPS[name], "threshold": threshold})


def _cached(name: str, purified: bool, threshold: float) -> Method:
    cache = {**SKIPS[name], "threshold": threshold}
    choice = replace(W4A8_CACHED, purified_refresh=purified)
    return Ours(f"w4a8 {name}" + ("" if purified else " without pdr"), choice, "w4a8", cache=cache)


def _easy(threshold: float) -> Method:
    return Stepwise(EASY, lambda bench: EasyCache(threshold), repr(threshold))


def _tea(coefficients: list[float], threshold: float) -> Method:
    return Stepwise(TEA, lambda bench: TeaCache(threshold, coefficients), repr((threshold, coefficients)))
