"""The list of nodes. Each module of a node is a thin shell over `bridge` and the core."""

from comfy_api.latest import ComfyExtension, io

from .calibrate import SixBitCalibratePredictor
from .compare import SixBitCompare
from .delta_cache import SixBitTemporalDeltaCache
from .dmpq import SixBitApplyDMPQ
from .image_to_video import SixBitImageToVideo
from .latent import SixBitEmptyLatent
from .load import SixBitLoadCogVideoX
from .lora import SixBitLoadLora
from .quantize import SixBitQuantize
from .reference import SixBitLoadReference
from .report import SixBitRunReport

NODES: list[type[io.ComfyNode]] = [
    SixBitLoadCogVideoX,
    SixBitQuantize,
    SixBitLoadLora,
    SixBitApplyDMPQ,
    SixBitTemporalDeltaCache,
    SixBitCalibratePredictor,
    SixBitRunReport,
    SixBitCompare,
    SixBitEmptyLatent,
    SixBitImageToVideo,
    SixBitLoadReference,
]


class SixBitExtension(ComfyExtension):
    """What ComfyUI asks for the nodes."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
