"""The list of nodes. Each module of a node is a thin shell over `bridge` and the core."""

import importlib
import logging

from comfy_api.latest import ComfyExtension, io

from ..sixbit_core.errors import one_line

_NODES = (
    ("load", "SixBitLoadCogVideoX"),
    ("quantize", "SixBitQuantize"),
    ("lora", "SixBitLoadLora"),
    ("dmpq", "SixBitApplyDMPQ"),
    ("delta_cache", "SixBitTemporalDeltaCache"),
    ("calibrate", "SixBitCalibratePredictor"),
    ("report", "SixBitRunReport"),
    ("compare", "SixBitCompare"),
    ("latent", "SixBitEmptyLatent"),
    ("image_to_video", "SixBitImageToVideo"),
    ("reference", "SixBitLoadReference"),
)


def registered() -> list[type[io.ComfyNode]]:
    """The nodes whose fields this host can show; one that it cannot is left out, and a line says so."""
    found = []
    for module, name in _NODES:
        try:
            node = getattr(importlib.import_module(f".{module}", __package__), name)
            node.GET_SCHEMA()
        except Exception as error:  # whatever it is that this host has lost
            logging.warning(
                f"6Bit: this ComfyUI is not one this pack knows ({one_line(str(error))}); the node {name} is "
                "left out"
            )
        else:
            found.append(node)
    return found


class SixBitExtension(ComfyExtension):
    """What ComfyUI asks for the nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return registered()
