"""The saved calibration of a model: per linear, e(t) ≈ α·Γ(t−1) + β, and what routers need besides.

Γ = Σ|Y − X| / Σ|X| of the linear's block; e is the error of NVFP4 activations (`calibrate` defines it).
Source: 6Bit-Diffusion (arXiv 2603.18742), section on DMPQ. A predictor is valid for one set of weights:
it carries their fingerprint, and another's is refused. The file is JSON with sorted keys and floats of
nine significant digits, so the same calibration gives the same bytes.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

from .config import PAPER_OUTLIER_LIMIT, DMPQConfig
from .errors import one_line
from .layout import BlockLayout
from .replacing import replacing

FORMAT = "sixbit-predictor"
VERSION = 1
PROGRESS_BINS = 10
GAMMA_TIME = "gamma-time"
_LARGEST = 50_000_000  # bytes; the predictor of a 5B is below one million


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
class Predictor:
    """A model's calibration. See the module's docstring; `calibrate` makes one.

    Attributes:
        family, fingerprint: of the model it is valid for.
        calibration: how it was made (steps, scheduler, cfg, size, frames, seed, prompts).
        linears: native linear name -> fit.
        outlier_limits: PDR limit by linear kind.
        theta: asked-for bits, as text -> {"cache_off", "cache_on", with prefix "paper_" for the paper's
            error, and "time_cache_off" for gamma-time} -> threshold.
    """

    family: str
    fingerprint: str
    calibration: Mapping[str, object]
    linears: Mapping[str, LinearFit]
    outlier_limits: Mapping[str, float]
    theta: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def threshold(self, config: DMPQConfig, cache_on: bool) -> float:
        """θ for the asked-for bits: INT8 where the predicted error exceeds it.

        Between two calibrated bits θ is interpolated linearly; 4.0 and 8.0 need none.

        Raises:
            ValueError: if the bits lie outside the calibrated ones.
        """
        if config.theta is not None:
            return config.theta
        if config.bits in (4.0, 8.0):
            return math.inf if config.bits == 4.0 else -math.inf
        key = theta_key(config, cache_on)
        known = sorted((float(bits), row[key]) for bits, row in self.theta.items() if key in row)
        if not known or not known[0][0] <= config.bits <= known[-1][0]:
            found = ", ".join(f"{bits:g}" for bits, _ in known) or "none"
            raise ValueError(
                f"this predictor has thresholds ({key}) for {found} bits, {config.bits:g} was asked for: "
                f"calibrate with --bits {config.bits:g}, or choose another router"
            )
        for (low, theta_low), (high, theta_high) in pairwise(known):
            if low <= config.bits <= high:
                return theta_low + (theta_high - theta_low) * (config.bits - low) / (high - low)
        return known[0][1]

    def check(self, layout: BlockLayout) -> None:
        """Raise ValueError unless every linear of `layout` is known with the same size."""
        for name, block, kind in layout.linear_names():
            fit, macs = self.linears.get(name), layout.macs(block, kind)
            if fit is None or fit.macs != macs:
                have = "no such linear" if fit is None else f"{fit.macs} MACs a row"
                raise ValueError(
                    f"the predictor does not fit this model: {name} has {macs} MACs a row, the predictor "
                    f"{have}; calibrate this model"
                )

    def check_fingerprint(self, fingerprint: str) -> None:
        """Raise ValueError if the predictor was calibrated on other weights."""
        if fingerprint != self.fingerprint:
            line = (
                f"the predictor was calibrated on other weights ({self.family}, {self.fingerprint[:12]}) "
                f"than this model's ({fingerprint[:12]}): choose its own predictor or calibrate this model"
            )
            raise ValueError(one_line(line))

    def outlier_limit(self, kind: str) -> float:
        """PDR limit of a linear kind; the paper's 25 where calibration saw none."""
        return self.outlier_limits.get(kind, PAPER_OUTLIER_LIMIT)

    def summary(self) -> dict[str, float | int]:
        """How well the claimed linear relation holds: median R², slopes above zero, linears."""
        lines = [fit.excess for fit in self.linears.values()]
        return {
            "linears": len(lines),
            "median_r2": median(line.r2 for line in lines),
            "positive_slopes": sum(line.alpha > 0 for line in lines),
        }

    def to_json(self) -> str:
        """The text of the predictor file."""
        document = {
            "format": FORMAT,
            "version": VERSION,
            "model": {"family": self.family, "fingerprint": self.fingerprint},
            "calibration": self.calibration,
            "linears": {name: _fit_to_dict(fit) for name, fit in self.linears.items()},
            "outlier_limits": self.outlier_limits,
            "theta": self.theta,
        }
        return json.dumps(_rounded(document), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def save(self, path: Path) -> None:
        """Write the file beside `path`, then put it in its place."""
        with replacing(Path(path)) as beside:
            beside.write_text(self.to_json(), encoding="utf-8", newline="\n")


def theta_key(config: DMPQConfig, cache_on: bool) -> str:
    """Key of a threshold in a predictor file's `theta`."""
    prefix = "time_" if config.router == GAMMA_TIME else "paper_" if config.error == "paper" else ""
    return prefix + ("cache_on" if cache_on else "cache_off")


def load_predictor(path: Path, fingerprint: str | None = None) -> Predictor:
    """Read a predictor file.

    Args:
        path: the JSON file.
        fingerprint: of the model at hand; None reads without that check.

    Raises:
        ValueError: if there is no such file, it is not a whole predictor file of this version, holds a
            number that is not finite, or was calibrated on other weights.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is no regular file")
        if (size := path.stat().st_size) > _LARGEST:
            raise ValueError(f"it is {size / 1e6:.0f} MB large")
        text = path.read_text(encoding="utf-8")
        document = json.loads(text, parse_constant=_refuse_constant, parse_float=_in_range)
        predictor = _from_document(document)
    except FileNotFoundError:
        line = f"there is no predictor file {path}: calibrate first, or check the path"
        raise ValueError(one_line(line)) from None
    except (KeyError, TypeError, AttributeError, ValueError, OSError, OverflowError, RecursionError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        line = f"predictor file {path} cannot be used: {reason}; calibrate again"
        raise ValueError(one_line(line)) from None
    if fingerprint is not None:
        predictor.check_fingerprint(fingerprint)
    return predictor


def _from_document(document: dict) -> Predictor:
    if document.get("format") != FORMAT:
        raise ValueError(f'its format is {document.get("format")!r}, not "{FORMAT}"')
    if document.get("version") != VERSION:
        raise ValueError(f"its version is {document.get('version')!r}, this program reads {VERSION}")
    if not document["linears"]:
        raise ValueError("it holds no linear")
    return Predictor(
        family=str(document["model"]["family"]),
        fingerprint=str(document["model"]["fingerprint"]),
        calibration=_calibration(document["calibration"]),
        linears={name: _fit_from_dict(entry) for name, entry in document["linears"].items()},
        outlier_limits={k: _finite(v) for k, v in document.get("outlier_limits", {}).items()},
        theta={
            str(_finite(float(bits))): {key: _finite(value) for key, value in row.items()}
            for bits, row in document["theta"].items()
        },
    )


def _fit_to_dict(fit: LinearFit) -> dict:
    return {
        **vars(fit.excess),
        "paper": None if fit.paper is None else vars(fit.paper),
        "error_nvfp4": fit.error_nvfp4,
        "error_int8": fit.error_int8,
        "error_by_progress": list(fit.error_by_progress),
        "macs": fit.macs,
        **({} if fit.timed is None else {"timed": vars(fit.timed)}),
    }


def _fit_from_dict(entry: dict) -> LinearFit:
    paper, timed = entry.get("paper"), entry.get("timed")
    by_progress = tuple(_finite(value) for value in entry.get("error_by_progress", ()))
    if by_progress and len(by_progress) != PROGRESS_BINS:
        raise ValueError(f"error_by_progress needs {PROGRESS_BINS} values, has {len(by_progress)}")
    return LinearFit(
        excess=_line(entry),
        paper=None if paper is None else _line(paper),
        error_nvfp4=_finite(entry["error_nvfp4"]),
        error_int8=_finite(entry["error_int8"]),
        error_by_progress=by_progress,
        macs=_whole(entry["macs"]),
        timed=None
        if timed is None
        else Plane(*(_finite(timed[k]) for k in ("alpha", "slope", "beta", "r2"))),
    )


def _calibration(entry: dict) -> dict[str, object]:
    """How it was made; of the parts that a run is compared with, those that are told are whole numbers."""
    size = entry.get("size", [1, 1])
    if not isinstance(size, list) or len(size) != 2:
        raise ValueError(f"it holds {size!r} where height and width are needed")
    for value in (*size, *(entry[key] for key in ("steps", "frames") if key in entry)):
        _whole(value)
    return dict(entry)


def _line(entry: dict) -> Line:
    return Line(_finite(entry["alpha"]), _finite(entry["beta"]), _finite(entry["r2"]))


def _finite(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"it holds {value!r} where a finite number is needed")
    return float(value)


def _whole(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"it holds {value!r} where a whole number is needed")
    return value


def _in_range(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"it holds {value} where a finite number is needed")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"it holds {text}")


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, Mapping):
        return {str(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value
