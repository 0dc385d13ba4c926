"""LoRAs beside 6-bit and 16-bit weights; every check of `test_lora` is one entry of the answer."""

from boot import ARGUMENTS, answer, pack  # isort: split

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import torch
from comfy_api.torch_helpers import set_torch_compile_wrapper
from safetensors.torch import save_file

import nodes

FOLDER = Path(ARGUMENTS["folder"])
folder_paths.folder_names_and_paths["diffusion_models"] = ([str(FOLDER)], {".safetensors"})
folder_paths.folder_names_and_paths["loras"] = ([str(FOLDER / "loras")], {".safetensors"})
LOAD = pack("nodes.load").SixBitLoadCogVideoX
LORA = pack("nodes.lora").SixBitLoadLora
TDC = pack("nodes.delta_cache").SixBitTemporalDeltaCache
DMPQ = pack("nodes.dmpq").SixBitApplyDMPQ
BRANCHES = pack("nodes.branches")
SWAP = pack("nodes.swap")
TO_DIFFUSERS = pack("sixbit_core.families").FAMILIES["cogvideox-small"].to_diffusers
LINES: list[str] = []
CHECKS: dict[str, Callable[[], object]] = {}
FUSED = ("blocks.0.q", "blocks.0.attn_out", "blocks.1.ff_proj")  # that a block of ours computes
LAYERS = (*FUSED, "blocks.1.norm1.linear", "proj_out")


class _Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        LINES.append(record.getMessage())


def check(function: Callable[[], object]) -> Callable[[], object]:
    CHECKS[function.__name__] = function
    return function


def load(weights: str = "6-bit") -> object:
    return LOAD.execute("tiny/", weights).args[0]


def lora(model: object, name: str = "a.safetensors", strength: float = 1.0) -> object:
    return LORA.execute(model, name, strength).args[0]


def text(seed: int) -> list:
    return [[torch.randn((1, 16, 32), generator=torch.Generator().manual_seed(seed)), {}]]


def sample(model: object, steps: int = 4, cfg: float = 6.0) -> torch.Tensor:
    latent = {"samples": torch.zeros(1, 4, 3, 8, 12)}
    texts = text(1), text(2)
    return nodes.common_ksampler(model, 0, steps, cfg, "euler", "simple", *texts, latent)[0]["samples"]


def predict(model: object) -> torch.Tensor:
    """What one evaluation of the positive text makes of the noise."""
    return sample(model, 1, 1.0)


def pairs(seed: int, rank: int = 4, size: float = 0.15) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    sizes = BRANCHES.linears_of(load("as stored").model.diffusion_model)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in LAYERS:
        rows, columns = sizes[name]
        found[name] = (
            torch.randn((rank, columns), generator=generator) * size,
            torch.randn((rows, rank), generator=generator) * size,
        )
    return found


def write(
    name: str, naming: Callable[[str, str], str], seed: int = 3, layers: tuple[str, ...] = LAYERS
) -> None:
    tensors = {}
    for layer, (down, up) in pairs(seed).items():
        if layer in layers:
            tensors[naming(layer, "A")], tensors[naming(layer, "B")] = down, up
    save_file(tensors, FOLDER / "loras" / name)


def native(layer: str, part: str) -> str:
    return f"diffusion_model.{layer}.lora_{part}.weight"


def diffusers(layer: str, part: str) -> str:
    return f"transformer.{TO_DIFFUSERS(layer)}.lora_{part}.weight"


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) and bool(torch.isfinite(a).all())


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def clean(model: object) -> bool:
    own = [module.__dict__ for module in model.model.diffusion_model.modules()]
    return not any({"forward", "product", "branch"} & set(names) for names in own)


@check
def effect_beside_each_linear_is_that_of_the_file() -> list[str]:
    bad = []
    for weights in ("6-bit", "as stored"):
        model = load(weights)
        network = model.model.diffusion_model
        branches = lora(model, strength=0.7).model_options["transformer_options"][BRANCHES.KEY]
        for name, (down, up) in pairs(3).items():
            module = network.get_submodule(name)
            types = (torch.float32, torch.bfloat16) if hasattr(module, "hadamard") else (torch.float32,)
            for dtype in types:
                x = torch.randn((2, 50, module.in_features), generator=torch.Generator().manual_seed(1)).to(
                    dtype
                )
                before = module(x)
                with BRANCHES._beside(network, branches):
                    found = module(x) - before
                expected = 0.7 * x.float() @ down.T @ up.T
                if not relative(found.float(), expected) < 0.02:
                    bad.append(f"{weights} {name} {dtype}: {relative(found.float(), expected):.4f} apart")
        if not clean(model):
            bad.append("something is left")
    return bad


@check
def effect_on_the_model_is_that_of_full_precision() -> float:
    effects = []
    for weights in ("6-bit", "as stored"):
        model = load(weights)
        effects.append(predict(lora(model)) - predict(model))
    return float(effects[0].norm() / effects[1].norm())


@check
def strength_zero_is_no_lora() -> bool:
    model = load()
    return lora(model, strength=0.0) is model and equal(sample(lora(model, strength=0.0)), sample(model))


@check
def base_a_b_off_base() -> list[str]:
    bad = []
    for weights in ("6-bit", "as stored"):
        model = load(weights)
        base = sample(model)
        one, two = sample(lora(model)), sample(lora(lora(model), "b.safetensors"))
        if equal(one, base) or equal(one, two):
            bad.append(f"{weights}: no effect")
        if not equal(sample(model), base) or not equal(sample(lora(model)), one) or not clean(model):
            bad.append(f"{weights}: it keeps acting")
        other = sample(lora(lora(model, "b.safetensors")))
        halves = sample(lora(lora(model, strength=0.5), strength=0.5))
        if not relative(other, two) < 1e-4 or not relative(halves, one) < 1e-4:
            bad.append(f"{weights}: {relative(other, two):.2g}, {relative(halves, one):.2g} apart")
    return bad


@check
def any_order_of_nodes_gives_the_same() -> list[str]:
    bad, model = [], load()
    steps: dict[str, Callable[[object], object]] = {
        "lora": lora,
        "dmpq": lambda m: DMPQ.execute(m, "balanced", router="int8").args[0],
        "cache": lambda m: TDC.execute(m, "balanced", threshold=0.9, start=0.1).args[0],
    }
    without = sample(steps["cache"](steps["dmpq"](model)), 8)
    outs = {}
    for order in itertools.permutations(steps):
        changed = model
        for name in order:
            changed = steps[name](changed)
        outs[order] = sample(changed, 8)
    first = next(iter(outs.values()))
    bad += [f"{order} differs" for order, out in outs.items() if not equal(out, first)]
    if not relative(first, without) > 0.01:
        bad.append(f"effect {relative(first, without)}")
    return bad


@check
def beside_a_fused_block_it_is_as_strong() -> list[str]:
    model, effects, fused = load(), [], []
    for base in (DMPQ.execute(model, "balanced", router="int8").args[0], model):
        blocks: list[object] = []
        own = SWAP.block_forward
        SWAP.block_forward = lambda *a, own=own, blocks=blocks: blocks.append(a[1]) or own(*a)
        try:
            effects.append(predict(lora(base, "fused.safetensors")) - predict(base))
        finally:
            SWAP.block_forward = own
        fused.append(len(blocks))
    strength = float(effects[0].norm() / effects[1].norm())
    right = fused == [4, 0] and abs(strength - 1) < 0.02 and relative(*effects) < 0.05
    return [] if right else [f"{fused} fused blocks, {strength} as strong, {relative(*effects)} apart"]


@check
def every_naming_gives_the_same() -> list[str]:
    def flat(layer: str, part: str) -> str:
        return (
            f"lora_unet_{TO_DIFFUSERS(layer).replace('.', '_')}.lora_{'down' if part == 'A' else 'up'}.weight"
        )

    namings = {
        "peft": lambda layer, part: f"base_model.model.{TO_DIFFUSERS(layer)}.lora_{part}.weight",
        "kohya": flat,
        "comfyui": native,
    }
    model = load()
    expected, bad = predict(lora(model)), []
    for name, naming in namings.items():
        write(f"{name}.safetensors", naming)
        if not equal(predict(lora(model, f"{name}.safetensors")), expected):
            bad.append(name)
    return bad


@check
def hosts_bypass_loader_acts_and_leaves() -> list[str]:
    bad = []
    for name, settle in {
        "activations as they come": lambda m: TDC.execute(m, "balanced").args[0],
        "int8": lambda m: DMPQ.execute(m, "balanced", router="int8").args[0],
    }.items():
        model = load()
        base, ours = predict(settle(model)), predict(lora(settle(model), "fused.safetensors"))
        tensors = comfy.utils.load_torch_file(str(FOLDER / "loras" / "fused.safetensors"))
        bypassed, _ = comfy.sd.load_bypass_lora_for_models(settle(model), None, tensors, 1.0, 0.0)
        if not relative(predict(bypassed) - base, ours - base) < 0.02:
            bad.append(f"{name}: effect {relative(predict(bypassed) - base, ours - base):.3f} apart")
        if not equal(predict(settle(model)), base):
            bad.append(f"{name}: it keeps acting")
    return bad


@check
def what_does_not_match_is_counted_and_said() -> list[str]:
    tensors = {
        "text_encoder.a.lora_A.weight": torch.zeros(4, 4),
        "text_encoder.a.lora_B.weight": torch.zeros(4, 4),
    }
    for layer, (down, up) in pairs(3).items():
        tensors[diffusers(layer, "A")], tensors[diffusers(layer, "B")] = down, up
    save_file(tensors, FOLDER / "loras" / "more.safetensors")
    LINES.clear()
    lora(load(), "more.safetensors")
    return [line for line in LINES if "more.safetensors" in line]


@check
def wrong_use_is_one_line() -> list[str]:
    save_file({"lora_te_x.lora_down.weight": torch.zeros(4, 4)}, FOLDER / "loras" / "none.safetensors")
    (FOLDER / "loras" / "cut.safetensors").write_bytes((FOLDER / "loras" / "a.safetensors").read_bytes()[:-8])
    other = SimpleNamespace(model_options={}, model=SimpleNamespace(diffusion_model=torch.nn.Linear(2, 2)))
    said = [LORA.validate_inputs("cut.safetensors"), LORA.validate_inputs("gone")]
    for model, name in ((load(), "none.safetensors"), (other, "a.safetensors")):
        try:
            lora(model, name)
            said.append("no error")
        except ValueError as error:
            said.append(str(error))
    return said


@check
def interrupting_leaves_nothing() -> list[str]:
    model, bad = load(), []
    changed, interrupted = lora(model), comfy.model_management.InterruptProcessingException
    before = sample(changed)
    block = type(model.model.diffusion_model.blocks[0])
    own = block.forward

    def bomb(*args: object, **kwargs: object) -> None:
        raise interrupted()

    block.forward = bomb
    try:
        sample(changed)
        bad.append("not interrupted")
    except interrupted:
        pass
    finally:
        block.forward = own
    if not clean(model):
        bad.append("something is left")
    if not equal(sample(changed), before):
        bad.append("the next run differs")
    return bad


@check
def offloaded_weights_give_the_same() -> list[str]:
    bad, outs, device = [], [], torch.device("cpu")
    changed = lora(load())
    for memory in (0, 20_000):
        comfy.model_management.unload_all_models()
        changed.load(device, lowvram_model_memory=memory, full_load=not memory)
        offloaded = sum(hasattr(m, "prev_comfy_cast_weights") for m in changed.model.modules())
        if bool(offloaded) != bool(memory):
            bad.append(f"{offloaded} modules offloaded")
        x = torch.randn((1, 4, 3, 8, 12), generator=torch.Generator().manual_seed(5))
        network = changed.model.diffusion_model
        with BRANCHES._beside(network, changed.model_options["transformer_options"][BRANCHES.KEY]):
            outs.append(network(x, torch.full((1,), 501.0), text(1)[0][0]))
        changed.detach()
    if not equal(*outs):
        bad.append(f"{relative(*outs)} apart")
    return bad


@check
def model_stays_known() -> bool:
    model = load()
    facts = pack("nodes.bridge").facts_of
    return facts(lora(model)) is facts(model) and facts(model) is not None


def compiled_models_run_it() -> list[float]:
    """Errors of compiled models with other strengths in turn, the LoRA after and before compiling."""
    model = load()
    compiled = model.clone()
    set_torch_compile_wrapper(model=compiled, backend="eager")
    last = lora(model)
    set_torch_compile_wrapper(model=last, backend="eager")
    tried = (
        (compiled, model),
        (lora(compiled), lora(model)),
        (lora(compiled, strength=0.3), lora(model, strength=0.3)),
    )
    return [
        relative(sample(found), sample(plain))
        for found, plain in (*tried, (compiled, model), (last, lora(model)))
    ]


def main() -> None:
    logging.getLogger().addHandler(_Listener())
    logging.getLogger().setLevel(logging.INFO)
    (FOLDER / "loras").mkdir()
    write("a.safetensors", diffusers, 3)
    write("b.safetensors", diffusers, 4)
    write("fused.safetensors", native, 3, FUSED)
    if ARGUMENTS.get("compiled"):
        answer(errors=compiled_models_run_it())
        return
    results = {}
    for name, function in CHECKS.items():
        try:
            results[name] = function()
        except Exception as error:
            logging.exception(name)
            results[name] = f"{type(error).__name__}: {error}"
    answer(results=results)


with torch.inference_mode():
    main()
