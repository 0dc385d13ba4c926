"""Settings of a run. Frozen and checked once, here; nothing downstream checks again.

Three parts of 6Bit-Diffusion (arXiv 2603.18742) are set: DMPQ (which activation format a linear
uses) and PDR (the first evaluation after a skip) by `DMPQConfig`, TDC (which blocks are skipped) by
`DeltaCacheConfig`. `PRESETS` is the one table of recommended values; a value that the user gives
wins over the preset's (`override`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

ERRORS = ("excess", "paper")
MEANINGS_OF_BITS = ("routing", "run")
CACHE_LOCATIONS = ("auto", "gpu", "gpu-int8", "gpu-nvfp4", "host")
PAPER_OUTLIER_LIMIT = 25.0


@dataclass(frozen=True)
class DMPQConfig:
    """How activations of the block linears are quantized.

    Attributes:
        router: name in `router.ROUTERS`, or "auto": gamma where a predictor is given, else int8.
        bits: asked-for average activation bits, 4 to 8; fixed routers ("int8", ...) do not read it.
        purified_refresh: PDR; a linear with outliers runs in bf16 on the first evaluation after a skip.
        seed: of the "random" router.
        outlier_limit: PDR limit on max|x| / mean|x| of every linear; None takes the predictor's limit
            of the linear's kind, or the paper's 25 where there is no predictor.
        error: which error the "gamma" router predicts: "excess" over INT8, or the "paper"'s.
        theta: threshold of the "gamma" router in place of the predictor's (calibration sets it).
        bits_of: what `bits` means for the "gamma" router: those of "routing" alone, as without the cache,
            or of the whole "run", in which INT8 is forced after every skip.
        tune: kernels may time a few tiles on GPUs whose table was not measured; no number depends on it.
    """

    router: str = "gamma"
    bits: float = 6.0
    purified_refresh: bool = True
    seed: int = 0
    outlier_limit: float | None = None
    error: str = "excess"
    theta: float | None = None
    bits_of: str = "routing"
    tune: bool = True

    def __post_init__(self) -> None:
        if not 4.0 <= self.bits <= 8.0:
            raise ValueError(f"activation bits must lie between 4 and 8, got {self.bits}")
        if self.error not in ERRORS:
            raise ValueError(f"error must be one of {', '.join(ERRORS)}, got {self.error!r}")
        if self.bits_of not in MEANINGS_OF_BITS:
            raise ValueError(f"bits_of must be one of {', '.join(MEANINGS_OF_BITS)}, got {self.bits_of!r}")
        if self.outlier_limit is not None and not self.outlier_limit > 0:
            raise ValueError(f"outlier_limit must be above 0, got {self.outlier_limit}")


@dataclass(frozen=True)
class DeltaCacheConfig:
    """When a transformer block may be skipped, and where its residual waits.

    Attributes:
        threshold: accumulated relative change of the residual below which a block is skipped.
        max_skips: skips in a row before a block must run again.
        start, end: part of sampling, as fractions of it, in which skipping is allowed.
        location: one of `CACHE_LOCATIONS`.
        policy: name in `skip.SKIP_POLICIES`.
        seed: of the "random" policy.
        group: how many blocks in a row are skipped together or not at all; 0 for all blocks.
        scaled: multiply a kept residual by how much the block's grew since, as calibration saw it grow.
    """

    threshold: float = 0.15
    max_skips: int = 2
    start: float = 0.25
    end: float = 1.0
    location: str = "auto"
    policy: str = "error-budget"
    seed: int = 0
    group: int = 1
    scaled: bool = False

    def __post_init__(self) -> None:
        if self.group < 0:
            raise ValueError(f"group must be 0 or more, got {self.group}")
        if not self.threshold >= 0:
            raise ValueError(f"threshold must be 0 or more, got {self.threshold}")
        if self.max_skips < 0:
            raise ValueError(f"max_skips must be 0 or more, got {self.max_skips}")
        if not 0 <= self.start < self.end <= 1:
            raise ValueError(f"start and end need 0 <= start < end <= 1, got {self.start} and {self.end}")
        if self.location not in CACHE_LOCATIONS:
            raise ValueError(
                f"cache location must be one of {', '.join(CACHE_LOCATIONS)}, got {self.location!r}"
            )


@dataclass(frozen=True)
class Preset:
    """Recommended settings under one name."""

    dmpq: DMPQConfig
    cache: DeltaCacheConfig


PRESETS: dict[str, Preset] = {
    "paper": Preset(
        DMPQConfig(router="gamma", bits=6.0, outlier_limit=PAPER_OUTLIER_LIMIT, error="paper", bits_of="run"),
        DeltaCacheConfig(threshold=0.15, max_skips=2, start=0.0),
    ),
    "quality": Preset(DMPQConfig(router="int8-protect", bits=8.0), DeltaCacheConfig(threshold=0.08)),
    "balanced": Preset(DMPQConfig(router="auto", bits=6.0), DeltaCacheConfig()),
    "fast": Preset(
        DMPQConfig(router="auto", bits=5.0), DeltaCacheConfig(threshold=0.25, max_skips=3, start=0.2)
    ),
}

NATIVE_FP4 = (10, 0)  # lowest compute capability with FP4 tensor cores


def default_precision(capability: tuple[int, int] | None, backend: str = "triton") -> tuple[str, str]:
    """Precision where none is asked for, and why, in a few words.

    Args:
        capability: compute capability of an NVIDIA GPU; None for anything else.
        backend: what multiplies INT8 there, as `kernels.int8_backend` has it.

    Returns:
        "dmpq" where NVFP4 products are native, else "w4a8", since emulated NVFP4 activations would only
        cost quality, but "w4a16" where INT8 ones would be multiplied in 16 bits; and the reason.
    """
    if capability is not None and backend == "half":
        return "w4a16", "without Triton INT8 is no faster on this GPU"
    if capability is not None and tuple(capability) >= NATIVE_FP4:
        if backend in ("kitchen", "int_mm"):
            return "w4a8", "FP4 units need Triton"
        return "dmpq", "this GPU has FP4 units"
    return "w4a8", "no FP4 units here" if capability is None else "this GPU has no FP4 units"


Config = TypeVar("Config", DMPQConfig, DeltaCacheConfig)


def override(config: Config, changes: Mapping[str, object]) -> Config:
    """`config` with every value of `changes` that is not None; the user's value wins over the preset's.

    Raises:
        ValueError: for a value out of range.
        TypeError: for a name that is not a field.
    """
    return replace(config, **{name: value for name, value in changes.items() if value is not None})
