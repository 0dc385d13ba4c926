"""Every number format that this host knows: a file in it made by the host, read by the host and by us."""

from boot import ARGUMENTS, pack  # isort: split

import json
from pathlib import Path

import comfy.ops
import comfy.sd
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from graph import CHECKS, LOAD, load, run_checks, sample
from safetensors.torch import load_file, save_file

FOLDER = Path(ARGUMENTS["folder"])
SOURCE = load_file(FOLDER / "tiny.safetensors")
LAYERS = ("blocks.0.q", "blocks.1.ff_out", "blocks.1.norm1.linear", "patch_embed.text_proj")
OPEN = pack("sixbit_core.checkpoint").open_checkpoint
INSPECT = pack("sixbit_core.inspect").inspect_checkpoint
ROWS = {"per_channel": True}
CASES = {  # name -> format, how the host is told to quantize
    "int8_tensorwise": ("int8_tensorwise", {}),
    "int8_rowwise": ("int8_tensorwise", ROWS),
    "int8_convrot": ("int8_tensorwise", {**ROWS, "convrot": True, "convrot_groupsize": 64}),
    "float8_e4m3fn": ("float8_e4m3fn", {"scale": "recalculate"}),
    "float8_e5m2": ("float8_e5m2", {"scale": "recalculate"}),
    "nvfp4": ("nvfp4", {}),
    "mxfp8": ("mxfp8", {}),
    "convrot_w4a4": ("convrot_w4a4", {"convrot_groupsize": 64}),
    "asym_w4a8_int8": ("asym_w4a8_int8", {"convrot_groupsize": 64}),
}


def layers_of(kind: str) -> tuple[str, ...]:
    """Those whose width the format can take. Of an NVFP4 text projection the host takes half the width."""
    if kind == "nvfp4":
        return (*LAYERS[:-1], "time_embedding_linear_2")
    rotated = "convrot" in kind or "w4a8" in kind
    return tuple(name for name in LAYERS if not rotated or SOURCE[f"{name}.weight"].shape[1] % 64 == 0)


def quantized(kind: str, layers: tuple[str, ...] = ()) -> dict[str, torch.Tensor]:
    """The file's tensors, some layers as the host's own Linear gives them to be saved."""
    name, told = CASES[kind]
    state = dict(SOURCE)
    operations = comfy.ops.mixed_precision_ops({}, torch.bfloat16)
    for layer in layers or layers_of(kind):
        weight, bias = state.pop(f"{layer}.weight"), state.pop(f"{layer}.bias")
        linear = operations.Linear(*weight.shape[::-1], dtype=torch.bfloat16)
        made = QuantizedTensor.from_float(weight, QUANT_ALGOS[name]["comfy_tensor_layout"], **told)
        linear.weight, linear.quant_format = torch.nn.Parameter(made, requires_grad=False), name
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
        state.update(
            {key: tensor.contiguous() for key, tensor in linear.state_dict(prefix=f"{layer}.").items()}
        )
    return state


def older(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same as files of before `comfy_quant` had it."""
    old = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
    for name, tensor in state.items():
        if not name.endswith(".comfy_quant"):
            old[name.replace(".weight_scale", ".scale_weight")] = tensor
    return old


def listed(state: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The same with its marks in the header alone."""
    layers = {
        name.removesuffix(".comfy_quant"): json.loads(tensor.numpy().tobytes())
        for name, tensor in state.items()
        if name.endswith(".comfy_quant")
    }
    rest = {name: tensor for name, tensor in state.items() if not name.endswith(".comfy_quant")}
    return rest, {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def compared(name: str, layers: tuple[str, ...]) -> dict | str:
    """What our loader says against it; else where our reading differs from the host's."""
    refused = LOAD.SixBitLoadCogVideoX.validate_inputs(name, "as stored")
    if refused is not True:
        return refused
    host = comfy.sd.load_diffusion_model(str(FOLDER / name)).model.diffusion_model
    model, checkpoint = load(name), OPEN(FOLDER / name)
    network, different = model.model.diffusion_model, []
    for layer in layers:
        theirs = host.get_submodule(layer).weight.dequantize().bfloat16()
        own = network.get_submodule(layer)
        ours = own.weight
        if layer in checkpoint.formats:
            ours = own.convert_weight(own.weight)
        if not torch.equal(theirs, ours.bfloat16()):
            different.append(layer)
    formats = {
        kind: row["layers"] for kind, row in INSPECT(FOLDER / name)["formats"].items() if row["layers"]
    }
    copy = load(name, "6-bit").model_size() < model.model_size() or checkpoint.is_quantized
    finite = bool(torch.isfinite(sample(model, steps=2, size=(3, 8, 12))).all())
    return {"different": different, "formats": formats, "copy": copy, "finite": finite}


def check_of(kind: str):
    def check() -> dict | str:
        save_file(quantized(kind), FOLDER / f"{kind}.safetensors")
        return compared(f"{kind}.safetensors", layers_of(kind))

    return check


def scaled_fp8() -> dict | str:
    save_file(older(quantized("float8_e4m3fn")), FOLDER / "old.safetensors")
    return compared("old.safetensors", LAYERS)


def marked_in_the_header() -> dict | str:
    state, metadata = listed(quantized("int8_rowwise"))
    save_file(state, FOLDER / "listed.safetensors", metadata)
    return compared("listed.safetensors", LAYERS)


def nvfp4_patch_embedding() -> bool:
    """What the host itself cannot load: it casts the text to the type of this weight."""
    save_file(quantized("nvfp4", ("patch_embed.text_proj",)), FOLDER / "patch.safetensors")
    model, checkpoint = load("patch.safetensors"), OPEN(FOLDER / "patch.safetensors")
    ours = model.model.diffusion_model.patch_embed.text_proj.weight
    same = torch.equal(
        ours.float(), checkpoint.quantized("patch_embed.text_proj").dequantize(ours.dtype).float()
    )
    return same and bool(torch.isfinite(sample(model, steps=2)).all())


def all_are_tried() -> list[str]:
    return sorted(set(QUANT_ALGOS) - {name for name, _ in CASES.values()})


CHECKS.update({kind: check_of(kind) for kind in CASES})
for function in (scaled_fp8, marked_in_the_header, nvfp4_patch_embedding, all_are_tried):
    CHECKS[function.__name__] = function
run_checks()
