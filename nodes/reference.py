"""Node: the bundled reference model, whole: a small CogVideoX that needs no download."""

from comfy_api.latest import io

from ..sixbit_core.checkpoint import open_checkpoint
from .files import find_reference
from .host_contract import check_parts, load_or_plain
from .scales import scales_of


class SixBitLoadReference(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitLoadReference",
            display_name="Load 6Bit Reference",
            category="sixbit",
            description="The bundled small model: clips of 33 frames of 128x128 of coloured shapes.",
            search_aliases=["cogvideo", "small model", "demo"],
            inputs=[
                io.Combo.Input(
                    "weights",
                    options=["6-bit", "as stored"],
                    default="6-bit",
                    optional=True,
                    advanced=True,
                    tooltip="6-bit: quantized to NVFP4 as it is loaded.",
                )
            ],
            outputs=[io.Model.Output(), io.Clip.Output(), io.Vae.Output()],
        )

    @classmethod
    def execute(cls, weights: str = "6-bit") -> io.NodeOutput:
        check_parts()
        from .parts import load_clip, load_vae

        folder = find_reference()
        checkpoint = open_checkpoint(folder)
        model = load_or_plain(checkpoint, scales_of(checkpoint), quantize=weights == "6-bit")
        length = (checkpoint.config or {})["max_text_seq_length"]
        return io.NodeOutput(model, load_clip(folder, length), load_vae(folder))
