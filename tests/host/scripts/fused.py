"""Which attention fused blocks take, and what a run with them is said to need; every check is one entry of
the answer. The 5B is of true size without its weights, on the meta device."""

from boot import pack  # isort: split

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import comfy.ldm.cogvideo.model as cogvideo
import comfy.ldm.modules.attention as attention
import comfy.model_base
import comfy.model_patcher
import comfy.ops
import torch
from comfy_api.torch_helpers.torch_compile import TORCH_COMPILE_KWARGS
from graph import BRIDGE, DMPQ, STEPS, cached, check, load, relative, report, run_checks, sample

RUN, MEMORY, LOADING, MODEL = (pack(f"nodes.{name}") for name in ("run", "memory", "loading", "model"))
SETTINGS, RESERVE, LORAS = pack("nodes.settings"), pack("nodes.reserve"), pack("nodes.branches").KEY
CONFIG, FAMILIES, KERNELS = (
    pack(name) for name in ("sixbit_core.config", "sixbit_core.families.cogvideox", "kernels")
)
SCALES = pack("nodes.scales")
INT8 = CONFIG.DMPQConfig(router="int8", purified_refresh=False)
TOKENS, WIDTH, BLOCKS = 226 + 13 * 30 * 45, 3072, 42
HIDDEN = TOKENS * WIDTH * 2
SHAPE = (1, 16, 13, 60, 90)
MEASURED = 1_040_746_236  # bytes beside weights and residuals in benchmarks/results/comfyui-5b.json


def held(times: float, hidden: int = HIDDEN, width: int = WIDTH) -> int:
    """Bytes of so many times the hidden states of one stream, of those that the host holds, and of casts."""
    return int(times * hidden) + hidden + 8 * width**2


@contextmanager
def put(owner: object, **values: object) -> Iterator[None]:
    """Attributes of something, for the duration of a block."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def counted(seen: list, function: Callable) -> Callable:
    """The function, with a note of each call."""

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        seen.append(function)
        return function(*args, **kwargs)

    return call


@check
def attention_is_torchs_where_the_hosts_is_that_alone() -> list[str]:
    bad, model = [], load("tiny/", "6-bit")
    plain, calls = attention.attention_pytorch, []
    another = counted(calls, plain)  # its name and module are those of the host's
    with put(cogvideo, optimized_attention=plain):
        expected = sample(model, steps=2)

    def overrides(own: Callable, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(own)
        return own(*args, **kwargs)

    for name, function, override in (
        ("plain", plain, None),
        ("split", counted(calls, attention.attention_split), None),
        ("sub-quad", counted(calls, attention.attention_sub_quad), None),
        ("sage or xformers", another, None),
        ("plain and an override", plain, overrides),
    ):
        places = (attention, cogvideo) if function is another else (cogvideo,)  # all that a pack may change
        fast = cached(model, threshold=0.0).clone()
        if override is not None:
            fast.model_options["transformer_options"]["optimized_attention_override"] = override
        of_the_host, of_torch = [], []
        functional = torch.nn.functional
        products = counted(of_torch, functional.scaled_dot_product_attention)
        through = counted(of_the_host, comfy.ops.scaled_dot_product_attention)
        calls.clear()
        with ExitStack() as held:
            held.enter_context(put(cogvideo, optimized_attention=function))
            if attention in places:
                held.enter_context(put(attention, attention_pytorch=function))
            held.enter_context(put(functional, scaled_dot_product_attention=products))
            held.enter_context(put(comfy.ops, scaled_dot_product_attention=through))
            out = sample(fast, steps=2)
        blocks = 2 * report(fast).evaluations
        ours = name == "plain"
        if len(calls) != (0 if ours else blocks):
            bad.append(f"{name}: {len(calls)} calls of what stands there for {blocks} blocks")
        if ours and (len(of_torch) != blocks or of_the_host):
            bad.append(f"{name}: {len(of_torch)} calls of torch's, {len(of_the_host)} through the host")
        if not relative(out, expected) < 1e-5:
            bad.append(f"{name}: {relative(out, expected)} apart")
    return bad


@functools.cache
def five(quantized: bool = True) -> comfy.model_patcher.ModelPatcher:
    """The 5B, without a byte of its weights."""
    of = next(family for family in FAMILIES.PUBLISHED if family.name == "cogvideox-5b")
    shapes = of.tensor_shapes()
    rotated, layers = set(of.block_layers()), {}
    for layer in (*of.block_layers(), *of.modulation_layers()):
        rows, columns = shapes[f"{layer}.weight"]
        layers[layer] = (rows, columns), KERNELS.hadamard_block_size(columns) if layer in rotated else 0
    config = {**SCALES._DEFAULTS, **of.diffusers_config(shapes)}
    plan = MODEL.ModelPlan(config, of.label, layers if quantized else {}, 1.0, False)
    model = LOADING._empty_model(plan, SCALES.Scales(1.0, 0.7), torch.bfloat16, None)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, cpu, cpu)


def guider(patcher: object, cfg: float = 6.0, text: int = 226, **options: object) -> types.SimpleNamespace:
    """What a sampling run begins from: two conditionings."""
    words = torch.empty(1, text, 4096, device="meta")
    conds = {name: [{"cross_attn": words}] for name in ("positive", "negative")}
    model_options = {"transformer_options": {}, **options}
    return types.SimpleNamespace(model_patcher=patcher, model_options=model_options, cfg=cfg, conds=conds)


def decided(of: object, dmpq: object = INT8, batch: int = 1, backend: str = "triton", plain: bool = True):
    """(active run, demand) of a run with the delta cache on a GPU whose INT8 products are by that backend."""
    seen = []
    own = attention.attention_pytorch if plain else attention.attention_sub_quad
    noise = torch.empty(batch, *SHAPE[1:], device="meta")
    settings = SETTINGS.Settings(dmpq, CONFIG.DeltaCacheConfig(location="gpu"))

    def keep(device, dmpq, cache, demand, free) -> str:
        seen.append(demand)
        return ""

    here = put(RUN, status_line=keep), put(MEMORY, int8_backend=lambda device: backend)
    with here[0], here[1], put(cogvideo, optimized_attention=own):
        run = RUN._deciding(of, settings, noise, None, torch.linspace(1, 0, 5))
    run.state.close()
    return run, seen[0]


def of_the_host(patcher: object, rows: int) -> int:
    """The host's own figure."""
    return int(comfy.model_base.BaseModel.memory_required(patcher.model, [rows, *SHAPE[1:]]))


@check
def the_5b_needs_what_was_measured() -> list[str]:
    bad = []
    run, demand = decided(guider(five()))
    if not 0.98 * MEASURED < demand.sampling < 1.02 * MEASURED:
        bad.append(f"{demand.sampling} where {MEASURED} was measured")
    if demand.sampling != held(7.9) or run.cache_bytes != 2 * BLOCKS * HIDDEN:
        bad.append(f"{demand}")
    return bad


@check
def needs_follow_the_batch_and_the_text() -> list[str]:
    bad, longer = [], (TOKENS + 226) * WIDTH * 2
    for name, of, batch, expected in (
        ("CFG 1", guider(five(), cfg=1.0), 1, held(5.9)),
        ("batch 2", guider(five()), 2, held(12)),
        ("batch 3", guider(five()), 3, held(18)),
        ("a longer text", guider(five(), text=452), 1, held(7.9, longer)),
    ):
        _, demand = decided(of, batch=batch)
        if demand.sampling != expected:
            bad.append(f"{name}: {demand.sampling / HIDDEN} times the hidden states")
    for change in ({"router": "nvfp4"}, {"router": "random"}, {"purified_refresh": True}):
        _, demand = decided(guider(five()), replace(INT8, **change))
        if demand.sampling != held(10.3):
            bad.append(f"{change}: {demand.sampling / HIDDEN}")
    lora = guider(five(), transformer_options={LORAS: ()})
    if decided(lora)[1].sampling != held(10.3):
        bad.append("a LoRA's inputs are not in INT8")
    return bad


@check
def a_model_as_it_is_needs_what_the_host_says() -> list[str]:
    bad, seen = [], []
    for quantized in (True, False):
        patcher = five(quantized)
        noise = torch.empty(SHAPE, device="meta")
        with put(RUN, status_line=lambda *args: seen.append(args[3]) or ""):
            run = RUN._counting(guider(patcher), noise)
        if run.blocks is not None or seen[-1].sampling != of_the_host(patcher, 2):
            bad.append(f"quantized {quantized}: {seen[-1]}")
        if patcher.model.memory_required([2, *SHAPE[1:]]) != of_the_host(patcher, 2):
            bad.append(f"quantized {quantized}: the planner is told something else")
    return bad


@check
def where_others_run_in_the_blocks_the_larger_figure_counts() -> list[str]:
    bad, full = [], int(26 * HIDDEN)
    override = {"transformer_options": {"optimized_attention_override": None}}
    patched, changed = five().clone(), five().clone()
    patched.add_object_patch("diffusion_model.blocks.3", five().model.diffusion_model.blocks[3])
    changed.patches = {"diffusion_model.blocks.0.q.weight": [None]}
    harmless = five().clone()
    harmless.add_object_patch("model_sampling", five().model.model_sampling)
    compiles = {TORCH_COMPILE_KWARGS: {"options": {}}}
    for name, ours, of, values in (
        ("an override", held(11.8), guider(five(), **override), {}),
        ("another attention", held(7.9), guider(five()), {"plain": False}),
        ("no Triton", held(7.9), guider(five()), {"backend": "half"}),
        ("compiled", full, guider(five(), **compiles), {}),
        ("a patched block", full, guider(patched), {}),
        ("a stock LoRA", full, guider(changed), {}),
        ("router bf16", full, guider(five()), {"dmpq": replace(INT8, router="bf16")}),
        ("full precision", full, guider(five(False)), {"dmpq": None}),
    ):
        host = of_the_host(five(), 2)
        for figure in (host, 1.0):
            with put(comfy.model_base.BaseModel, memory_required=lambda *_, figure=figure, **__: figure):
                _, demand = decided(of, **values)
            if demand.sampling != max(ours, figure) or not ours < host:
                bad.append(f"{name}, host {figure}: {demand.sampling / HIDDEN} times the hidden states")
    if decided(guider(harmless))[1].sampling != held(7.9):
        bad.append("a patch that is not on the network")
    return bad


@check
def the_planner_is_told_while_a_run_lasts() -> list[str]:
    bad, model, told = [], load("tiny/", "6-bit"), []
    fast = cached(DMPQ.execute(model, "balanced", router="int8", compute="emulate").args[0])
    own = MODEL.SixBitCogVideoX.memory_required

    def spy(self: object, shape: list, *args: object, **kwargs: object) -> int:
        told.append((shape[0], own(self, shape, *args, **kwargs)))
        return told[-1][1]

    here = put(MODEL.SixBitCogVideoX, memory_required=spy), put(MEMORY, int8_backend=lambda device: "triton")
    with here[0], here[1], put(cogvideo, optimized_attention=attention.attention_pytorch):
        sample(fast)
    dtype = model.model.get_dtype_inference()
    width = model.model.diffusion_model.dim
    row = (16 + 3 * 4 * 6) * width * dtype.itemsize
    blocks = len(model.model.diffusion_model.blocks)
    kept = 2 * blocks * row
    expected = [held((2 + 6.3) * rows, row, width) for rows in (1, 2)]  # so few tokens go together
    loading, calls = told[1:3], told[3:]
    if loading != [(2, expected[1] + kept), (1, expected[0] + kept)]:
        bad.append(f"to load: {loading}, not {expected} and {kept}")
    if calls != [(2, expected[1])] * STEPS:
        bad.append(f"to batch: {calls}")
    if RESERVE.running_blocks() is not None or BRIDGE.settings_of(fast).journal.last is None:
        bad.append("something of the run is left")
    return bad


run_checks()
