"""Registering with the optional libraries absent; then each seam of the host broken in turn."""

from boot import ARGUMENTS, answer, block, pack  # isort: split

import asyncio
import enum
import importlib
import inspect
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

GONE = object()
ABSENT = ("diffusers", "triton", "transformers")


def registered() -> list[str]:
    """The host is up, and has what it needs itself; the libraries go, then the pack is loaded."""
    blocker = block(*ABSENT)
    try:
        extension = asyncio.run(sys.modules[pack("nodes").__package__.rpartition(".")[0]].comfy_entrypoint())
        return [node.GET_SCHEMA().node_id for node in asyncio.run(extension.get_node_list())]
    finally:
        sys.meta_path.remove(blocker)


def all_mismatches(contract: object) -> list[str]:
    return contract.mismatches(contract.EVERY_SEAM)


@contextmanager
def changed(owner: object, name: str, value: object) -> Iterator[None]:
    """Something of the host replaced, or taken away for GONE, inside the block."""
    own = inspect.getattr_static(owner, name)
    inherited = isinstance(owner, type) and name not in vars(owner)
    if value is GONE:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def opened() -> tuple:
    checkpoint = pack("sixbit_core.checkpoint").open_checkpoint(ARGUMENTS["quantized"])
    return checkpoint, pack("nodes.scales").scales_of(checkpoint)


@contextmanager
def said() -> Iterator[list[str]]:
    """What is said of this host inside the block."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger().removeHandler(handler)
        lines[:] = [line for line in lines if line.startswith("6Bit: this ComfyUI")]


@contextmanager
def unset(kind: type, name: str) -> Iterator[None]:
    """The methods of a class call the attribute otherwise inside the block."""
    before = {}
    for method in (method for base in kind.__mro__ for method in vars(base).values()):
        code = getattr(method, "__code__", None)
        if code is not None and name in code.co_names:
            before[method] = code
            others = tuple(f"{used}_" if used == name else used for used in code.co_names)
            method.__code__ = code.replace(co_names=others)
    try:
        yield
    finally:
        for method, code in before.items():
            method.__code__ = code


def source_without(seam: object, module: object) -> str:
    """The source of a module; of that of a seam without its key."""
    text = inspect.getsource(module)
    return text.replace(seam.name, "") if module.__name__ == seam.module else text


def probe_each(contract: object) -> list[str]:
    """Seams whose loss or other signature goes unnoticed, or is no reason for a plain MODEL and one line that
    names it. What a base class has in the place of a seam serves as well."""
    unnoticed = []
    checkpoint, scales = opened()

    def notices(seam: object, how: str) -> None:
        if not any(seam.name in line for line in contract.mismatches(contract.EVERY_SEAM)):
            unnoticed.append(f"{seam.module}.{seam.name} {how}")
        if seam not in contract.SEAMS:
            return
        with changed(contract, "_plain", lambda checkpoint: "plain"), said() as lines:
            model = contract.load_or_plain(checkpoint, scales, False)
        if model != "plain" or len(lines) != 1 or seam.name not in lines[0] or "in bf16" not in lines[0]:
            unnoticed.append(f"{seam.module}.{seam.name} {how}: {model}, {lines}")

    for seam in contract.EVERY_SEAM:
        if seam.name.startswith('"'):
            with changed(contract, "_source", partial(source_without, seam)):
                notices(seam, "gone")
            continue
        owner = importlib.import_module(seam.module)
        *path, leaf = seam.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        if not hasattr(owner, leaf):  # what objects of a class have
            with unset(owner, leaf):
                notices(seam, "gone")
            continue
        if seam.parameters:
            with changed(owner, leaf, lambda renamed: None):
                notices(seam, "with another signature")
        if isinstance(owner, enum.EnumMeta) or (isinstance(owner, type) and leaf not in vars(owner)):
            continue
        with changed(owner, leaf, GONE):
            if not hasattr(owner, leaf):
                notices(seam, "gone")
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
    for node in pack("nodes.extension").registered():
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

    checkpoint, scales = opened()
    with changed(comfy.ops, "cast_bias_weight", lambda s, input: None), said() as lines:
        model = contract.load_or_plain(checkpoint, scales, False)
        nothing = without_the_hosts_loader(checkpoint, scales, contract)
        cached = pack("nodes.delta_cache").SixBitTemporalDeltaCache.execute(model, "balanced").args[0]
        routed = pack("nodes.dmpq").SixBitApplyDMPQ.execute(model, "balanced").args[0]
    return {
        "kind": type(model.model).__name__,
        "types": sorted({str(p.dtype) for p in model.model.diffusion_model.blocks.parameters()}),
        "without_loader": nothing,
        "untouched": cached is model and routed is model,
        "said": lines,
    }


def format_names() -> dict[str, str]:
    """The host's table of number formats, which is no business of ours."""
    from comfy.quant_ops import QUANT_ALGOS

    return {name: repr(entry) for name, entry in QUANT_ALGOS.items()}


def _loads_quantized() -> bool:
    model = pack("nodes.host_contract").load_or_plain(*opened(), False)
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
