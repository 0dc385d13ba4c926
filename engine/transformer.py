"""Build a diffusers CogVideoX transformer from a checkpoint, in full precision or with NVFP4 weights.

It is built on the meta device and filled tensor by tensor, so a quantized file never has a 16-bit copy in
memory. A sincos table comes first: making one takes several times its bytes for a moment (0.5 GB on the 2B).

On a GPU the NVFP4 weights of the adaLN linears (14 % of the 5B's parameters) wait in pinned host memory and
are read from there at each call: 0.42 GiB less there on the 5B, for 0.45 GB over the bus an evaluation and
up to 0.8 GB of host memory, since PyTorch pins powers of two. A table of their outputs would hold more (0.14
GiB a row of the batch for 50 steps), and a step seldom comes twice.
"""

from collections.abc import Iterator
from functools import partial

import torch
from diffusers import CogVideoXTransformer3DModel
from torch import nn

from ..sixbit_core.quantize import QuantizeConfig, copied_dtype, layer_groups, quantize_tensors
from ..sixbit_core.quantized import BLOCK, QuantizedWeight
from .errors import InputError
from .facts import ModelFacts
from .linears import QuantizedLinear, waiting

FULL = "full"  # the weights as stored; other names are methods of quantizing: "search", "rtn"


def build_transformer(
    facts: ModelFacts, weights: str, device: torch.device, dtype: torch.dtype
) -> CogVideoXTransformer3DModel:
    """The transformer of `facts`.

    Args:
        weights: "full", or how to quantize a 16-bit source ("search", "rtn"); a file that is quantized
            already is taken as it is.
        device: where it will stay.
        dtype: of everything that is not NVFP4.

    Raises:
        InputError: if full precision is asked of a quantized file, a tensor is missing, or one has not the
            shape that the configuration gives it.
        CheckpointError: if a tensor cannot be read or quantized.
    """
    if weights == FULL and facts.checkpoint.is_quantized:
        raise InputError(f"{facts.name} is quantized; full precision needs the source it was made from")
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel.from_config(facts.config)
    _fill_tables(model, facts, device, dtype)
    tensors, quantized = _read(facts, weights, device)
    _complete(facts, tensors, dtype, device)
    _check_shapes(model, facts, tensors, quantized)
    for path, weight in quantized.items():  # a bias stays as stored: it is added in float32 whatever it is
        _put(model, path, QuantizedLinear(weight, tensors.pop(f"{path}.bias", None)))
    _fill(model, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    left = [name for name, tensor in _tensors(model) if tensor.is_meta]
    if left:
        raise InputError(f"{facts.name} lacks {left[0]} ({len(left)} tensors in all); is the download whole?")
    return model.eval().requires_grad_(False)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of everything the transformer keeps loaded on its device, parameters and buffers."""
    device = next(model.parameters()).device
    return sum(tensor.nbytes for _, tensor in _tensors(model) if tensor.device == device)


def expected_weight_bytes(facts: ModelFacts, weights: str, device: torch.device, dtype: torch.dtype) -> int:
    """What `weight_bytes` will be of the transformer that `build_transformer` makes of the same arguments."""
    checkpoint, family, layers = facts.checkpoint, facts.family, ()
    if weights != FULL:
        made = (layer for group, _ in layer_groups(family) for layer in group)
        layers = tuple(checkpoint.formats) or tuple(made)
    stored = checkpoint.dtype if checkpoint.is_quantized else partial(copied_dtype, checkpoint)
    waits = _waiting_layers(facts, device)
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel.from_config(facts.config)
    elements = {name: tensor.numel() for name, tensor in _tensors(model)}
    total = 0
    for layer in layers:
        path = family.to_diffusers(layer)
        values, bias = elements.pop(f"{path}.weight"), elements.pop(f"{path}.bias", 0)
        total += 4 if layer in waits else 4 + values // 2 + values // BLOCK
        total += bias and bias * stored(f"{layer}.bias").itemsize
    return total + sum(elements.values()) * dtype.itemsize


def full_precision_bytes(facts: ModelFacts) -> int:
    """Bytes of the same transformer with every weight in 16 bits, whatever it is stored in."""
    with torch.device("meta"):
        model = CogVideoXTransformer3DModel.from_config(facts.config)
    return sum(2 * tensor.numel() for _, tensor in _tensors(model))


def _read(
    facts: ModelFacts, weights: str, device: torch.device
) -> tuple[dict[str, torch.Tensor], dict[str, QuantizedWeight]]:
    """Tensors as stored and quantized weights, by diffusers name, where they will stay."""
    tensors, quantized = {}, {}
    waits = _waiting_layers(facts, device)
    for name, value in _items(facts, weights, device):
        if isinstance(value, QuantizedWeight):
            placed = waiting(value, device) if name in waits else value.to(device)
            quantized[facts.family.to_diffusers(name)] = placed
        else:
            tensors[facts.family.to_diffusers(name)] = value.to(device)
    return tensors, quantized


def _waiting_layers(facts: ModelFacts, device: torch.device) -> frozenset[str]:
    """Native names of the layers whose quantized weights stay in host memory."""
    return frozenset(() if device.type == "cpu" else facts.family.modulation_layers())


def _items(
    facts: ModelFacts, weights: str, device: torch.device
) -> Iterator[tuple[str, QuantizedWeight | torch.Tensor]]:
    """Layers and tensors by native name, as stored or quantized now."""
    checkpoint = facts.checkpoint
    if weights != FULL and not checkpoint.is_quantized:
        yield from quantize_tensors(checkpoint, QuantizeConfig(method=weights), device=device)
        return
    weight_names = {f"{layer}.weight" for layer in checkpoint.formats}
    yield from ((layer, checkpoint.quantized(layer)) for layer in checkpoint.formats)
    yield from ((name, checkpoint.tensor(name)) for name in checkpoint.shapes if name not in weight_names)


def _complete(
    facts: ModelFacts, tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    """Leave out a stored sincos table, which is computed for the size; give a 1.5 its patch bias of 0."""
    if not facts.config["use_learned_positional_embeddings"]:
        tensors.pop("patch_embed.pos_embedding", None)
    if facts.config["patch_size_t"] and "patch_embed.proj.bias" not in tensors:
        tensors["patch_embed.proj.bias"] = torch.zeros(facts.width, dtype=dtype, device=device)


def _check_shapes(
    model: nn.Module,
    facts: ModelFacts,
    tensors: dict[str, torch.Tensor],
    quantized: dict[str, QuantizedWeight],
) -> None:
    """Raise InputError for the first tensor that the model has no place of that shape for."""
    places = {name: tuple(tensor.shape) for name, tensor in _tensors(model)}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    found |= {f"{path}.weight": (w.out_features, w.in_features) for path, w in quantized.items()}
    for name, shape in found.items():
        if places.get(name) != shape:
            place = f"needs {list(places[name])}" if name in places else "has no such tensor"
            raise InputError(
                f"{facts.name}: {name} is {list(shape)}, and the model that its configuration and "
                f"{facts.folder.name} describe {place}; give weights and pipeline folder of one model"
            )


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _fill(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        if leaf in module._buffers:
            module._buffers[leaf] = tensor
        else:
            setattr(module, leaf, nn.Parameter(tensor, requires_grad=False))


def _fill_tables(model: nn.Module, facts: ModelFacts, device: torch.device, dtype: torch.dtype) -> None:
    """A buffer that no file holds (the sincos position table) comes from a real model without blocks."""
    names = [name for name, _ in model.named_buffers()]
    if not names or facts.config["use_learned_positional_embeddings"]:  # a learned table is in the file
        return
    shell = CogVideoXTransformer3DModel.from_config({**facts.config, "num_layers": 0})
    own = dict(shell.named_buffers())
    _fill(model, {name: own[name].to(device, dtype) for name in names})


def _tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
