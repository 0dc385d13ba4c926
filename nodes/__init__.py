"""The nodes of this pack in ComfyUI. What touches the host is imported when the host asks for it."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "SixBitExtension":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from .extension import SixBitExtension

    return SixBitExtension
