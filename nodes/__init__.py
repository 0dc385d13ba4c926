"""The nodes of this pack in ComfyUI. Each module is one node, a thin shell over `bridge` and the core."""

from comfy_api.latest import ComfyExtension, io

from .delta_cache import SixBitTemporalDeltaCache
from .load import SixBitLoadCogVideoX

NODES: list[type[io.ComfyNode]] = [SixBitLoadCogVideoX, SixBitTemporalDeltaCache]


class SixBitExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
