"""What a calibration knows of one linear and of one block, and how a predictor file says it."""

import math
from dataclasses import dataclass

PROGRESS_BINS = 10
MAGNITUDES = 50  # points of sampling, evenly spaced from its start


@dataclass(frozen=True)
class Line:
    """A least-squares line error = alpha·Γ + beta; `r2` is its share of the variance explained."""

    alpha: float
    beta: float
    r2: float

    def at(self, gamma: float) -> float:
        """The predicted error."""
        return self.alpha * gamma + self.beta


@dataclass(frozen=True)
class Plane:
    """error = alpha·Γ + slope·progress + beta; `r2` is the share of the variance that such a plane explains.

    Where that is too little both coefficients are 0 and beta is the mean (`calibrate`).
    """

    alpha: float
    slope: float
    beta: float
    r2: float

    def at(self, gamma: float, progress: float) -> float:
        """The predicted error."""
        return self.alpha * gamma + self.slope * progress + self.beta


@dataclass(frozen=True)
class LinearFit:
    """What calibration knows of one linear.

    Attributes:
        excess: line of the excess error of NVFP4 over INT8 activations.
        paper: line of the paper's error, or None where full-precision weights were not at hand.
        error_nvfp4, error_int8: mean relative output errors of the two formats.
        error_by_progress: mean excess error in `PROGRESS_BINS` equal parts of sampling.
        macs: multiply-accumulates for one row.
        timed: plane of the excess error over Γ and progress; None in files from before there were any.
    """

    excess: Line
    paper: Line | None
    error_nvfp4: float
    error_int8: float
    error_by_progress: tuple[float, ...]
    macs: int
    timed: Plane | None = None


@dataclass(frozen=True)
class BlockFit:
    """What calibration knows of one block, for skipping it.

    Attributes:
        gamma: mean Γ, of the worst stream.
        magnitudes: ‖Δ‖₂ at `MAGNITUDES` points of sampling, as a multiple of that at its start.
    """

    gamma: float
    magnitudes: tuple[float, ...]

    def magnitude(self, progress: float) -> float:
        """‖Δ‖₂ at a share of sampling, in between interpolated."""
        at = min(max(progress, 0.0) * len(self.magnitudes), len(self.magnitudes) - 1.0)
        low = min(int(at), len(self.magnitudes) - 2)
        return self.magnitudes[low] + (at - low) * (self.magnitudes[low + 1] - self.magnitudes[low])


def fit_to_dict(fit: LinearFit) -> dict:
    """A linear's entry of a predictor file."""
    return {
        **vars(fit.excess),
        "paper": None if fit.paper is None else vars(fit.paper),
        "error_nvfp4": fit.error_nvfp4,
        "error_int8": fit.error_int8,
        "error_by_progress": list(fit.error_by_progress),
        "macs": fit.macs,
        **({} if fit.timed is None else {"timed": vars(fit.timed)}),
    }


def fit_from_dict(entry: dict) -> LinearFit:
    """A linear from its entry. KeyError, TypeError or ValueError for anything else."""
    paper, timed = entry.get("paper"), entry.get("timed")
    by_progress = tuple(finite(value) for value in entry.get("error_by_progress", ()))
    if by_progress and len(by_progress) != PROGRESS_BINS:
        raise ValueError(f"error_by_progress needs {PROGRESS_BINS} values, has {len(by_progress)}")
    return LinearFit(
        excess=_line(entry),
        paper=None if paper is None else _line(paper),
        error_nvfp4=finite(entry["error_nvfp4"]),
        error_int8=finite(entry["error_int8"]),
        error_by_progress=by_progress,
        macs=whole(entry["macs"]),
        timed=None if timed is None else Plane(*(finite(timed[k]) for k in ("alpha", "slope", "beta", "r2"))),
    )


def _line(entry: dict) -> Line:
    return Line(finite(entry["alpha"]), finite(entry["beta"]), finite(entry["r2"]))


def finite(value: object) -> float:
    """`value` as a float. ValueError unless it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"it holds {value!r} where a finite number is needed")
    return float(value)


def whole(value: object) -> int:
    """`value`. ValueError unless it is a whole number."""
    if type(value) is not int:
        raise ValueError(f"it holds {value!r} where a whole number is needed")
    return value


def block_from_dict(entry: dict) -> BlockFit:
    """A block from its entry. KeyError, TypeError or ValueError for anything else."""
    magnitudes = tuple(finite(value) for value in entry["magnitudes"])
    if len(magnitudes) != MAGNITUDES or min(magnitudes) <= 0:
        raise ValueError(f"a block needs {MAGNITUDES} magnitudes above 0, has {len(magnitudes)}")
    return BlockFit(finite(entry["gamma"]), magnitudes)
