"""Node: skip transformer blocks whose residual barely moves (TDC)."""

import logging
from typing import Any

from comfy_api.latest import io

from ..sixbit_core.config import CACHE_LOCATIONS, PRESETS, DeltaCacheConfig, override
from .host_contract import known_host

OFF = "off"
_DEFAULTS = DeltaCacheConfig()
CHOICES = ("balanced", "quality", "fast", "paper")


class SixBitTemporalDeltaCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        share = {"min": 0.0, "max": 1.0, "step": 0.01, "optional": True, "advanced": True}
        return io.Schema(
            node_id="SixBitTemporalDeltaCache",
            display_name="Temporal Delta Cache",
            category="sixbit",
            description="Skip transformer blocks whose residual barely moves from one step to the next.",
            search_aliases=["6bit", "tdc", "cogvideo", "cache", "skip blocks", "faster video"],
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input(
                    "preset",
                    options=[*CHOICES, OFF],
                    default="balanced",
                    tooltip="quality skips less, fast more. Sets the values below; one you move wins.",
                ),
                io.Float.Input(
                    "threshold",
                    default=_DEFAULTS.threshold,
                    min=0.0,
                    max=1.0,
                    step=0.005,
                    optional=True,
                    advanced=True,
                    tooltip="Accumulated relative change of a block's residual up to which it is skipped.",
                ),
                io.Int.Input(
                    "max_skips",
                    default=_DEFAULTS.max_skips,
                    min=0,
                    max=100,
                    optional=True,
                    advanced=True,
                    tooltip="Skips of a block in a row before it must run again.",
                ),
                io.Float.Input(
                    "start",
                    default=_DEFAULTS.start,
                    tooltip="Part of sampling before which no block is skipped.",
                    **share,
                ),
                io.Float.Input(
                    "end",
                    default=_DEFAULTS.end,
                    tooltip="Part of sampling after which no block is skipped.",
                    **share,
                ),
                io.Combo.Input(
                    "cache_location",
                    options=list(CACHE_LOCATIONS),
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="Where residuals wait. auto: the first of these that fits into free memory.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def validate_inputs(
        cls, preset: str | None, start: float | None = _DEFAULTS.start, end: float | None = _DEFAULTS.end
    ) -> bool | str:
        # The host names every argument as wrong, and checks the range of an input that is none.
        if None in (preset, start, end):  # one comes from another node
            return True
        if preset not in (*CHOICES, OFF):
            return f"preset must be one of {', '.join(CHOICES)}, {OFF}, got {preset!r}"
        try:
            cache_config(preset, start=start, end=end)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def execute(
        cls,
        model: Any,
        preset: str,
        threshold: float = _DEFAULTS.threshold,
        max_skips: int = _DEFAULTS.max_skips,
        start: float = _DEFAULTS.start,
        end: float = _DEFAULTS.end,
        cache_location: str = _DEFAULTS.location,
    ) -> io.NodeOutput:
        if not known_host():
            return io.NodeOutput(model)
        from .bridge import settings_of, with_settings

        config = cache_config(preset, threshold, max_skips, start, end, cache_location)
        if settings_of(model).cache is not None:
            logging.warning(
                "6Bit: two Temporal Delta Cache nodes in a row; the one nearer the sampler counts"
            )
        return io.NodeOutput(with_settings(model, cache=config))


def cache_config(
    preset: str,
    threshold: float = _DEFAULTS.threshold,
    max_skips: int = _DEFAULTS.max_skips,
    start: float = _DEFAULTS.start,
    end: float = _DEFAULTS.end,
    cache_location: str = _DEFAULTS.location,
) -> DeltaCacheConfig | None:
    """The preset's values, with every one that was moved from its default in its place; None where off.

    Raises:
        ValueError: a value out of range.
    """
    if preset == OFF:
        return None
    given = {
        "threshold": threshold,
        "max_skips": max_skips,
        "start": start,
        "end": end,
        "location": cache_location,
    }
    moved = {name: value for name, value in given.items() if value != getattr(_DEFAULTS, name)}
    return override(PRESETS[preset].cache, moved)
