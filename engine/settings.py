"""What a run is told, from a preset and what the user moved: a value the user gives wins."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..kernels import int8_backend
from ..sixbit_core.config import PRESETS, DeltaCacheConfig, DMPQConfig, Preset, default_precision, override
from ..sixbit_core.formats import FORMATS
from ..sixbit_core.predictor import Predictor, load_predictor
from ..sixbit_core.router import AUTO, ROUTERS, WITHOUT_NVFP4, resolve_router
from ..sixbit_core.run import RunState
from .errors import InputError
from .facts import REFERENCE, ModelFacts, reference_folder
from .machine import Machine

DEFAULT_PRESET = "balanced"
FIXED_ROUTERS = {"w4a16": "bf16", "w4a8": "int8", "w4a4": "nvfp4"}
PRECISIONS = ("full", *FIXED_ROUTERS, "dmpq")


@dataclass(frozen=True)
class Choice:
    """What the command line was given; None where preset or machine decide.

    Attributes:
        precision: one of `PRECISIONS`; None for dmpq where a router or bits are given, else for
            `default_precision`.
        cache: "tdc" or "off".
        predictor: predictor file, or None for the bundled one where it fits.
        tune: False for `--no-tuning`.
    """

    precision: str | None = None
    cache: str = "tdc"
    preset: str | None = None
    router: str | None = None
    bits: float | None = None
    predictor: Path | None = None
    purified_refresh: bool | None = None
    tune: bool | None = None
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
        dmpq: how linears are routed, its router never "auto"; None leaves them in full precision.
        cache: when blocks are skipped; None never skips.
        predictor: what the router decides by and PDR takes its limits from; None where there is none.
        weights: the transformer it needs: "full", or NVFP4 by "search" or "rtn".
        note: for the user: what was chosen for them and why, what a preset wants and could not be had.
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

    @property
    def tunes(self) -> bool:
        """Whether kernels may time their tiles."""
        return self.dmpq is not None and self.dmpq.tune

    def label(self, bits: float | None = None) -> str:
        """The run in a few words.

        Args:
            bits: average activation bits, once a run has had them.
        """
        words = [self.precision]
        if self.precision == "dmpq" and self.dmpq:
            words.append(f"router {self.dmpq.router}")
            fixed = FORMATS.get(self.dmpq.router)
            if bits is None and fixed:
                words.append(f"{fixed.bits} bits")
            elif bits is None and self.dmpq.router not in WITHOUT_NVFP4:
                words.append(f"{self.dmpq.bits:g} bits asked for")
        if self.dmpq and bits is not None:
            words.append(f"{bits:.2f} bits")
        words.append("cache off" if self.cache is None else f"cache tdc, threshold {self.cache.threshold:g}")
        return ", ".join(words)


def settle(choice: Choice, facts: ModelFacts, machine: Machine) -> RunSettings:
    """Turn a choice into settings for a model, and see that a run can be made of them. Raises InputError."""
    bundled = reference_folder().parent / "predictor.json" if facts.name == REFERENCE else None
    backend = int8_backend(machine.device)
    settings = resolve(choice, lambda: facts.checkpoint.fingerprint, bundled, machine.capability, backend)
    try:
        RunState(facts.layout, settings.dmpq, settings.cache, settings.predictor).close()
    except ValueError as error:
        raise InputError(str(error)) from error
    return settings


def resolve(
    choice: Choice,
    fingerprint: Callable[[], str],
    bundled: Path | None = None,
    capability: tuple[int, int] | None = None,
    backend: str = "triton",
) -> RunSettings:
    """Turn a choice into settings.

    Args:
        choice: what was asked for.
        fingerprint: gives the model's fingerprint; called only where a predictor is read.
        bundled: predictor file that serves where none was named and that may be absent.
        capability, backend: of the GPU, for a choice without a precision, as `default_precision` takes them.

    Raises:
        InputError: for a value out of range, an unknown name, an option that the precision has no use for, or
            a predictor of another model.
    """
    preset = check_choice(choice)
    precision, notes = choice.precision, []
    asked = choice.router is not None or choice.bits is not None
    if precision is None and (asked or preset.dmpq.router in WITHOUT_NVFP4):
        precision = "dmpq"
    elif precision is None:
        precision, why = default_precision(capability, backend)
        if precision == "w4a16" and choice.predictor is not None:  # of no use to 16-bit activations
            precision, why = "w4a8", "a predictor was given"
        notes = [
            f"precision {precision}, since {why}" + ("" if precision == "dmpq" else ", --precision overrides")
        ]
    try:
        cache = _cache(choice, preset.cache)
        if precision == "full":
            return RunSettings("full", None, cache)
        predictor = None if precision == "w4a16" else _predictor(choice.predictor, fingerprint, bundled)
        dmpq = _dmpq(choice, precision, preset.dmpq)
        dmpq, note = resolve_router(dmpq, predictor)
        if note is not None:
            notes.append(f"{note}; `sixbit calibrate` makes a predictor")
        return RunSettings(precision, dmpq, cache, predictor, "search", "; ".join(notes) or None)
    except ValueError as error:
        raise InputError(str(error)) from error


def check_choice(choice: Choice) -> Preset:
    """The preset of a choice whose names, numbers and combination are all possible. Raises InputError."""
    for flag, value, known in (
        ("--precision", choice.precision or "dmpq", PRECISIONS),
        ("--cache", choice.cache, ("off", "tdc")),
        ("--preset", choice.preset or DEFAULT_PRESET, tuple(PRESETS)),
        ("--router", choice.router or AUTO, (AUTO, *ROUTERS)),
    ):
        if value not in known:
            raise InputError(f"{flag} must be one of {', '.join(known)}, got {value!r}")
    for flag, value, useful in (
        ("--router", choice.router, ("dmpq",)),
        ("--bits", choice.bits, ("dmpq",)),
        ("--predictor", choice.predictor, ("dmpq", "w4a8", "w4a4")),
    ):
        if value is not None and choice.precision not in (None, *useful):
            raise InputError(
                f"{flag} means nothing with --precision {choice.precision}; "
                f"leave it out, or give --precision {' or '.join(useful)}"
            )
    preset = PRESETS[choice.preset or DEFAULT_PRESET]
    for flag, config, changes in (
        ("--bits", preset.dmpq, {"bits": choice.bits}),
        ("--threshold", preset.cache, {"threshold": choice.threshold}),
        ("--max-skips", preset.cache, {"max_skips": choice.max_skips}),
        ("--start, --end", preset.cache, {"start": choice.start, "end": choice.end}),
        ("--cache-location", preset.cache, {"location": choice.cache_location}),
    ):
        try:
            override(config, changes)
        except ValueError as error:
            raise InputError(f"{flag}: {error}") from error
    if choice.max_skips == 0 and choice.cache == "tdc":
        raise InputError("--max-skips 0 would skip nothing; give 1 or more, or --cache off")
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


def _dmpq(choice: Choice, precision: str, preset: DMPQConfig) -> DMPQConfig:
    changes = {
        "router": choice.router,
        "bits": choice.bits,
        "purified_refresh": choice.purified_refresh,
        "tune": choice.tune,
    }
    if precision in FIXED_ROUTERS:
        changes["router"] = FIXED_ROUTERS[precision]
    if precision == "w4a16":  # stays 16-bit after a skip too: PDR has nothing to mend there
        changes["purified_refresh"] = False
    return override(preset, changes)


def _predictor(given: Path | None, fingerprint: Callable[[], str], bundled: Path | None) -> Predictor | None:
    """The predictor that was named, or the bundled one where it is of this model."""
    if given is not None:
        return load_predictor(given, fingerprint())
    if bundled is None or not bundled.is_file():
        return None
    found = load_predictor(bundled)
    return found if found.fingerprint == fingerprint() else None
