"""What users do to a graph, with diffusers and triton absent; every check is one entry of the answer."""

from boot import ARGUMENTS, pack  # isort: split

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import comfy.model_management
import comfy.sample
import comfy_extras.nodes_context_windows as context
import comfy_extras.nodes_custom_sampler as custom
import folder_paths
import torch
from graph import (
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

import nodes

FOLDER = Path(ARGUMENTS["folder"])
folder_paths.models_dir = str(FOLDER)
RUN, MACHINE = pack("nodes.run"), pack("nodes.machine")
LATENT = pack("nodes.latent").SixBitEmptyLatent
IMAGE = pack("nodes.image_to_video").SixBitImageToVideo


def said(function) -> str:
    """The one line that a wrong use is answered with."""
    try:
        found = function()
    except ValueError as error:
        return str(error)
    return found if isinstance(found, str) else "no error"


@check
def batches_equal_single_clips() -> list[str]:
    bad = []
    fast = cached(load(), threshold=1.0, max_skips=1)  # every block skips every second evaluation
    for count in (2, 3):
        rows = sample(fast, batch=count)
        seen = report(fast)
        if seen.streams != 2 * count or not seen.skipped_fraction:
            bad.append(f"batch {count}: {seen.streams} streams")
        for row in range(count):
            alone = sample(fast, batch_index=[row])
            if not relative(rows[row : row + 1], alone) < 1e-5:
                bad.append(f"row {row} of {count}: {relative(rows[row : row + 1], alone)}")
    return bad


@check
def chunking_may_change_in_mid_run() -> list[str]:
    model, bad = load(), []
    fast = cached(model)
    joint = sample(fast, batch=2)
    whole, rows = report(fast), []
    begin = RUN.RunState.begin_call

    def spy(state, streams, *args):
        rows.append(len(streams))
        return begin(state, streams, *args)

    def needed(*args, **kwargs):
        return 1e20 if len(rows) % 5 > 1 else 1.0

    RUN.RunState.begin_call = spy
    model.model.memory_required = needed
    try:
        mixed = sample(fast, batch=2)
    finally:
        RUN.RunState.begin_call = begin
        model.model.__dict__.pop("memory_required", None)
    if set(rows) != {2, 4}:
        bad.append(f"rows of the calls: {set(rows)}")
    if report(fast).choices != whole.choices or not whole.skipped_fraction:
        bad.append("other decisions")
    if not relative(mixed, joint) < 1e-5:
        bad.append(f"{relative(mixed, joint)} apart")
    return bad


@check
def other_sizes_equal_a_fresh_model() -> list[str]:
    used, bad = cached(load()), []
    for values in ({}, {"size": (5, 6, 10)}, {"steps": 5}, {"batch": 2}, {"size": (1, 8, 12)}, {}):
        if not equal(sample(used, **values), sample(cached(load()), **values)):
            bad.append(str(values))
    return bad


@check
def two_samplers_in_a_graph_do_not_disturb() -> bool:
    model = load()
    first, second = cached(model), cached(model, max_skips=1)
    alone = sample(first), sample(second, steps=5)
    draft = sample(first)
    refined = sample(second, steps=5)
    routed = DMPQ.execute(load("tiny/", "6-bit"), "balanced").args[0]
    long, short = cached(routed), cached(routed)
    sample(long)
    sample(short, steps=5)
    apart = report(long).evaluations == STEPS and report(short).evaluations == 5
    same = equal(draft, alone[0]) and equal(refined, alone[1]) and equal(sample(model), sample(load()))
    return apart and same


def guided(model, sigmas: torch.Tensor, latent: dict, noise: object) -> dict:
    guider = custom.CFGGuider.execute(model, text(1), text(2), 6.0).args[0]
    sampler = custom.KSamplerSelect.execute("euler").args[0]
    return custom.SamplerCustomAdvanced.execute(noise, guider, sampler, sigmas, latent).args


@check
def split_sigmas_and_custom_samplers_run() -> list[str]:
    model, bad = load(), []
    sigmas = custom.BasicScheduler.execute(model, "simple", STEPS, 1.0).args[0]
    high, low = custom.SplitSigmas.execute(sigmas, 3).args
    start, none = custom.Noise_RandomNoise(0), custom.Noise_EmptyNoise()
    latent = {"samples": torch.zeros(1, 4, 3, 8, 12)}
    halves = guided(model, low, guided(model, high, latent, start)[0], none)[0]["samples"]
    if not relative(halves, sample(model)) < 1e-5:
        bad.append(f"halves are {relative(halves, sample(model))} from the whole")
    fast = cached(model, start=0.0)
    whole = guided(fast, sigmas, latent, start)[0]["samples"]
    if not equal(whole, sample(fast)) or not report(fast).skipped_fraction:
        bad.append("the custom sampler differs from KSampler")
    between = guided(fast, high, latent, start)[0]
    if not report(fast).skipped_fraction >= 0 or report(fast).evaluations != 3:
        bad.append("first half")
    done = guided(fast, low, between, none)[0]["samples"]
    if not torch.isfinite(done).all() or report(fast).evaluations != STEPS - 3:
        bad.append("second half")
    return bad


@check
def later_models_keep_their_length() -> list[str]:
    model, bad = load("tiny-1.5/"), []
    whole = sample(model, size=(5, 8, 12))
    if whole.shape[2] != 5 or not equal(sample(model, size=(6, 8, 12)), whole):
        bad.append("the extra frame is not seen for what it is")
    sigmas = custom.BasicScheduler.execute(model, "simple", STEPS, 1.0).args[0]
    high, low = custom.SplitSigmas.execute(sigmas, 3).args
    start, none = custom.Noise_RandomNoise(0), custom.Noise_EmptyNoise()
    between, shown = guided(model, high, {"samples": torch.zeros(1, 4, 5, 8, 12)}, start)
    done, denoised = guided(model, low, between, none)
    if between["samples"].shape[2] != 6 or shown["samples"].shape[2] != 5:
        bad.append("the first half")
    if not relative(done["samples"], whole) < 1e-5 or denoised["samples"].shape != whole.shape:
        bad.append(f"halves are {relative(done['samples'], whole)} from the whole")
    again = nodes.common_ksampler(
        model, 3, STEPS, 6.0, "euler", "simple", text(1), text(2), {"samples": whole}, denoise=0.5
    )[0]["samples"]
    masked = {"samples": whole, "noise_mask": torch.ones(1, 64, 96)}
    masked["noise_mask"][:, :, :48] = 0
    kept = nodes.common_ksampler(
        model, 3, STEPS, 6.0, "euler", "simple", text(1), text(2), masked, denoise=0.5
    )[0]["samples"]
    if again.shape != whole.shape or equal(again, whole) or not torch.isfinite(again).all():
        bad.append("a second pass")
    if not relative(kept[..., :6], whole[..., :6]) < 1e-5 or equal(kept, whole):
        bad.append("a masked pass")
    fast = cached(model)
    if sample(fast, size=(5, 8, 12)).shape != whole.shape or not report(fast).skipped_fraction:
        bad.append("skips")
    return bad


def ranged(seed: int, start: float, end: float) -> list:
    return [[text(seed)[0][0], {"start_percent": start, "end_percent": end}]]


@check
def conditionings_may_come_and_go() -> list[str]:
    model, bad = load(), []
    idle, fast = cached(model, threshold=0.0), cached(model)
    area = [[text(4)[0][0], {"area": (8, 6, 0, 0), "strength": 1.0, "set_area_to_bounds": False}]]
    for name, positive in {
        "scheduled": ranged(1, 0.0, 0.5) + ranged(3, 0.5, 1.0),
        "overlapping": ranged(1, 0.0, 0.7) + ranged(3, 0.3, 1.0),
        "two at once": text(1) + text(3),
        "two lengths": text(1) + text(3, length=9),
        "an area": text(1) + area,
    }.items():
        if not equal(sample(idle, positive=positive), sample(model, positive=positive)):
            bad.append(f"{name}: watching changes it")
        out = sample(fast, positive=positive)
        if not torch.isfinite(out).all() or not report(fast).skipped_fraction or not clean(model):
            bad.append(f"{name}: skips {report(fast).skipped_fraction}")
        if not equal(sample(fast, positive=positive), out):
            bad.append(f"{name} does not repeat")
    return bad


MACHINES = {  # as torch tells of them -> what they multiply with
    "GTX 10": ("cuda", (6, 1), False, "reference"),
    "RTX 20": ("cuda", (7, 5), False, "reference"),
    "A100": ("cuda", (8, 0), False, "INT8"),
    "RTX 30": ("cuda", (8, 6), False, "INT8"),
    "RTX 40": ("cuda", (8, 9), False, "INT8"),
    "H100": ("cuda", (9, 0), False, "INT8"),
    "B200": ("cuda", (10, 0), False, "FP4 and INT8"),
    "RTX 50": ("cuda", (12, 0), False, "FP4 and INT8"),
    "AMD": ("cuda", None, True, "reference"),
    "AMD that names a capability": ("cuda", (11, 0), True, "reference"),
    "Apple": ("mps", None, False, "reference"),
    "CPU": ("cpu", None, False, "reference"),
}
BITS = {  # router, compute -> bits of activations without FP4 units, and with them; None as they come
    None: {"reference": None, "INT8": 8, "FP4 and INT8": 8},
    ("bf16", "auto"): {"reference": 16, "INT8": 16, "FP4 and INT8": 16},
    ("int8", "auto"): {"reference": 8, "INT8": 8, "FP4 and INT8": 8},
    ("nvfp4", "auto"): {"reference": 8, "INT8": 8, "FP4 and INT8": 4},
    ("nvfp4", "emulate"): {"reference": 4, "INT8": 4, "FP4 and INT8": 4},
    ("random", "auto"): {"reference": 8, "INT8": 8, "FP4 and INT8": "mixed"},
    ("random", "emulate"): {"reference": "mixed", "INT8": "mixed", "FP4 and INT8": "mixed"},
}


@contextmanager
def on_machine(kind: tuple) -> Iterator[None]:
    """Every module that asks for the path of the device is told that of a machine."""
    device, capability, hip, _ = kind
    path = MACHINE.compute_path(device, capability, hip)
    asking = [pack(f"nodes.{name}") for name in ("dmpq", "run", "status")]
    own = MACHINE.path_of
    for module in asking:
        module.path_of = lambda _: path
    try:
        yield
    finally:
        for module in asking:
            module.path_of = own


def gets_a_path(model, told: tuple[str, str] | None, units: str) -> str:
    """What is wrong with a run of one precision on a machine with these units; "" for nothing."""
    expected = BITS[told][units]
    with log_lines() as lines:
        if told is not None:
            model = DMPQ.execute(model, "balanced", router=told[0], compute=told[1]).args[0]
        out = sample(model, steps=2)
    said = [line.removeprefix("6Bit: ") for line in lines if line.startswith("6Bit: ")]
    starts = "activations as they come; needs" if expected is None else f"{units}, router "
    bits = report(model).average_activation_bits
    right = {None: bits == 16, "mixed": 4 <= bits <= 8}.get(expected, bits == expected)
    if not torch.isfinite(out).all() or not right or not clean(model):
        return f"{bits} bits"
    if len(said) != 1 + (told is not None) or not said[-1].startswith(starts):
        return f"says {said}"
    return ""


@check
def every_gpu_gets_a_path() -> list[str]:
    """In every precision: the right arithmetic, one line before it samples, never a crash."""
    six_bit, bad = load("tiny/", "6-bit"), []
    for name, kind in MACHINES.items():
        with on_machine(kind):
            for told in BITS:
                if wrong := gets_a_path(six_bit, told, kind[3]):
                    bad.append(f"{name}, {told}: {wrong}")
            with log_lines() as lines:
                full = sample(TDC.execute(load(), "off").args[0], steps=2)
            if not torch.isfinite(full).all() or not any(
                "activations as they come" in line for line in lines
            ):
                bad.append(f"{name}, as stored: {lines}")
    return bad


@check
def the_cache_goes_where_there_is_room() -> list[str]:
    model, bad = load(), []
    fast = cached(model)
    expected = sample(fast)
    full = report(fast).cache_bytes
    required = []
    load_models = comfy.model_management.load_models_gpu

    def spy(models, *args, memory_required=0, **kwargs):
        required.append(memory_required)
        return load_models(models, *args, memory_required=memory_required, **kwargs)

    own, free_memory = RUN.room_for_cache, comfy.model_management.get_free_memory
    comfy.model_management.load_models_gpu = spy
    try:
        for room, free, place in (
            (None, 1 << 34, "gpu"),
            (10 * full, 1 << 34, "gpu"),
            (0.6 * full, full, "gpu-int8"),  # half of it is too little
            (0.6 * full, 1 << 34, "gpu-int8"),  # what fits the GPU does not leave it
            (0.2 * full, 1 << 34, "host"),
        ):
            RUN.room_for_cache = lambda patcher, demand, room=room: room
            comfy.model_management.get_free_memory = lambda dev=None, torch_free_too=False, free=free: (
                (free, free) if torch_free_too else free
            )
            out = sample(fast)
            seen = report(fast)
            if seen.cache["location"] != place or not seen.skipped_fraction:
                bad.append(f"{room}, {place}: {seen.cache['location']}")
            if place == "gpu" and not equal(out, expected):
                bad.append(f"{place} gives another clip")
        sample(model)
    finally:
        comfy.model_management.load_models_gpu, RUN.room_for_cache = load_models, own
        comfy.model_management.get_free_memory = free_memory
    plain = int(required[-1])
    reserved = [int(needed) - plain for needed in required[:-1]]
    residuals = 2 * model.model.plan.config["num_layers"]
    kept = seen.cache_bytes // (residuals + 2)  # with a sum for each stream, of a span that holds all blocks
    slots = pack("sixbit_core.courier").bytes_on_device(kept) + 2 * full // residuals
    if not (reserved[0] == reserved[1] >= full and 0 < reserved[2] < 0.6 * reserved[0]):
        bad.append(f"reserved {reserved} of {full}")
    if not slots <= reserved[4] <= 1.2 * slots:
        bad.append(f"reserved {reserved[4]} for what is on its way, not {slots}")
    if not full <= reserved[0] <= 1.2 * full:
        bad.append(f"said {reserved[0]}, took {full}")
    return bad


@check
def what_a_hook_adds_in_place_is_added_once() -> list[str]:
    """Between two blocks, in inference mode, where nothing counts changes: in no sum of residuals."""
    model, clips = load(), []
    blocks = model.model.diffusion_model.blocks

    def add(module: object, args: object, out: tuple) -> None:
        out[0].add_(0.5)

    hooks = [block.register_forward_hook(add) for block in blocks]
    try:
        for place in ("gpu-int8", "host"):
            clips.append(sample(cached(model, cache_location=place)))
    finally:
        for hook in hooks:
            hook.remove()
    return [] if equal(*clips) else [f"host memory gives {float((clips[0] - clips[1]).abs().max())} more"]


@check
def too_little_host_memory_is_said_before() -> list[str]:
    model, own = load(), comfy.model_management.get_free_memory
    comfy.model_management.get_free_memory = lambda dev=None, torch_free_too=False: (
        (1000, 1000) if torch_free_too else 1000
    )
    try:
        sample(cached(model, cache_location="host"))
        return ["ran"]
    except ValueError as error:
        said = "of host memory for this clip and 0.0 MiB are free; set cache_location to gpu-nvfp4"
        return [] if said in str(error) else [str(error)]
    finally:
        comfy.model_management.get_free_memory = own


@check
def sizes_are_those_of_the_tensors() -> list[str]:
    bad = []
    for weights in ("as stored", "6-bit"):
        model = load("tiny/", weights)
        tensors = [*model.model.diffusion_model.parameters(), *model.model.diffusion_model.buffers()]
        size = sum(tensor.nbytes for tensor in tensors)
        if not size <= model.model_size() <= size + 20_000:  # the noise schedule is counted too
            bad.append(f"{weights}: {model.model_size()}, tensors {size}")
        for share in (0.0, 0.3, 1.0):
            comfy.model_management.unload_all_models()
            model.load(torch.device("cpu"), lowvram_model_memory=int(share * size) or 1)
            if model.loaded_size() > max(share, 0.05) * size + 20_000:
                bad.append(f"{weights}: {model.loaded_size()} loaded of {share} * {size}")
            model.detach()
    return bad


@check
def nothing_of_a_run_lives_on() -> list[str]:
    model, bad = load("tiny/", "6-bit"), []
    routed = DMPQ.execute(cached(model), "balanced").args[0]
    sample(routed)

    def alive() -> int:
        gc.collect()
        return sum(torch.is_tensor(thing) for thing in gc.get_objects())

    before = alive()
    for _ in range(3):
        sample(routed)
    if alive() > before:
        bad.append(f"{alive() - before} tensors more after three runs")
    if comfy.model_management.current_loaded_models and not clean(model):
        bad.append("not clean")
    return bad


@check
def twenty_runs_of_changing_sizes_end_where_they_began() -> list[str]:
    routed = DMPQ.execute(cached(load("tiny/", "6-bit"), cache_location="host"), "balanced").args[0]
    sizes = [(1, 4, 4), (3, 8, 12), (2, 6, 10), (3, 4, 8)]

    def alive() -> int:
        gc.collect()
        kept = {t.untyped_storage().data_ptr(): t.nbytes for t in gc.get_objects() if torch.is_tensor(t)}
        return sum(kept.values())

    held = []
    for run in range(20):
        sample(routed, size=sizes[run % 4], steps=3, seed=run)
        held.append(alive())
    grown = [f"{later - first:+d} bytes" for first, later in zip(held[:4], held[16:], strict=True)]
    return [] if grown == ["+0 bytes"] * 4 else grown


def windowed(model):
    """The model sampled in overlapping parts of the clip."""
    return context.ContextWindowsManualNode.execute(
        model, 3, 1, "standard_static", 1, False, "pyramid", 2, False, False
    ).args[0]


@check
def wrong_use_is_said_in_one_line() -> dict[str, str]:
    model, later, image = load(), load("tiny-1.5/"), load("tiny-i2v/")
    pixels = torch.zeros(1, 64, 96, 3)
    vae = pack("nodes.parts").load_vae(FOLDER / "tiny-i2v")
    two, one = text(1), text(2)
    given = IMAGE.execute(two, one, vae, pixels, 96, 64, 9, image).args
    stock = type("Stock", (), {"plan": None})
    foreign = type("Patcher", (), {"model": stock(), "model_options": {}})()
    foreign.model.diffusion_model = torch.nn.Linear(2, 2)
    del stock.plan
    (FOLDER / "sixbit_predictors").mkdir(exist_ok=True)
    document = {
        "format": "sixbit-predictor",
        "version": 1,
        "model": {"family": "cogvideox-5b", "fingerprint": "00"},
        "calibration": {},
        "theta": {},
        "linears": {
            "blocks.0.q": dict.fromkeys(("alpha", "beta", "r2", "error_nvfp4", "error_int8", "macs"), 1)
        },
    }
    (FOLDER / "sixbit_predictors" / "other.json").write_text(json.dumps(document))
    quantized = load("tiny/", "6-bit")
    uses = {
        "size": lambda: LATENT.execute(model, 100, 64, 9),
        "frames": lambda: LATENT.execute(model, 96, 64, 10),
        "frames of 1.5": lambda: LATENT.execute(later, 96, 64, 9),
        "size of a table": lambda: LATENT.execute(image, 80, 64, 9),
        "not CogVideoX": lambda: LATENT.execute(foreign, 96, 64, 9),
        "odd latent": lambda: sample(model, size=(3, 7, 12)),
        "picture latent": lambda: comfy.sample.sample(
            model, torch.zeros(1, 4, 8, 12), 2, 6.0, "euler", "simple", two, one, torch.zeros(1, 4, 8, 12)
        ),
        "channels": lambda: nodes.common_ksampler(
            model, 0, 2, 6.0, "euler", "simple", two, one, {"samples": torch.ones(1, 16, 3, 8, 12)}
        ),
        "no image": lambda: sample(image),
        "image for text to video": lambda: sample(model, positive=given[0]),
        "image size without a model": lambda: IMAGE.execute(two, one, vae, pixels, 100, 64, 9),
        "image frames with a model": lambda: IMAGE.execute(two, one, vae, pixels, 96, 64, 10, image),
        "predictor": lambda: DMPQ.execute(quantized, "balanced", predictor="other.json"),
        "router without predictor": lambda: DMPQ.execute(
            quantized, "balanced", router="gamma", compute="emulate"
        ),
        "context windows": lambda: sample(windowed(cached(model))),
        "cache range": lambda: TDC.validate_inputs("balanced", start=0.9, end=0.2),
    }
    for name in ("truncated", "half", "lone"):
        uses[name] = lambda name=name: LOAD.SixBitLoadCogVideoX.validate_inputs(f"{name}.safetensors", "auto")
    return {name: said(use) for name, use in uses.items()}


@check
def image_to_video_takes_any_image() -> list[str]:
    model, bad = load("tiny-i2v/"), []
    vae = pack("nodes.parts").load_vae(FOLDER / "tiny-i2v")
    pixels = torch.rand((2, 64, 96, 3), generator=torch.Generator().manual_seed(0))
    wide = torch.rand((1, 128, 400, 4), generator=torch.Generator().manual_seed(1))
    for name, image in (("a batch", pixels), ("another shape", wide)):
        positive, negative, latent = IMAGE.execute(text(1), text(2), vae, image, 96, 64, 9).args
        first = positive[0][1]["concat_latent_image"]
        if first.shape != (1, 4, 1, 8, 12) or negative[0][1]["concat_latent_image"] is not first:
            bad.append(f"{name}: {tuple(first.shape)}")
        kept = first.clone()
        outs = [
            nodes.common_ksampler(model, 0, 4, 6.0, "euler", "simple", positive, negative, latent)[0]
            for _ in range(2)
        ]
        if not equal(outs[0]["samples"], outs[1]["samples"]) or not equal(first, kept):
            bad.append(f"{name}: a second run differs")
    same = IMAGE.execute(text(1), text(2), vae, pixels[:1], 96, 64, 9).args[0][0][1]["concat_latent_image"]
    if not equal(same, vae.encode(pixels[:1])):
        bad.append("an image of the right size is changed")
    return bad


run_checks(digest=digest)
