"""Node: a CogVideoX transformer, whatever file it comes in, as a MODEL that gives what diffusers gives."""

from comfy_api.latest import io

from ..sixbit_core.checkpoint import open_checkpoint
from .copies import check_disk, model_roots, quantized_once
from .files import REFERENCE, find_model, list_models, quantized_copy
from .host_contract import load_or_plain, offered
from .precision import check_precision
from .scales import scales_of, transformer_config

WEIGHTS = ("auto", "6-bit", "as stored")


class SixBitLoadCogVideoX(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitLoadCogVideoX",
            display_name="Load 6Bit CogVideoX",
            category="sixbit",
            description="Load a CogVideoX transformer, in 6-bit or in its own precision.",
            search_aliases=["6bit", "nvfp4", "fp4", "cogvideo", "low vram video model"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_models(offered(model_roots)),
                    tooltip="A file or sharded folder of models/diffusion_models, or the bundled model.",
                ),
                io.Combo.Input(
                    "weights",
                    options=list(WEIGHTS),
                    default="auto",
                    tooltip="auto and 6-bit: NVFP4 weights; a 16-bit source is quantized once, beside it. "
                    "as stored: the file as it is.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def validate_inputs(cls, model_name: str | None, weights: str | None) -> bool | str:
        if model_name is None:  # it comes from another node
            return True
        try:
            checkpoint = open_checkpoint(find_model(model_name, model_roots()))
            check_precision(checkpoint)
            scales_of(checkpoint), transformer_config(checkpoint)
            target = quantized_copy(checkpoint.path)
            copies = weights != "as stored" and not checkpoint.is_quantized and model_name != REFERENCE
            if copies and not target.exists():
                check_disk(checkpoint, target)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, model_name: str | None, weights: str | None) -> str:
        if model_name is None:
            return ""
        try:
            path = find_model(model_name, model_roots())
        except ValueError:
            return model_name
        newest = max((p.stat().st_mtime_ns for p in path.rglob("*.safetensors")), default=0)
        return f"{path}:{newest if path.is_dir() else path.stat().st_mtime_ns}:{weights}"

    @classmethod
    def execute(cls, model_name: str, weights: str) -> io.NodeOutput:
        checkpoint = open_checkpoint(find_model(model_name, model_roots()))
        scales = scales_of(checkpoint)
        if model_name == REFERENCE:
            return io.NodeOutput(load_or_plain(checkpoint, scales, quantize=weights != "as stored"))
        if weights != "as stored" and not checkpoint.is_quantized:
            checkpoint = quantized_once(checkpoint)
        return io.NodeOutput(load_or_plain(checkpoint, scales, quantize=False))
