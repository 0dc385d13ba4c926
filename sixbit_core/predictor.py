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
from .fits import BlockFit, LinearFit, block_from_dict, finite, fit_from_dict, fit_to_dict, whole
from .layout import BlockLayout
from .replacing import replacing

FORMAT = "sixbit-predictor"
VERSION = 1
GAMMA_TIME = "gamma-time"
_LARGEST = 50_000_000  # bytes; the predictor of a 5B is below one million


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
        blocks: one fit a block; none in files from before there were any.
    """

    family: str
    fingerprint: str
    calibration: Mapping[str, object]
    linears: Mapping[str, LinearFit]
    outlier_limits: Mapping[str, float]
    theta: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    blocks: tuple[BlockFit, ...] = ()

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
        """Raise ValueError unless every linear of `layout` is known with the same size, and every block."""
        for name, block, kind in layout.linear_names():
            fit, macs = self.linears.get(name), layout.macs(block, kind)
            if fit is None or fit.macs != macs:
                have = "no such linear" if fit is None else f"{fit.macs} MACs a row"
                raise ValueError(
                    f"the predictor does not fit this model: {name} has {macs} MACs a row, the predictor "
                    f"{have}; calibrate this model"
                )
        if self.blocks and len(self.blocks) != layout.blocks:
            raise ValueError(
                f"the predictor does not fit this model: it knows {len(self.blocks)} blocks, the model has "
                f"{layout.blocks}; calibrate this model"
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

    def block_tolerances(self) -> tuple[float, ...]:
        """What each block's threshold of skipping is multiplied by: Γ̄/Γ of the block, from 1/4 to 4.

        A stale residual is off by r of its size, and by Γ·r of the size of what it is added to: a block
        with twice the Γ may change half as much. Γ̄ is the geometric mean.
        """
        logs = [math.log(max(block.gamma, 1e-12)) for block in self.blocks]
        mean = math.fsum(logs) / len(logs)
        return tuple(min(max(math.exp(mean - log), 0.25), 4.0) for log in logs)

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
            "linears": {name: fit_to_dict(fit) for name, fit in self.linears.items()},
            "outlier_limits": self.outlier_limits,
            "theta": self.theta,
            **({"blocks": [vars(block) for block in self.blocks]} if self.blocks else {}),
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
        line = f"predictor file {path} cannot be used: {_reason(error)}; calibrate again, or check the path"
        raise ValueError(one_line(line)) from None
    if fingerprint is not None:
        predictor.check_fingerprint(fingerprint)
    return predictor


def _reason(error: Exception) -> str:
    """What is wrong with a predictor file, in words that need no knowledge of Python."""
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    if isinstance(error, UnicodeDecodeError):
        return "it is no text file"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON from line {error.lineno}, column {error.colno} on"
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, (TypeError, AttributeError)):
        return "a part of it is of another form than `sixbit calibrate` writes"
    return getattr(error, "strerror", None) or str(error)


def _from_document(document: object) -> Predictor:
    if not isinstance(document, dict):
        raise ValueError("it holds no JSON object")
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
        linears={name: fit_from_dict(entry) for name, entry in document["linears"].items()},
        outlier_limits={k: finite(v) for k, v in document.get("outlier_limits", {}).items()},
        theta={
            str(finite(float(bits))): {key: finite(value) for key, value in row.items()}
            for bits, row in document["theta"].items()
        },
        blocks=tuple(block_from_dict(entry) for entry in document.get("blocks", ())),
    )


def _calibration(entry: dict) -> dict[str, object]:
    """How it was made; of the parts that a run is compared with, those that are told are whole numbers."""
    size = entry.get("size", [1, 1])
    if not isinstance(size, list) or len(size) != 2:
        raise ValueError(f"it holds {size!r} where height and width are needed")
    for value in (*size, *(entry[key] for key in ("steps", "frames") if key in entry)):
        whole(value)
    return dict(entry)


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
