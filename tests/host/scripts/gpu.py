"""Time and memory of a whole run inside the host: a file of true size with random 6-bit weights, loaded by
our node, sampled by the stock KSampler with Temporal Delta Cache; then queued again, changed, and unloaded.

    PYTHONPATH=COMFYUI python tests/host/scripts/gpu.py '{"cpu": false, "model": "5b"}'

Arguments, a JSON object: "cpu" (true), "model" ("tiny", "2b", "5b", "1.5-5b"), "size" ([width, height]) and
"frames" (the model's own; on a CPU 96x64 and 9, or 17 where latent frames go in pairs), "steps" (4), "preset"
("balanced"), "location" ("auto"), "dynamic" (false; true: comfy_aimdo streams weights, which the host turns
on by itself on NVIDIA), "malloc" (false; true: torch's allocator as the host chooses it), "folder" (for the
file; a temporary one), "absent" (modules to run without). What the host requires and is not installed is
stood in for. The last line printed is the JSON answer; numbers are bytes and seconds, null for those of a GPU
on a CPU.
"""

from boot import ARGUMENTS, answer, pack  # isort: split

from early import DYNAMIC, STOOD_IN  # isort: split

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import folder_paths
import torch

import nodes

if DYNAMIC:
    import comfy_aimdo.control

    if not comfy_aimdo.control.init_devices([torch.cuda.current_device()]):
        sys.exit("comfy_aimdo does not start here; leave dynamic out")
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True

FOLDER = Path(ARGUMENTS.get("folder") or tempfile.mkdtemp(prefix="sixbit-"))
folder_paths.folder_names_and_paths["diffusion_models"] = ([str(FOLDER)], {".safetensors"})
FAMILIES, QUANTIZED = pack("sixbit_core.families.cogvideox"), pack("sixbit_core.quantized")
FILES, KERNELS = pack("sixbit_core.safetensors_file"), pack("kernels")
LOAD, BRIDGE, RUN = pack("nodes.load"), pack("nodes.bridge"), pack("nodes.run")
LATENT = pack("nodes.latent").SixBitEmptyLatent
CACHE = pack("nodes.delta_cache").SixBitTemporalDeltaCache
DEVICE = comfy.model_management.get_torch_device()
ON_GPU = DEVICE.type == "cuda"
STD = 0.02  # of the weights
_CODES_STD = (68.5 / 8) ** 0.5  # of E2M1 values whose codes are all as likely


def family(name: str) -> object:
    """A published one by the end of its name, or one of its shape with three narrow blocks."""
    if name == "tiny":
        five = next(family for family in FAMILIES.PUBLISHED if family.name == "cogvideox-5b")
        return replace(five, layers=3, heads=4, time_embed_dim=64, text_embed_dim=64)
    return next(family for family in FAMILIES.PUBLISHED if family.name == f"cogvideox-{name}")


def write(target: Path, of: object) -> None:
    """A file as `sixbit quantize` lays it out: random codes, made where they are made fastest."""
    shapes, rotated, plain = of.tensor_shapes(), set(of.block_layers()), set(of.modulation_layers())
    entries: list = []
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer in rotated | plain:
            entries += QUANTIZED.file_entries(layer, *shape)
        else:
            entries.append((name, torch.bfloat16, shape))
    with FILES.StreamWriter(target, entries, {"sixbit_fingerprint": "random"}) as writer:
        for name, shape in shapes.items():
            layer = name.removesuffix(".weight")
            if layer in rotated | plain:
                weight = random_weight(*shape, rotate=layer in rotated)
                for key, tensor in weight.state_dict(layer).items():
                    writer.write(key, tensor)
            else:
                mean = float(name.endswith(".weight") and len(shape) == 1)  # of a norm
                writer.write(name, (torch.randn(shape, device=DEVICE) * STD + mean).bfloat16())


def random_weight(rows: int, columns: int, rotate: bool) -> object:
    """NVFP4 of that shape, values spread as those of a trained layer."""
    data = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device=DEVICE)
    scale = torch.ones(rows, columns // 16, device=DEVICE).to(torch.float8_e4m3fn)
    hadamard = KERNELS.hadamard_block_size(columns) if rotate else 0
    single = torch.tensor(STD / _CODES_STD, device=DEVICE)
    return QUANTIZED.QuantizedWeight(data, scale, single, rows, columns, hadamard)


@contextmanager
def watched() -> Iterator[dict]:
    """What the run inside is said to need before it starts, and how often weights are moved for it."""
    seen: dict = {"loads": 0}
    status, load = RUN.status_line, comfy.model_management.LoadedModel.model_load

    def say(device, dmpq, cache, demand, free):
        held = 0 if cache is None else demand.cache_on_gpu(cache.location)
        seen["need"] = demand.weights + demand.sampling + held
        seen["parts"] = {"weights": demand.weights, "sampling": demand.sampling, "cache": held, "free": free}
        seen["location"] = None if cache is None else cache.location
        seen["status"] = status(device, dmpq, cache, demand, free)
        return seen["status"]

    def count(loaded, *args, **kwargs):
        before = loaded.model.loaded_size()
        result = load(loaded, *args, **kwargs)
        seen["loads"] += int(loaded.model.loaded_size() != before)
        return result

    RUN.status_line, comfy.model_management.LoadedModel.model_load = say, count
    try:
        yield seen
    finally:
        RUN.status_line, comfy.model_management.LoadedModel.model_load = status, load


def queue(model: object, latent: dict, texts: list, seed: int) -> dict:
    """One run of the stock KSampler, and what was seen of it."""
    if ON_GPU:
        torch.cuda.synchronize(DEVICE)
        torch.cuda.reset_peak_memory_stats(DEVICE)
    places = on_device(model)
    start = time.perf_counter()
    with watched() as seen:
        steps = ARGUMENTS.get("steps", 4)
        sampler = nodes.KSampler()
        clip = sampler.sample(model, seed, steps, 6.0, "euler", "simple", *texts, latent)[0]["samples"]
    finite = bool(torch.isfinite(clip).all())
    seconds = time.perf_counter() - start
    last = BRIDGE.settings_of(model).journal.last
    steps_took = last.report.seconds_by_evaluation
    return {
        "seconds": round(seconds, 3),
        "seconds_per_step": round(statistics.median(steps_took[1:] or steps_took), 4),
        "seconds_by_step": [round(took, 4) for took in steps_took],
        "skipped": round(last.report.skipped_fraction, 4),
        "finite": finite,
        "peak": torch.cuda.max_memory_allocated(DEVICE) if ON_GPU else None,
        "reserved": torch.cuda.max_memory_reserved(DEVICE) if ON_GPU else None,
        "loaded": model.loaded_size(),
        "same_places": bool(places) and places == on_device(model),
        **seen,
    }


def on_device(model: object) -> dict[str, int]:
    """Where the weights lie that are where sampling wants them."""
    parameters = model.model.diffusion_model.named_parameters()
    return {name: tensor.data_ptr() for name, tensor in parameters if tensor.device.type == DEVICE.type}


def held() -> int | None:
    """Bytes of tensors on the GPU."""
    gc.collect()
    if not ON_GPU:
        return None
    comfy.model_management.soft_empty_cache()
    torch.cuda.synchronize(DEVICE)
    return torch.cuda.memory_allocated(DEVICE)


def main() -> None:
    of = family(ARGUMENTS.get("model", "tiny"))
    file = FOLDER / f"random-{of.name}-6bit.safetensors"
    start = time.perf_counter()
    if not file.exists():
        write(file, of)
    written = time.perf_counter() - start
    before = held()
    start = time.perf_counter()
    loaded = LOAD.SixBitLoadCogVideoX.execute(file.name, "auto").args[0]
    loading = time.perf_counter() - start
    size, frames = (of.size, of.frames) if ON_GPU else ((64, 96), 8 * (of.patch_size_t or 1) + 1)
    width, height = ARGUMENTS.get("size", size[::-1])
    latent = LATENT.execute(loaded, width, height, ARGUMENTS.get("frames", frames)).args[0]
    length = loaded.model.diffusion_model.max_text_seq_length
    texts = [[[torch.randn(1, length, of.text_embed_dim), {}]] for _ in range(2)]
    preset, location = ARGUMENTS.get("preset", "balanced"), ARGUMENTS.get("location", "auto")
    model = CACHE.execute(loaded, preset, cache_location=location).args[0]
    first = queue(model, latent, texts, seed=1)
    second = queue(model, latent, texts, seed=2)
    changed = CACHE.execute(loaded, preset, threshold=0.9, cache_location=location).args[0]
    third = queue(changed, latent, texts, seed=2)
    comfy.model_management.unload_all_models()
    unloaded = held()
    del model, changed, loaded
    comfy.model_management.cleanup_models()
    gone = held()
    answer(
        model=of.name,
        device=torch.cuda.get_device_name(DEVICE) if ON_GPU else "cpu",
        versions={"torch": torch.__version__, "python": sys.version.split()[0]},
        stood_in=STOOD_IN,
        dynamic=DYNAMIC,
        file_bytes=file.stat().st_size,
        write_seconds=round(written, 2),
        load_seconds=round(loading, 2),
        seconds_per_step=second["seconds_per_step"],
        peak=first["peak"],
        need=first["need"],
        second_queue_reloads=second["loads"] > 0 or not second["same_places"],
        changed_queue_reloads=third["loads"] > 0 or not third["same_places"],
        left_after_unload=None if before is None else unloaded - before,
        left_after_letting_go=None if before is None else gone - before,
        runs=[first, second, third],
    )


with torch.inference_mode():
    main()
