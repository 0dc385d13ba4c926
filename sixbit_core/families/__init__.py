"""Architectures the core knows. A new one is a module here with a `detect`, and two names below."""

from collections.abc import Mapping

from . import cogvideox
from .base import ModelFamily, Shape, Source

DETECTORS = (cogvideox.detect,)
FAMILIES: dict[str, ModelFamily] = {f.name: f for f in (*cogvideox.PUBLISHED, cogvideox.SMALL)}

__all__ = ["DETECTORS", "FAMILIES", "ModelFamily", "Shape", "Source", "find_family", "to_native"]


def find_family(shapes: Mapping[str, Shape]) -> ModelFamily:
    """Family of a checkpoint, found by its tensors alone.

    Args:
        shapes: native name -> shape, as unquantized.

    Raises:
        ValueError: no family fits; the message says what is known.
    """
    for detect in DETECTORS:
        family = detect(shapes)
        if family is not None:
            return family
    known = ", ".join(family.label for family in FAMILIES.values())
    raise ValueError(f"the tensors belong to no model this pack knows ({known}); choose one of those")


def to_native(key: str) -> str:
    """Native name of a diffusers key of any known family; other keys come back as they are."""
    for family in FAMILIES.values():
        renamed = family.to_native(key)
        if renamed != key:
            return renamed
    return key
