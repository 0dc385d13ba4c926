"""Sampling runs of a tiny 5B through the nodes; every check of `test_runs` is one entry of the answer."""

from boot import ARGUMENTS, pack  # isort: split

import gc
import importlib.util
import itertools
import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import comfy.lora
import comfy.model_management
import comfy.ops
import comfy_extras.nodes_easycache as easycache
import folder_paths
import torch
from comfy_execution.utils import CurrentNodeContext
from graph import (
    BRIDGE,
    DMPQ,
    LOAD,
    STEPS,
    TDC,
    cached,
    check,
    clean,
    digest,
    equal,
    load,
    log_lines,
    relative,
    report,
    run_checks,
    sample,
    text,
)
from safetensors.torch import save_file

LORA = pack("nodes.lora").SixBitLoadLora
SWAP, BLOCK = pack("nodes.swap"), pack("sixbit_core.block")
PRODUCTS = pack("kernels.linear_torch")
PREDICTOR, FITS = pack("sixbit_core.predictor"), pack("sixbit_core.fits")


@check
def off_is_bit_equal() -> bool:
    model = load()
    plain = sample(model)
    off = TDC.execute(model, "off").args[0]
    idle = cached(model, threshold=0.0)
    return equal(sample(off), plain) and equal(sample(idle), plain) and equal(sample(model), plain)


@check
def off_is_counted_and_timed() -> list[str]:
    bad, model = [], load("tiny/", "6-bit")
    for sampler, evaluations in (("euler", STEPS), ("heun", 2 * STEPS - 1)):
        off = TDC.execute(model, "off").args[0]
        sample(off, sampler=sampler)
        seen, memory = report(off), BRIDGE.settings_of(off).journal.last.memory
        if (seen.evaluations, len(seen.seconds_by_evaluation)) != (evaluations, evaluations):
            bad.append(f"{sampler}: {seen.evaluations} evaluations")
        if seen.skipped_fraction != 0 or seen.average_activation_bits != 16 or seen.streams != 2:
            bad.append(f"{sampler}: something was decided")
    stored = TDC.execute(load(), "off").args[0]
    sample(stored)
    full = BRIDGE.settings_of(stored).journal.last.memory
    if full.weights_16_bit != memory.weights_16_bit or not memory.weights < full.weights:
        bad.append(f"{memory} and {full}")
    return bad


@contextmanager
def a_server(channel: bool = True) -> Iterator[list]:
    """Stands in for the host's server; what it is told is kept."""
    told: list = []

    class PromptServer:
        client_id = "me"

    def send_progress_text(self, text, node_id, sid=None):
        told.append((text, node_id, sid))

    if channel:
        PromptServer.send_progress_text = send_progress_text
    PromptServer.instance = PromptServer()
    before = sys.modules.get("server")
    sys.modules["server"] = types.SimpleNamespace(PromptServer=PromptServer)
    try:
        yield told
    finally:
        if before is None:
            del sys.modules["server"]
        else:
            sys.modules["server"] = before


@check
def text_goes_to_the_node_that_samples() -> list[str]:
    bad, fast = [], cached(load())
    quiet = sample(fast)
    with a_server() as told:
        if not equal(sample(fast), quiet) or told:
            bad.append("text where no node executes")
        with CurrentNodeContext("prompt", "7"):
            if not equal(sample(fast), quiet):
                bad.append("text changes the clip")
    if {(node, client) for _, node, client in told} != {("7", "me")}:
        bad.append("another node or client")
    first = f"step 1 of {STEPS} | 0 % of blocks skipped | 16.0 bits | "
    if not told[0][0].startswith(first) or " s | " not in told[-1][0]:
        bad.append(f"says {told}")
    return bad


@check
def a_host_without_the_channel_samples_as_ever() -> bool:
    fast = cached(load())
    with a_server(channel=False), CurrentNodeContext("prompt", "7"):
        return equal(sample(fast), sample(cached(load())))


@check
def skips_happen_and_repeat() -> bool:
    model = load()
    fast = cached(model)
    first = sample(fast)
    seen = report(fast)
    second = sample(fast)
    other = sample(fast, seed=5)
    skipped = 0 < seen.skipped_fraction < 1 and report(fast).skipped_fraction > 0
    return skipped and equal(first, second) and not equal(first, sample(model)) and not equal(first, other)


@check
def what_will_run_is_said_before() -> bool:
    with log_lines() as lines:
        sample(cached(load()))
    said = [line for line in lines if line.startswith("6Bit: activations as they come; needs ")]
    told = (" free; tuning 0 s; Kernels: ", "(weights ", ", sampling ", ", delta cache up to ")
    return len(said) == 1 and all(words in said[0] for words in told)


@check
def runs_of_other_sizes_do_not_disturb() -> bool:
    fast = cached(load())
    first = sample(fast)
    sample(fast, size=(2, 6, 10), steps=5)
    sample(fast, batch=2, steps=6)
    return equal(sample(fast), first)


@check
def joint_split_and_reordered_calls_agree() -> list[str]:
    model, bad = load(), []
    rows: list[int] = []
    begin = BRIDGE.RunState.begin_call

    def spy(state, streams, *args):
        rows.append(len(streams))
        return begin(state, streams, *args)

    BRIDGE.RunState.begin_call = spy
    try:
        fast = cached(model)
        joint = sample(fast)
        whole, joint_rows = report(fast), set(rows)
        rows.clear()
        model.model.memory_required = lambda *args, **kwargs: 1e20  # too little memory for one batch
        split = sample(fast)
    finally:
        BRIDGE.RunState.begin_call = begin
        model.model.__dict__.pop("memory_required", None)
    if joint_rows != {2} or set(rows) != {1}:
        bad.append(f"rows of the calls: {joint_rows}, {set(rows)}")
    if report(fast).choices != whole.choices or not whole.skipped_fraction:
        bad.append("other decisions")
    if not relative(split, joint) < 1e-5:
        bad.append(f"{relative(split, joint)} apart")
    return bad


@check
def batches_agree_with_single_clips() -> bool:
    fast = cached(load(), threshold=0.9, max_skips=1)
    double = sample(fast, batch=2)
    seen = report(fast)
    return seen.streams == 4 and seen.skipped_fraction > 0 and bool(torch.isfinite(double).all())


@check
def texts_of_other_lengths_run() -> bool:
    fast = cached(load())
    out = sample(fast, positive=text(1, length=9))
    return report(fast).skipped_fraction > 0 and bool(torch.isfinite(out).all())


@check
def samplers_and_cuts_run() -> list[str]:
    fast, bad = cached(load()), []
    for sampler in ("heun", "dpm_2", "dpmpp_2m", "ddim", "euler_ancestral", "uni_pc"):
        out = sample(fast, sampler=sampler)
        if not torch.isfinite(out).all() or not report(fast).skipped_fraction:
            bad.append(sampler)
    if report(fast).evaluations != STEPS:
        bad.append(f"uni_pc made {report(fast).evaluations} evaluations")
    model = load()
    idle = cached(model, threshold=0.0)
    for name, values in {
        "one step": {"steps": 1},
        "cfg 1": {"cfg": 1.0},
        "denoise": {"denoise": 0.5},
        "cut": {"start_step": 2, "last_step": 5, "force_full_denoise": False},
        "two conds": {"positive": text(1) + text(3)},
    }.items():
        if not torch.isfinite(sample(fast, **values)).all():
            bad.append(name)
        if not equal(sample(idle, **values), sample(model, **values)):
            bad.append(f"{name}: watching changes it")
    return bad


@check
def evaluations_are_counted() -> bool:
    fast = cached(load())
    sample(fast, sampler="heun")
    heun = report(fast).evaluations
    sample(fast, sampler="euler", cfg=1.0)
    return heun == 2 * STEPS - 1 and report(fast).evaluations == STEPS and report(fast).streams == 1


@check
def progress_comes_from_sigma() -> bool:
    fast = cached(load())
    sample(fast, start_step=4)
    return [round(p, 3) for p in report(fast).progress] == [0.5, 0.625, 0.75, 0.875]


@check
def last_evaluation_is_never_skipped() -> bool:
    fast = cached(load(), threshold=1.0, max_skips=50)
    sample(fast)
    rows = [row for rows in report(fast).choices.values() for row in rows]
    return any("-" in row for row in rows) and all(row[-1] != "-" for row in rows)


@check
def interrupting_leaves_nothing() -> list[str]:
    model, bad = load(), []
    before = sample(cached(model))
    interrupted = comfy.model_management.InterruptProcessingException
    block = model.model.diffusion_model.blocks[1]
    linear = block.ff_proj
    for place, module in (("block", block), ("linear", linear)):
        kept: list[weakref.ref] = []
        counter = itertools.count()
        own = type(module).forward

        def bomb(*args, _own=own, _module=module, _counter=counter, **kwargs):
            if next(_counter) == 2:
                raise interrupted()
            return _own(_module, *args, **kwargs)

        store = BRIDGE.RunState.begin_call

        def spy(state, *args, _store=store, _kept=kept, **kwargs):
            _kept.append(weakref.ref(state))
            return _store(state, *args, **kwargs)

        fast = cached(model)
        BRIDGE.RunState.begin_call = spy
        module_forward = type(module).forward
        try:
            type(module).forward = lambda self, *a, _m=module, _b=bomb, _f=own, **k: (
                _b(*a, **k) if self is _m else _f(self, *a, **k)
            )
            sample(fast)
            bad.append(f"{place}: not interrupted")
        except interrupted:
            pass
        finally:
            type(module).forward = module_forward
            BRIDGE.RunState.begin_call = store
        gc.collect()
        if not clean(model) or any(ref() is not None for ref in kept):
            bad.append(f"{place}: something is left")
    if not equal(sample(cached(model)), before):
        bad.append("the next run differs")
    return bad


@check
def step_caches_beside_warn() -> list[str]:
    bad = []
    for node in (easycache.EasyCacheNode, easycache.LazyCacheNode):
        plain = node.execute(load(), 0.5, 0.15, 0.95, False).args[0]
        idle = node.execute(cached(load(), threshold=0.0), 0.5, 0.15, 0.95, False).args[0]
        busy = node.execute(cached(load()), 0.5, 0.15, 0.95, False).args[0]
        with log_lines() as lines:
            right = equal(sample(idle), sample(plain))
            out = sample(busy)
        if not right or not torch.isfinite(out).all():
            bad.append(f"{node.__name__}: wrong numbers")
        if sum("skips whole evaluations" in line for line in lines) != 2:
            bad.append(f"{node.__name__}: no warning")
    return bad


@check
def two_cache_nodes_the_last_counts_and_it_is_said() -> list[str]:
    model, bad = load(), []
    with log_lines() as lines:
        once = sample(cached(model, max_skips=1))
    if any("in a row" in line for line in lines):
        bad.append(f"of one: {lines}")
    with log_lines() as lines:
        twice = cached(cached(model, max_skips=3), max_skips=1)
    if lines != ["6Bit: two Temporal Delta Cache nodes in a row; the one nearer the sampler counts"]:
        bad.append(f"of two: {lines}")
    if not equal(once, sample(twice)):
        bad.append("the other counts")
    if not equal(sample(TDC.execute(cached(model), "off").args[0]), sample(model)):
        bad.append("off after it is not off")
    return bad


@check
def six_bit_copy_is_made_once() -> bool:
    target = Path(ARGUMENTS["folder"]) / "tiny-6bit.safetensors"
    first = load("tiny/", "6-bit")
    made = target.stat().st_mtime_ns
    second = load("tiny/", "auto")
    names = LOAD.list_models(LOAD.model_roots())
    by_name = load("tiny-6bit.safetensors")
    same = equal(sample(first), sample(second)) and equal(sample(first), sample(by_name))
    small = first.model_size() < load().model_size() / 2
    return (
        same
        and small
        and target.stat().st_mtime_ns == made
        and {"tiny/", "tiny-6bit.safetensors"} < set(names)
    )


@check
def dmpq_routes_and_repeats() -> list[str]:
    model, bad = load("tiny/", "6-bit"), []
    plain = sample(model)
    outs = {}
    for router, bits in (("int8", 8), ("nvfp4", 4), ("bf16", 16)):
        routed = DMPQ.execute(
            model, "balanced", router=router, purified_refresh=False, compute="emulate"
        ).args[0]
        outs[router] = sample(routed)
        if report(routed).average_activation_bits != bits or not clean(routed):
            bad.append(router)
        if not equal(sample(routed), outs[router]):
            bad.append(f"{router} does not repeat")
    if not equal(outs["bf16"], plain):
        bad.append("bf16 activations differ from no node")
    if not relative(outs["int8"], plain) < relative(outs["nvfp4"], plain):
        bad.append("nvfp4 is no coarser than int8")
    both = cached(DMPQ.execute(model, "balanced").args[0])
    sample(both)
    if not (report(both).skipped_fraction > 0 and report(both).average_activation_bits >= 8):
        bad.append("no skips beside routing")
    return bad


@check
def int8_protect_is_in_16_bits_at_both_ends() -> list[str]:
    bad, own = [], DMPQ.execute.__globals__["path_of"]
    model = load("tiny/", "6-bit")
    try:
        for path in ("int8", "reference"):
            DMPQ.execute.__globals__["path_of"] = lambda device, path=path: path
            kept = DMPQ.execute(model, "balanced", router="int8-protect", purified_refresh=False).args[0]
            sample(kept)
            seen = report(kept)
            if seen.router != "int8-protect" or seen.bits_by_evaluation != (16, *[8] * (STEPS - 2), 16):
                bad.append(f"{path}: {seen.router}, {seen.bits_by_evaluation}")
            if seen.average_activation_bits != (2 * 16 + (STEPS - 2) * 8) / STEPS:
                bad.append(f"{path}: {seen.average_activation_bits} bits")
    finally:
        DMPQ.execute.__globals__["path_of"] = own
    return bad


@contextmanager
def unfused():
    """Blocks run as the host has them."""
    own, SWAP._is_ours = SWAP._is_ours, lambda block: False
    try:
        yield
    finally:
        SWAP._is_ours = own


@contextmanager
def calls_of(owner, name: str):
    """Arguments of the calls of a function inside."""
    own, seen = getattr(owner, name), []

    def spy(*args, **kwargs):
        seen.append((args, kwargs))
        return own(*args, **kwargs)

    setattr(owner, name, spy)
    try:
        yield seen
    finally:
        setattr(owner, name, own)


def routed(model, router: str = "int8"):
    return DMPQ.execute(model, "balanced", router=router, compute="emulate").args[0]


@check
def six_bit_activations_follow_the_machine() -> list[str]:
    bad, model, run = [], load("tiny/", "6-bit"), pack("nodes.run")
    plain, int8 = sample(model), sample(routed(model))
    own, run.path_of = run.path_of, lambda device: "int8"
    try:
        alone = sample(model)
        if not equal(alone, int8) or equal(alone, plain):
            bad.append("a GPU with INT8 units does not run INT8")
        if report(model).average_activation_bits != 8 or not clean(model):
            bad.append("no report, or something is left")
        skipping = cached(model)
        sample(skipping)
        if not (report(skipping).skipped_fraction > 0 and report(skipping).average_activation_bits == 8):
            bad.append("no INT8 beside the cache")
        if not equal(sample(routed(model, "bf16")), plain):
            bad.append("router bf16 does not leave activations as they come")
        stored = load()
        if not equal(sample(stored), sample(TDC.execute(stored, "off").args[0])):
            bad.append("16-bit weights are touched")
    finally:
        run.path_of = own
    return bad


@contextmanager
def multiplied_by(name: str) -> Iterator[list]:
    """The CPU counts as a GPU without Triton that has this product; a call of it is an entry."""
    calls, choose, product = [], PRODUCTS.int8_product, PRODUCTS.PRODUCTS[name]
    PRODUCTS.int8_product = lambda x: name
    PRODUCTS.PRODUCTS[name] = lambda *args: calls.append(name) or product(*args)
    try:
        yield calls
    finally:
        PRODUCTS.int8_product, PRODUCTS.PRODUCTS[name] = choose, product


@check
def int8_runs_without_triton_by_every_product() -> list[str]:
    """Whole sums give the reference's bits; 16-bit ones a clip as near the float32 one as bfloat16 gives."""
    bad, model = [], load("tiny/", "6-bit")
    halved = model.clone()
    halved.set_model_compute_dtype(torch.bfloat16)
    exact = sample(routed(model), steps=4)
    rounded = sample(routed(halved), steps=4)
    for name, source in (("int_mm", model), ("kitchen", model), ("half", halved)):
        if name == "kitchen" and importlib.util.find_spec("comfy_kitchen") is None:
            continue
        patcher = routed(source)
        with multiplied_by(name) as calls:
            out = sample(patcher, steps=4)
        far = relative(out, exact)
        if not far < 1.2 * relative(rounded, exact) if name == "half" else not equal(out, exact):
            bad.append(f"{name}: {far} from the reference")
        if len(calls) != 4 * 2 * 4:  # steps, blocks, linears of a block with q, k and v as one
            bad.append(f"{name}: {len(calls)} products")
        if report(patcher).average_activation_bits != 8 or not clean(patcher):
            bad.append(f"{name}: no report, or something is left")
    return bad


class _SomeModels(list):
    """Others are there, and none of them for the host to load."""

    def __bool__(self) -> bool:
        return True


@check
def several_gpus_are_left_alone() -> list[str]:
    bad, model, run = [], load("tiny/", "6-bit"), pack("nodes.run")
    plain, kind = sample(model), type(model)
    own, listed = run.path_of, kind.get_additional_models_with_key
    run.path_of = lambda device: "int8"
    kind.get_additional_models_with_key = lambda self, key: _SomeModels() if key == "multigpu" else []
    try:
        if not equal(sample(model), plain):
            bad.append("INT8 where sampling is spread")
        try:
            sample(cached(model))
            bad.append("the cache decides for several")
        except ValueError as error:
            if "decide for one GPU" not in str(error):
                bad.append(str(error))
    finally:
        run.path_of, kind.get_additional_models_with_key = own, listed
    return bad


@check
def six_bit_blocks_are_fused() -> list[str]:
    bad, model = [], load("tiny/", "6-bit")
    attended = []

    def attention(own, *args, **kwargs):
        attended.append(kwargs["heads"])
        return 2 * own(*args, **kwargs)

    for name, patcher, products in (
        ("int8", routed(model), [3, 1, 1, 1]),
        ("int8 and the cache", cached(routed(model)), [3, 1, 1, 1]),
        ("nvfp4", routed(model, "nvfp4"), []),
        ("the cache alone", cached(model), []),
        ("a stock LoRA", routed(with_lora(model)), [3, 1, 1, 1]),
    ):
        for override in (None, attention):
            if override is not None:
                patcher = patcher.clone()
                patcher.model_options["transformer_options"]["optimized_attention_override"] = override
            steps = (
                1 if name == "nvfp4" else 4
            )  # a flip between its few codes grows too fast to compare later
            with unfused():
                expected = sample(patcher, steps=steps)
            attended.clear()
            with calls_of(SWAP, "block_forward") as blocks, calls_of(BLOCK, "int8_weight") as casts:
                out = sample(patcher, steps=steps)
            seen = report(patcher)
            computed = round((1 - seen.skipped_fraction) * seen.evaluations * 2)
            if len(blocks) != computed or (len(attended) != computed if override else attended):
                bad.append(f"{name}: {len(blocks)} and {len(attended)} of {computed} computed blocks")
            if [len(args[0]) for args, _ in casts] != products * computed:
                bad.append(f"{name}: other products")
            # What lies between two codes may fall either way: one of NVFP4 moved a step's result by 2.3e-5 on
            # one processor, by nothing on another.
            near = {"the cache alone": 1e-5, "nvfp4": 1e-4}.get(name, 0.01)
            if not relative(out, expected) < near or not clean(model):
                bad.append(f"{name}: {relative(out, expected)} from the host's own blocks")
    return bad


@check
def weights_streamed_through_one_buffer_are_right() -> list[str]:
    bad, model = [], load("tiny/", "6-bit")
    patcher, ops = routed(model), comfy.ops
    expected = sample(patcher)
    cast, uncast, lent = ops.cast_bias_weight, ops.uncast_bias_weight, []
    buffer = torch.empty(1 << 16, dtype=torch.uint8)

    def streamed(module, *args, **kwargs):
        weight, bias, _ = cast(module, *args, **kwargs)
        places, start = [], 0
        for tensor in (weight, bias):
            flat = buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            places.append(flat.copy_(tensor))
            start += (tensor.nbytes + 15) // 16 * 16
        lent.append(module)
        return *places, (module, None, None)

    def ended(module, weight, bias, stream):
        if stream[0] is module:
            lent.remove(module)

    ops.cast_bias_weight, ops.uncast_bias_weight = streamed, ended
    ours = SWAP.QuantizedLinear, torch.nn.LayerNorm
    try:
        if not equal(sample(patcher), expected):
            bad.append("another clip")
    finally:
        ops.cast_bias_weight, ops.uncast_bias_weight = cast, uncast
    if [module for module in lent if isinstance(module, ours)]:
        bad.append(f"{len(lent)} weights are not given back")
    return bad


@check
def interrupting_a_fused_block_leaves_nothing() -> list[str]:
    model, bad = load("tiny/", "6-bit"), []
    patcher, interrupted = cached(routed(model)), comfy.model_management.InterruptProcessingException
    before, calls = sample(patcher), itertools.count()

    def attention(own, *args, **kwargs):
        if next(calls) == 3:
            comfy.model_management.interrupt_current_processing()
        return own(*args, **kwargs)

    bombed = patcher.clone()
    bombed.model_options["transformer_options"]["optimized_attention_override"] = attention
    ops = comfy.ops
    kept: list[weakref.ref] = []
    begin = BRIDGE.RunState.begin_call

    def spy(state, *args):
        kept.append(weakref.ref(state))
        return begin(state, *args)

    BRIDGE.RunState.begin_call = spy
    try:
        with calls_of(ops, "cast_bias_weight") as casts, calls_of(ops, "uncast_bias_weight") as uncasts:
            sample(bombed)
        bad.append("not interrupted")
    except interrupted:
        pass
    finally:
        BRIDGE.RunState.begin_call = begin
    lent = [[c for c in seen if isinstance(c[0][0], SWAP.QuantizedLinear)] for seen in (casts, uncasts)]
    if next(calls) != 4 or len(lent[0]) != len(lent[1]):
        bad.append(f"{next(calls) - 1} blocks, {len(lent[0])} weights lent, {len(lent[1])} given back")
    del casts, uncasts, lent
    gc.collect()
    if not clean(model) or any(ref() is not None for ref in kept):
        bad.append("something is left")
    if not equal(sample(patcher), before):
        bad.append("the next run differs")
    return bad


@check
def runs_unlike_the_calibration_are_said() -> list[str]:
    model = load("tiny/", "6-bit")
    blocks, line = BRIDGE.layout_of(model), FITS.Line(0.0, 0.1, 1.0)
    fits = {
        name: FITS.LinearFit(line, None, 0.1, 0.05, (0.1,) * 10, blocks.macs(block, kind))
        for name, block, kind in blocks.linear_names()
    }
    said = []
    for how in (
        {"steps": 50, "size": [64, 96], "frames": 9},
        {"steps": STEPS, "size": [64, 96], "frames": 9},
    ):
        predictor = PREDICTOR.Predictor("x", "0", how, fits, {}, {"6": {"cache_off": 0.2}})
        for router in ("gamma", "int8"):
            config = pack("sixbit_core.config").DMPQConfig(router=router)
            run = BRIDGE.with_settings(model, dmpq=config, predictor=predictor)
            with log_lines() as lines:
                sample(run)
            said += [line for line in lines if "calibrated at" in line]
    return said


@check
def another_scheduler_or_guidance_is_said() -> dict[str, list[str]]:
    model = load("tiny/", "6-bit")
    blocks, line = BRIDGE.layout_of(model), FITS.Line(0.0, 0.1, 1.0)
    fits = {
        name: FITS.LinearFit(line, None, 0.1, 0.05, (0.1,) * 10, blocks.macs(block, kind))
        for name, block, kind in blocks.linear_names()
    }
    config, said = pack("sixbit_core.config").DMPQConfig(router="gamma"), {}
    for name, made, values in (
        ("the same", "euler simple", {}),
        ("the engine's", "ddim-trailing", {}),
        ("ddim, which is euler", "ddim simple", {}),
        ("other steps", "euler simple", {"steps": 4}),
        ("CFG", "euler simple", {"cfg": 3.0}),
        ("no guidance", "euler simple", {"cfg": 1.0}),
        ("sampler", "euler simple", {"sampler": "heun"}),
        ("a sampler of steps of its own", "dpm_2 simple", {"sampler": "dpm_2"}),
        ("schedule", "euler simple", {"scheduler": "karras"}),
        ("both", "heun karras", {}),
        ("some of the steps", "euler simple", {"start_step": 2, "last_step": 5}),
        ("gone from this host", "euler unheard_of", {}),
    ):
        how = {"steps": STEPS, "scheduler": made, "cfg": 6.0}
        predictor = PREDICTOR.Predictor("x", "0", how, fits, {}, {"6": {"cache_off": 0.2}})
        with log_lines() as lines:
            sample(BRIDGE.with_settings(model, dmpq=config, predictor=predictor), **values)
        found = [line for line in lines if "calibrated at" in line]
        said[name] = [line.partition(" calibrated at ")[2].partition(":")[0] for line in found]
    return said


@check
def dmpq_needs_six_bits() -> str:
    try:
        DMPQ.execute(load(), "balanced")
    except ValueError as error:
        return str(error)
    return "no error"


def lora_tensors() -> dict[str, torch.Tensor]:
    """A low-rank change of two layers, by the host's names."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, (rows, columns) in {"q": (64, 64), "ff_proj": (256, 64)}.items():
        key = f"diffusion_model.blocks.0.{name}"
        tensors[f"{key}.lora_up.weight"] = torch.randn((rows, 4), generator=generator) * 0.3
        tensors[f"{key}.lora_down.weight"] = torch.randn((4, columns), generator=generator) * 0.3
    return tensors


def with_lora(model):
    """A clone with `lora_tensors`, as the stock loader puts it on."""
    patches = comfy.lora.load_lora(lora_tensors(), comfy.lora.model_lora_keys_unet(model.model, {}))
    changed = model.clone()
    assert len(changed.add_patches(patches, 1.0)) == 2
    return changed


@check
def stock_lora_acts_and_leaves() -> list[str]:
    bad = []
    for weights in ("as stored", "6-bit"):
        model = load("tiny/", weights)
        before = sample(model)
        changed = with_lora(model)
        out = sample(changed)
        strength = relative(out, before)
        after = sample(model)
        if not equal(after, before):
            bad.append(f"{weights}: it keeps acting after removal")
        if weights == "as stored":
            effect, full = strength, out - before
        elif relative(out - before, full) > 0.5 or abs(strength / effect - 1) > 0.1:
            bad.append(
                f"effect {strength:.3f} against {effect:.3f}, {relative(out - before, full):.3f} apart"
            )
    return bad


def w4a8(model):
    """A run of one evaluation in INT8, begun."""
    config = pack("sixbit_core.config").DMPQConfig(router="int8")
    run = BRIDGE.RunState(BRIDGE.layout_of(model), config)
    run.begin_call([("cond", 0)], 1.0, 0.0, False)
    return run


@check
def lowvram_is_equal() -> list[str]:
    bad, device = [], torch.device("cpu")
    x, step = torch.randn(1, 4, 3, 8, 12), torch.tensor([501.0])
    model = load("tiny/", "6-bit")
    for name, patcher in (("plain", model), ("LoRA", with_lora(model))):
        outs = []
        for memory in (0, 20_000):
            comfy.model_management.unload_all_models()
            patcher.load(device, lowvram_model_memory=memory, full_load=not memory)
            offloaded = sum(hasattr(m, "prev_comfy_cast_weights") for m in model.model.modules())
            if bool(offloaded) != bool(memory):
                bad.append(f"{name}: {offloaded} modules offloaded")
            outs.append(model.model.diffusion_model(x, step, text(1)[0][0]))
            with SWAP.deciding(w4a8(model), model.model.diffusion_model.blocks, None):
                outs.append(model.model.diffusion_model(x, step, text(1)[0][0]))
            patcher.detach()
        if not equal(*outs[::2]) or not equal(*outs[1::2]) or equal(*outs[:2]):
            bad.append(f"{name}: {relative(*outs[::2])} and {relative(*outs[1::2])} apart")
    return bad


def tensors() -> list[torch.Tensor]:
    """Every one that Python knows."""
    gc.collect()
    return [thing for thing in gc.get_objects() if torch.is_tensor(thing)]


def everything_on() -> tuple[list[weakref.ref], int]:
    """Tensors of a run with a LoRA, routed activations and the cache, whose MODEL was let go since; and how
    many there were at least."""
    before = tensors()  # held until the end, so that none of them makes room for one of the same id
    known = {id(tensor) for tensor in before}
    model = LORA.execute(load("tiny/", "6-bit"), "a.safetensors", 0.5).args[0]
    network = model.model.diffusion_model
    least = len(list(network.parameters())) + len(lora_tensors()) + 2 * len(network.blocks)  # residuals
    kept: list[weakref.ref] = []
    begin = BRIDGE.RunState.begin_call

    def spy(state, *args):
        if state.evaluation == STEPS - 2:  # the last begins, and the cache is full
            kept.extend(weakref.ref(tensor) for tensor in tensors() if id(tensor) not in known)
        return begin(state, *args)

    BRIDGE.RunState.begin_call = spy
    try:
        sample(cached(routed(model)))
    finally:
        BRIDGE.RunState.begin_call = begin
    comfy.model_management.unload_all_models()
    del model, network
    gc.collect()
    comfy.model_management.cleanup_models()
    gc.collect()
    return kept, least


@check
def unloading_frees_everything() -> list[str]:
    folder = Path(ARGUMENTS["folder"]) / "loras"
    folder.mkdir(exist_ok=True)
    save_file(lora_tensors(), folder / "a.safetensors")
    folder_paths.folder_names_and_paths["loras"] = ([str(folder)], {".safetensors"})
    everything_on()  # what the process makes once is there
    kept, least = everything_on()
    alive = [tensor for ref in kept if (tensor := ref()) is not None]
    bad = [f"{len(alive)} of {len(kept)}: {tuple(tensor.shape)} {tensor.dtype}" for tensor in alive]
    return bad if len(kept) >= least else [f"{len(kept)} tensors seen of {least} or more"]


@check
def other_models_are_refused() -> str:
    patcher = types.SimpleNamespace(
        model_options={}, model=types.SimpleNamespace(diffusion_model=torch.nn.Linear(2, 2))
    )
    try:
        TDC.execute(patcher, "balanced")
    except ValueError as error:
        return str(error)
    return "no error"


run_checks(digest=digest)
