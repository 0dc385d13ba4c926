"""A compatible file through the stock host's own loader; the pack is only asked what should come out."""

from boot import ARGUMENTS, answer, pack  # isort: split

import comfy.sd
import torch

model = comfy.sd.load_diffusion_model(ARGUMENTS["file"])
checkpoint = pack("sixbit_core.checkpoint").open_checkpoint(ARGUMENTS["file"])
different, packed = [], 0
for name, weight in model.model.diffusion_model.state_dict().items():
    layer, _, part = name.rpartition(".")
    if layer in checkpoint.formats and part == "weight":
        packed += 1
        host = model.model.diffusion_model.get_submodule(layer).weight.dequantize()
        if not torch.allclose(host.float(), checkpoint.quantized(layer).dequantize(), rtol=2**-7, atol=1e-6):
            different.append(name)
    elif name in checkpoint.shapes and not torch.equal(weight.float(), checkpoint.tensor(name).float()):
        different.append(name)
answer(kind=type(model.model).__name__, packed=packed, different=different)
