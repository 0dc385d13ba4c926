"""Registering with the optional libraries absent; then each seam of the host broken in turn."""

from boot import ARGUMENTS, answer, block, pack  # isort: split

import asyncio
import enum
import importlib
import inspect
import logging
import sys

import torch

ABSENT = ("diffusers", "triton", "transformers")


def registered() -> list[str]:
    """The host is up, and has what it needs itself; the libraries go, then the pack is loaded."""
    blocker = block(*ABSENT)
    try:
        extension = asyncio.run(sys.modules[pack("nodes").__package__.rpartition(".")[0]].comfy_entrypoint())
        return [node.GET_SCHEMA().node_id for node in asyncio.run(extension.get_node_list())]
    finally:
        sys.meta_path.remove(blocker)


def every_seam(contract: object) -> tuple:
    parts = ("SEAMS", "PARTS_SEAMS", "TEXT_SEAMS", "PREVIEW_SEAMS", "FALLBACK_SEAMS", "SAMPLING_SEAMS")
    return tuple(seam for part in parts for seam in getattr(contract, part))


def all_mismatches(contract: object) -> list[str]:
    return contract.mismatches(every_seam(contract))


def probe_each(contract: object) -> list[str]:
    """Seams whose loss or other signature goes unnoticed."""
    unnoticed = []
    every = every_seam(contract)
    for seam in every:
        owner = importlib.import_module(seam.module)
        *path, leaf = seam.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        own = inspect.getattr_static(owner, leaf)
        inherited = isinstance(owner, type) and leaf not in vars(owner)
        try:
            if seam.parameters:
                setattr(owner, leaf, lambda renamed: None)
                found = contract.mismatches(every)
                if not any(seam.name in line for line in found):
                    unnoticed.append(f"{seam.name} with another signature")
                if inherited:
                    delattr(owner, leaf)
                else:
                    setattr(owner, leaf, own)
            if not inherited and not isinstance(owner, enum.EnumMeta):
                delattr(owner, leaf)
                left = hasattr(owner, leaf)  # what a base class has in its place serves as well
                if not left and not any(seam.name in line for line in contract.mismatches(every)):
                    unnoticed.append(f"{seam.name} gone")
        finally:
            if not inherited and not isinstance(owner, enum.EnumMeta):
                setattr(owner, leaf, own)
    return unnoticed


def without_a_part(contract: object) -> str:
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX

    own = AutoencoderKLCogVideoX._decode_batched
    del AutoencoderKLCogVideoX._decode_batched
    try:
        pack("nodes.reference").SixBitLoadReference.execute()
    except ValueError as error:
        return str(error)
    finally:
        AutoencoderKLCogVideoX._decode_batched = own
    return "no error"


def schemas() -> dict[str, dict]:
    """What saved workflows count on: names, types and order of inputs and outputs."""
    found = {}
    for node in pack("nodes.extension").NODES:
        schema = node.GET_SCHEMA()
        found[schema.node_id] = {
            "inputs": [
                {
                    "name": i.id,
                    "type": i.get_io_type(),
                    "optional": bool(i.optional),
                    "default": getattr(i, "default", None),
                    "options": getattr(i, "options", None) or [],
                }
                for i in schema.inputs
            ],
            "outputs": [o.get_io_type() for o in schema.outputs],
        }
    return found


def without_the_hosts_loader(checkpoint: object, scales: object, contract: object) -> str:
    import comfy.sd

    own = comfy.sd.load_diffusion_model_state_dict
    del comfy.sd.load_diffusion_model_state_dict
    try:
        contract.load_or_plain(checkpoint, scales, False)
    except ValueError as error:
        return str(error)
    finally:
        comfy.sd.load_diffusion_model_state_dict = own
    return "no error"


def on_an_unknown_host(contract: object) -> dict:
    import comfy.ops

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    own = comfy.ops.cast_bias_weight
    comfy.ops.cast_bias_weight = lambda s, input: None
    try:
        checkpoint = pack("sixbit_core.checkpoint").open_checkpoint(ARGUMENTS["quantized"])
        scales = pack("nodes.scales").scales_of(checkpoint)
        model = contract.load_or_plain(checkpoint, scales, False)
        nothing = without_the_hosts_loader(checkpoint, scales, contract)
        cached = pack("nodes.delta_cache").SixBitTemporalDeltaCache.execute(model, "balanced").args[0]
        routed = pack("nodes.dmpq").SixBitApplyDMPQ.execute(model, "balanced").args[0]
    finally:
        comfy.ops.cast_bias_weight = own
    return {
        "kind": type(model.model).__name__,
        "types": sorted({str(p.dtype) for p in model.model.diffusion_model.blocks.parameters()}),
        "without_loader": nothing,
        "untouched": cached is model and routed is model,
        "said": [line for line in lines if line.startswith("6Bit: this ComfyUI")],
    }


def format_names() -> dict[str, str]:
    """The host's table of number formats, which is no business of ours."""
    from comfy.quant_ops import QUANT_ALGOS

    return {name: repr(entry) for name, entry in QUANT_ALGOS.items()}


def _loads_quantized() -> bool:
    checkpoint = pack("sixbit_core.checkpoint").open_checkpoint(ARGUMENTS["quantized"])
    model = pack("nodes.host_contract").load_or_plain(
        checkpoint, pack("nodes.scales").scales_of(checkpoint), False
    )
    return pack("nodes.bridge").facts_of(model).quantized


def main() -> None:
    importlib.import_module("nodes")
    formats = format_names()
    ids = registered()
    contract = pack("nodes.host_contract")
    answer(
        ids=ids,
        mismatches=all_mismatches(contract),
        unnoticed=probe_each(contract),
        after=all_mismatches(contract),
        schemas=schemas(),
        parts=without_a_part(contract),
        unknown=on_an_unknown_host(contract),
        same_formats=_loads_quantized() and format_names() == formats,
    )


with torch.inference_mode():
    main()
