"""What a run is told, from a preset and what the user moved: a value the user gives wins."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..sixbit_core.config import PRESETS, DeltaCacheConfig, DMPQConfig, Preset, override
from ..sixbit_core.predictor import Predictor, load_predictor
from ..sixbit_core.router import AUTO, ROUTERS
from ..sixbit_core.run import RunState
from .errors import InputError
from .facts import REFERENCE, ModelFacts, reference_folder

DEFAULT_PRESET = "balanced"
FIXED_ROUTERS = {"w4a16": "bf16", "w4a8": "int8", "w4a4": "nvfp4"}
PRECISIONS = ("full", *FIXED_ROUTERS, "dmpq")


@dataclass(frozen=True)
class Choice:
    """What the command line was given; None where the preset decides.

    Attributes:
        precision: one of `PRECISIONS`.
        cache: "tdc" or "off".
        predictor: predictor file, or None for the bundled one where it fits.
    """

    precision: str = "dmpq"
    cache: str = "tdc"
    preset: str | None = None
    router: str | None = None
    bits: float | None = None
    predictor: Path | None = None
    purified_refresh: bool | None = None
    threshold: float | None = None
    max_skips: int | None = None
    start: float | None = None
    end: float | None = None
    cache_location: str | None = None


@dataclass(frozen=True)
class RunSettings:
    """A checked choice.

    Attributes:
        precision: one of `PRECISIONS`.
        dmpq: how linears are routed; None leaves them in full precision.
        cache: when blocks are skipped; None never skips.
        predictor: what the router decides by; None where it needs nothing.
        weights: the transformer it needs: "full", or NVFP4 by "search" or "rtn".
        note: one line for the user where what a preset wants could not be had.
    """

    precision: str
    dmpq: DMPQConfig | None
    cache: DeltaCacheConfig | None
    predictor: Predictor | None = None
    weights: str = "full"
    note: str | None = None

    @property
    def router(self) -> str | None:
        """Name of the router, None in full precision."""
        return self.dmpq.router if self.dmpq else None

    def label(self) -> str:
        """The run in a few words."""
        words = [self.precision]
        if self.precision == "dmpq" and self.dmpq:
            words.append(f"{self.dmpq.bits:g} bits by router {self.dmpq.router}")
        words.append("cache off" if self.cache is None else f"cache tdc, threshold {self.cache.threshold:g}")
        return ", ".join(words)


def settle(choice: Choice, facts: ModelFacts) -> RunSettings:
    """Turn a choice into settings for a model, and see that a run can be made of them. Raises InputError."""
    bundled = reference_folder().parent / "predictor.json" if facts.name == REFERENCE else None
    settings = resolve(choice, lambda: facts.checkpoint.fingerprint, bundled)
    try:
        RunState(facts.layout, settings.dmpq, settings.cache, settings.predictor).close()
    except ValueError as error:
        raise InputError(str(error)) from error
    return settings


def resolve(choice: Choice, fingerprint: Callable[[], str], bundled: Path | None = None) -> RunSettings:
    """Turn a choice into settings.

    Args:
        choice: what was asked for.
        fingerprint: gives the model's fingerprint; called only where a predictor is read.
        bundled: predictor file that serves where none was named and that may be absent.

    Raises:
        InputError: for a value out of range, an unknown name, or a predictor of another model.
    """
    preset = check_choice(choice)
    try:
        cache = _cache(choice, preset.cache)
        if choice.precision == "full":
            return RunSettings("full", None, cache)
        if choice.precision in FIXED_ROUTERS:
            router = FIXED_ROUTERS[choice.precision]
            # A 16-bit run stays 16-bit after a skip too: PDR has nothing to mend there.
            refresh = choice.purified_refresh is not False and router != "bf16"
            dmpq = override(preset.dmpq, {"router": router, "purified_refresh": refresh})
            return RunSettings(choice.precision, dmpq, cache, weights="search")
        return _routed(choice, preset.dmpq, cache, fingerprint, bundled)
    except ValueError as error:
        raise InputError(str(error)) from error


def check_choice(choice: Choice) -> Preset:
    """The preset of a choice whose names and numbers are all possible. Raises InputError."""
    for flag, value, known in (
        ("--precision", choice.precision, PRECISIONS),
        ("--cache", choice.cache, ("off", "tdc")),
        ("--preset", choice.preset or DEFAULT_PRESET, tuple(PRESETS)),
        ("--router", choice.router or AUTO, (AUTO, *ROUTERS)),
    ):
        if value not in known:
            raise InputError(f"{flag} must be one of {', '.join(known)}, got {value!r}")
    preset = PRESETS[choice.preset or DEFAULT_PRESET]
    try:
        _cache(choice, preset.cache)
        override(preset.dmpq, {"bits": choice.bits})
    except ValueError as error:
        raise InputError(str(error)) from error
    return preset


def _cache(choice: Choice, preset: DeltaCacheConfig) -> DeltaCacheConfig | None:
    changes = {
        "threshold": choice.threshold,
        "max_skips": choice.max_skips,
        "start": choice.start,
        "end": choice.end,
        "location": choice.cache_location,
    }
    config = override(preset, changes)
    return config if choice.cache == "tdc" else None


def _routed(
    choice: Choice,
    preset: DMPQConfig,
    cache: DeltaCacheConfig | None,
    fingerprint: Callable[[], str],
    bundled: Path | None,
) -> RunSettings:
    changes = {"router": choice.router, "bits": choice.bits, "purified_refresh": choice.purified_refresh}
    dmpq = override(preset, changes)
    predictor, note = None, None
    if choice.predictor is not None:
        predictor = load_predictor(choice.predictor, fingerprint())
    elif bundled is not None and bundled.is_file():
        found = load_predictor(bundled)
        predictor = found if found.fingerprint == fingerprint() else None
    if predictor is None and dmpq.router == AUTO:
        note = "no predictor for this model: every linear runs in INT8; `sixbit calibrate` makes one"
    return RunSettings("dmpq", dmpq, cache, predictor, "search", note)
