"""Node: a LoRA of CogVideoX, from whichever program, beside the weights of a MODEL."""

import logging
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.latest import io

from ..sixbit_core.errors import one_line
from ..sixbit_core.safetensors_file import read_header
from .host_contract import known_host, offered
from .lora_file import CONFIG, LoraFile, read_lora


class SixBitLoadLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitLoadLora",
            display_name="Load CogVideoX LoRA",
            category="sixbit",
            description="Run a LoRA beside the weights of a CogVideoX; nothing is quantized again.",
            search_aliases=["6bit", "cogvideo"],
            inputs=[
                io.Model.Input("model"),
                io.Combo.Input(
                    "lora_name",
                    options=offered(lambda: folder_paths.get_filename_list("loras")),
                    tooltip="A file of models/loras, with key names of diffusers, PEFT, kohya or ComfyUI.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-10.0,
                    max=10.0,
                    step=0.01,
                    tooltip="0 gives the model as it is.",
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def validate_inputs(cls, lora_name: str | None) -> bool | str:
        if lora_name is None:  # it comes from another node
            return True
        try:
            read_header(_path(lora_name))
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(cls, lora_name: str | None, **_: Any) -> str:
        if lora_name is None:
            return ""
        try:
            path = _path(lora_name)
        except ValueError:
            return lora_name
        beside = path.with_name(CONFIG)
        files = [file for file in (path, beside) if file.exists()]
        return f"{path}:{[file.stat().st_mtime_ns for file in files]}"

    @classmethod
    def execute(cls, model: Any, lora_name: str, strength: float = 1.0) -> io.NodeOutput:
        if strength == 0 or not known_host():
            return io.NodeOutput(model)
        from .branches import Branches, linears_of, with_branches
        from .bridge import layout_of

        layout_of(model)  # refuses what is no CogVideoX
        found = read_lora(_path(lora_name), linears_of(model.model.diffusion_model))
        _say(lora_name, found, strength)
        return io.NodeOutput(with_branches(model, Branches(found.layers, strength)))


def _path(name: str) -> Path:
    path = folder_paths.get_full_path("loras", name)
    if path is None:
        raise ValueError(one_line(f"there is no LoRA {name} in the loras folders; choose one of the list"))
    return Path(path)


def _say(name: str, found: LoraFile, strength: float) -> None:
    ranks = sorted({pair.down.shape[0] for pair in found.layers.values()})
    rank = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    logging.info(f"6Bit: {name} runs beside {len(found.layers)} linears, rank {rank}, strength {strength:g}")
    if found.unmatched:
        logging.warning(
            f"6Bit: {len(found.unmatched)} keys of {name} match nothing in this model and have no effect, "
            f"such as {found.unmatched[0]}"
        )
