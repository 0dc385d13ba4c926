"""What `quality.py` makes of a part's rows: bars, why there are none, and differences between methods."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import quality_methods as table
from parts import Bars, interval, paired
from sixbit_diffusion.engine.rows import Row

OUR_ROUTER, OUR_SKIP, WHOLE = "gamma", "error-budget", "whole"  # what ships as the default
BITS, SHARE = "average_activation_bits", "skipped_fraction"
EQUAL = {  # bar -> what it takes to be equal, and of which methods
    "router_vs_random": (BITS, (OUR_ROUTER, "random")),
    "router_vs_static": (BITS, (OUR_ROUTER, "static")),
    "skip_vs_random_db": (SHARE, (OUR_SKIP, "random")),  # within the same limits
    "skip_vs_random_anywhere_db": (SHARE, (OUR_SKIP, "random anywhere")),
    "skip_vs_fewer_steps_db": (SHARE, (OUR_SKIP, table.FEWER)),
    "skip_vs_step_cache_db": (SHARE, (OUR_SKIP, table.EASY, table.TEA)),
}
UNEQUAL = 0.02  # bits, or share: a greater difference is not equal
SKIPS_ENOUGH = {bar: OUR_SKIP for bar in ("skip_alone_db", *EQUAL) if bar.startswith("skip")}
SKIPS_ENOUGH["skip_cost_db"] = f"w4a8 {OUR_SKIP}"
ENOUGH = 0.45  # share that these bars speak of
SHORT = 0.01  # of the asked-for share, from which on a method is listed as short of it
OURS = {  # part -> the method that the others are held against in its summary
    "weights": "w4a16 gptq",
    "routers": OUR_ROUTER,
    "skips": OUR_SKIP,
    "cached": f"w4a8 {OUR_SKIP}",
    "rivals": "w4a8",
    "whole": WHOLE,
}
Rows = Sequence[Mapping[str, Row]]
Conclude = Callable[[Rows], Bars]


def weights(rows: Rows) -> Bars:
    """GPTQ's against rounding to nearest."""
    return {
        "w4a16_trajectory_ratio": _error(rows, "w4a16 gptq") / _error(rows, "w4a16 rtn"),
        "w4a16_gain_db": paired(rows, "w4a16 gptq", "w4a16 rtn")["mean"],
    }


def routers(rows: Rows) -> Bars:
    """The default router against others at the same bits."""
    ours = _error(rows, OUR_ROUTER)
    return {f"router_vs_{name}": ours / _error(rows, name) for name in ("random", "static")}


def skips(rows: Rows) -> Bars:
    """The paper's policy against what skips as much."""

    def against(name: str) -> float:
        return paired(rows, OUR_SKIP, name)["mean"]

    return {
        "skip_alone_db": interval([row[OUR_SKIP]["psnr_db"] for row in rows])["mean"],
        "skip_vs_random_db": against("random"),
        "skip_vs_random_anywhere_db": against("random anywhere"),
        "skip_vs_fewer_steps_db": against(table.FEWER),
        "skip_vs_step_cache_db": min(against(table.EASY), against(table.TEA)),
    }


def withheld(bar: str, rows: Rows) -> str | None:
    """Why a bar cannot be made of the rows: methods too far apart, or too little skipped."""
    what, names = EQUAL.get(bar, ("", ()))
    found = {name: _mean(rows, name, what) for name in names}
    if found:
        low, high = min(found, key=found.__getitem__), max(found, key=found.__getitem__)
        if round(found[high] - found[low], 6) > UNEQUAL:
            apart = f"more than {UNEQUAL} apart"
            return f"{what} is {found[low]:.3f} of {low} but {found[high]:.3f} of {high}, {apart}"
    if bar in SKIPS_ENOUGH and (share := _mean(rows, SKIPS_ENOUGH[bar], SHARE)) < ENOUGH:
        return f"{SKIPS_ENOUGH[bar]} skips {share:.3f}, less than {ENOUGH}"
    return None


def short(rows: Rows, share: float) -> Row:
    """Methods that skip less than was asked for, with the share that they had."""
    found = {name: _mean(rows, name, SHARE) for name in rows[0]}
    return {name: had for name, had in found.items() if 0 < had < share - SHORT}


def differences(rows: Rows, ours: str, names: Iterable[str]) -> Row:
    """What `ours` is better or worse than each other method by, on the same prompts."""
    found: Row = {}
    for name in names:
        if name != ours:
            both = [row for row in rows if all(row[n].get("error") is not None for n in (ours, name))]
            error = {"error": paired(both, ours, name, "error")} if both else {}
            found[f"{ours} - {name}"] = {"psnr_db": paired(rows, ours, name)} | error
    return found


def _mean(rows: Rows, name: str, what: str) -> float:
    return sum(row[name][what] for row in rows) / len(rows)


def _error(rows: Rows, name: str) -> float:
    return interval([row[name]["error"] for row in rows if row[name].get("error") is not None])["mean"]
