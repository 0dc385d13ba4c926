"""GPU memory of a whole clip: `python benchmarks/memory.py --config 5b --baseline diffusers comfyui`.

Random weights of the true sizes, a CFG batch of two, INT8 activations, the delta cache and PDR on. Every part
is a row of its own: the sampling loop for each place of the cache, beside one forward of each baseline in the
same process; with --part text the T5-XXL encoder in fp8, with --part decode the tiled VAE. Results:
benchmarks/results/memory-CONFIG.json.

With all three parts, of a whole clip, residuals in the last --location.

    --cap GIB    caps the allocator first, so that "fits" was run; baselines are left out
    --latents    frames,height,width of the latents, in place of the model's own clip
    --skip       a report.json, whose skips are stretched to this model: as blocks do skip, most of them the
                 same evaluations, and residuals from host memory have nothing to hide behind
"""

import argparse
import importlib.util
from functools import partial
from pathlib import Path

import torch
from measure import RESULTS, device_of, elapsed_ms, peak_bytes, register, write_result
from torch import nn

SPREAD = "0.4"  # share of block evaluations, spread evenly: a fixed pattern
LOCATIONS = ("gpu", "gpu-int8", "gpu-nvfp4", "host")
PARTS = ("sampling", "text", "decode")
GIB = 2**30


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, help="2b, 5b or 1.5-5b")
    parser.add_argument("--part", nargs="*", choices=PARTS, default=["sampling"])
    parser.add_argument("--baseline", nargs="*", choices=("diffusers", "comfyui"), default=[])
    parser.add_argument("--location", nargs="*", choices=LOCATIONS, default=list(LOCATIONS))
    parser.add_argument("--latents", type=_sizes, help="frames,height,width")
    parser.add_argument("--cap", type=float, help="GiB that the allocator may take")
    parser.add_argument("--evaluations", type=int, default=12)
    parser.add_argument("--skip", default=SPREAD, help="share or report.json, as of model.py")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    register()
    from model_parts import CONFIGS
    from sixbit_diffusion.engine.machine import grow_segments

    grow_segments()
    if given.config not in CONFIGS:
        parser.error(f"--config must be one of 2b, 5b, 1.5-5b, got {given.config}")
    if "comfyui" in given.baseline and importlib.util.find_spec("comfy") is None:
        parser.error("this baseline needs a ComfyUI checkout: PYTHONPATH=CHECKOUT python benchmarks/...")
    if given.cap and given.baseline:
        parser.error("--cap holds for the whole process: measure baselines without it")
    device = device_of(given.device)
    if given.cap and device.type == "cuda":
        whole = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(given.cap * GIB / whole)
    torch.manual_seed(0)
    bars, rows = {}, []
    with torch.no_grad():
        for part in given.part:
            {"sampling": sampling, "text": text, "decode": decode}[part](given, device, bars, rows)
        if set(given.part) == set(PARTS):  # one after the other in this process, as in a clip
            clip = {row["name"].partition(".")[0]: row["peak_bytes"] for row in rows if "ms" not in row}
            bars[f"memory.{given.config}.clip_peak_gib"] = max(clip.values()) / GIB
    for row in rows:
        row["cap_gib"] = given.cap
    write_result(given.out or RESULTS / f"memory-{given.config}.json", device, bars, rows)


def sampling(given, device, bars, rows) -> None:
    """Loops that skip, one a place of the cache; one forward of each baseline."""
    from dataclasses import replace

    from model_parts import CONFIGS, Bench

    config = CONFIGS[given.config]
    if given.latents:
        config = replace(config, latents=given.latents)
    bench = Bench(config, device, stock=bool(given.baseline))
    clip = "x".join(map(str, config.latents))
    held = bench.weight_bytes("ours")
    bars[f"memory.{given.config}.weights_gib"] = held / GIB
    peaks, ms, recorded = {}, {}, ".recorded" if Path(given.skip).is_file() else ""
    for location in given.location:
        told = []
        loop = lambda: told.append(bench.timed_loop(given.skip, given.evaluations, location))  # noqa: B023, E731
        peaks[location] = held + peak_bytes(loop, device)
        ms[location], report = told[0]
        rows.append(
            {
                "name": f"sampling.{clip}.{location}{recorded}" + (f".cap{given.cap:g}" if given.cap else ""),
                "peak_bytes": peaks[location],
                "expected_bytes": bench.expected_bytes(location),
                "cache_bytes": report.cache_bytes,
                "ms_an_evaluation": ms[location] / given.evaluations,
                "share": report.skipped_fraction,
            }
        )
    least = min(peaks, key=peaks.get)
    if len(peaks) > 1:
        bar = f"memory.{given.config}.speed_cost{recorded.replace('.', '_')}"
        bars[bar] = ms[least] / min(ms.values()) - 1
    for name in given.baseline:
        call = bench.baseline(name)
        call()
        peak = bench.weight_bytes(name) + peak_bytes(call, device)
        rows.append({"name": f"sampling.{clip}.{name}", "peak_bytes": peak, "ms": elapsed_ms(call, device)})
        bars[f"memory.{given.config}.peak_vs_{name}"] = peak / peaks[least]


def text(given, device, bars, rows) -> None:
    """T5-XXL over 226 tokens, weights in fp8 and cast layer by layer."""
    from transformers import T5Config, T5EncoderModel

    shape = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
    if given.config == "tiny":
        shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    layout = T5Config(**shape, feed_forward_proj="gated-gelu", vocab_size=32128)
    with torch.device("meta"):
        model = T5EncoderModel(layout).to(torch.float8_e4m3fn)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    for tensor in model.parameters():
        tensor.copy_(torch.randn(tensor.shape, device=device, dtype=torch.bfloat16) * 0.02)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = partial(_cast_linear, module)
        elif isinstance(module, nn.Embedding):
            module.forward = partial(_cast_embedding, module)
        elif "Norm" in type(module).__name__:
            module.to(torch.bfloat16)
    words = torch.zeros(2, 226, dtype=torch.long, device=device)
    weights = sum(tensor.nbytes for tensor in model.parameters())
    rows.append({"name": "text", "peak_bytes": weights + peak_bytes(lambda: model(words), device)})


def _cast_linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x.to(torch.bfloat16), module.weight.to(torch.bfloat16))


def _cast_embedding(module: nn.Embedding, index: torch.Tensor) -> torch.Tensor:
    return module.weight.view(torch.uint8)[index].view(module.weight.dtype).to(torch.bfloat16)


def decode(given, device, bars, rows) -> None:
    """The VAE, tiled, one clip."""
    from diffusers import AutoencoderKLCogVideoX
    from model_parts import CONFIGS

    frames, height, width = given.latents or CONFIGS[given.config].latents
    widths = (8, 8, 8, 8) if given.config == "tiny" else (128, 256, 256, 512)
    vae = AutoencoderKLCogVideoX(
        block_out_channels=widths,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        latent_channels=16,
        layers_per_block=1 if given.config == "tiny" else 3,
        norm_num_groups=2 if given.config == "tiny" else 32,
    )
    vae = vae.to(device, torch.bfloat16).eval().requires_grad_(False)
    vae.enable_tiling()
    z = torch.randn(1, 16, frames, height, width, device=device, dtype=torch.bfloat16)
    weights = sum(tensor.nbytes for tensor in vae.parameters())
    rows.append({"name": "decode", "peak_bytes": weights + peak_bytes(lambda: vae.decode(z), device)})


def _sizes(spelled: str) -> tuple[int, int, int]:
    frames, height, width = map(int, spelled.split(","))
    return frames, height, width


if __name__ == "__main__":
    main()
