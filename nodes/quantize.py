"""Node: write a 6-bit copy of a checkpoint, with a method, a rotation and a name of one's own."""

import logging
from pathlib import Path

from comfy_api.latest import io, ui

from ..sixbit_core.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from ..sixbit_core.quantize import QuantizeConfig, check_plain
from ..sixbit_core.quantize_weight import METHODS, ROTATIONS
from .copies import check_disk, is_copy, model_roots, write_copy
from .files import REFERENCE, entry_of, file_name, find_model, list_models, quantized_copy
from .host_contract import offered
from .precision import check_precision

_SUFFIX = ".safetensors"


class SixBitQuantize(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SixBitQuantize",
            display_name="Quantize CogVideoX",
            category="sixbit",
            description="Write a 6-bit (NVFP4) copy of a CogVideoX transformer beside it.",
            search_aliases=["6bit", "nvfp4", "fp4", "cogvideo", "smaller model"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=list_models(offered(model_roots)),
                    tooltip="A 16-bit file or folder of models/diffusion_models, or the bundled model.",
                ),
                io.Combo.Input(
                    "method",
                    options=list(METHODS),
                    default="search",
                    tooltip="search: best scales, values rounded by what layers read. rtn: nearest, quicker.",
                ),
                io.Combo.Input(
                    "rotation",
                    options=list(ROTATIONS),
                    default="auto",
                    tooltip="off: plain NVFP4. auto and on: rotated, which INT8 activations need.",
                ),
                io.String.Input(
                    "name", default="", tooltip="Of the new file; empty: the source's, with -6bit."
                ),
            ],
            outputs=[io.String.Output()],
            is_output_node=True,
        )

    @classmethod
    def validate_inputs(
        cls, model_name: str | None, method: str | None, rotation: str | None, name: str | None
    ) -> bool | str:
        if None in (model_name, method, rotation, name):  # one comes from another node
            return True
        try:
            checkpoint, target, config = _request(model_name, method, rotation, name)
            if not _is_there(target, checkpoint, config):
                check_disk(checkpoint, target, config.compatible)
        except ValueError as error:
            return str(error)
        return True

    @classmethod
    def fingerprint_inputs(
        cls, model_name: str | None, method: str | None, rotation: str | None, name: str | None
    ) -> str:
        if None in (model_name, method, rotation, name):
            return ""
        try:
            checkpoint, target, _ = _request(model_name, method, rotation, name)
        except ValueError as error:
            return str(error)
        return f"{checkpoint.fingerprint}:{target}:{target.exists()}"

    @classmethod
    def execute(cls, model_name: str, method: str, rotation: str, name: str) -> io.NodeOutput:
        checkpoint, target, config = _request(model_name, method, rotation, name)
        if _is_there(target, checkpoint, config):
            logging.info(f"6Bit: {target.name} is there already")
        else:
            write_copy(checkpoint, target, config)
        entry = entry_of(target, model_roots())
        return io.NodeOutput(entry, ui=ui.PreviewText(entry))


def _request(
    model_name: str, method: str, rotation: str, name: str
) -> tuple[Checkpoint, Path, QuantizeConfig]:
    """Source, target and settings of what was asked for.

    Raises:
        ValueError: a setting, name or source that cannot be.
    """
    config = QuantizeConfig(method, rotation, compatible=rotation == "off")
    checkpoint = open_checkpoint(find_model(model_name, model_roots()))
    check_plain(checkpoint)
    check_precision(checkpoint)
    target = quantized_copy(checkpoint.path)
    if model_name == REFERENCE:  # the pack's own folder is not written to
        target = _own_folder() / "reference-6bit.safetensors"
    if name.strip():
        target = target.with_name(file_name(name, _SUFFIX))
    return checkpoint, target, config


def _own_folder() -> Path:
    roots = model_roots()
    if not roots:
        raise ValueError("there is no folder models/diffusion_models to write to; create it")
    return next((root for root in roots if root.name == "diffusion_models"), roots[0])


def _is_there(target: Path, checkpoint: Checkpoint, config: QuantizeConfig) -> bool:
    if not target.exists():
        return False
    if not is_copy(target, checkpoint, config):
        raise CheckpointError(f"{target.name} exists and is another file; choose another name or delete it")
    return True
