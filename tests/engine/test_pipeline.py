"""Every way of storing a model, and every variant of the architecture, gives diffusers' own prediction."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import CogVideoXImageToVideoPipeline, CogVideoXPipeline
from PIL import Image
from safetensors.torch import save_file
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.facts import check_clip, check_parts, check_text_to_video, read_facts
from sixbit_diffusion.engine.linears import QuantizedLinear, waiting
from sixbit_diffusion.engine.machine import Machine, find_machine
from sixbit_diffusion.engine.pipeline import check_dtype, compute_dtype, first_frame, load_model
from sixbit_diffusion.engine.sample import ClipSpec, initial_noise, sample
from sixbit_diffusion.engine.settings import Choice, resolve
from sixbit_diffusion.engine.transformer import (
    _read,
    build_transformer,
    expected_weight_bytes,
    full_precision_bytes,
    weight_bytes,
)
from sixbit_diffusion.sixbit_core.families import FAMILIES, to_native
from sixbit_diffusion.sixbit_core.quantize import QuantizeConfig, quantize_checkpoint

from .conftest import save_tiny_pipeline, tiny_transformer

CLIP = ClipSpec("a red star", (32, 32), 9, steps=2, seed=5)
CPU = find_machine("cpu")


def plain_diffusers(kind, folder, clip, **more) -> torch.Tensor:
    pipeline = kind.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        prompt=clip.prompt,
        height=clip.size[0],
        width=clip.size[1],
        num_frames=clip.frames,
        num_inference_steps=clip.steps,
        guidance_scale=clip.cfg,
        generator=torch.Generator().manual_seed(clip.seed),
        output_type="latent",
        max_sequence_length=16,
        **more,
    ).frames


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rotary_positional_embeddings": False, "spatial_interpolation_scale": 1.0},  # like 2B
        {"patch_size_t": 2, "patch_bias": False},  # like 1.5
    ],
    ids=["sincos", "1.5"],
)
def test_variants_equal_diffusers(changes, tmp_path):
    folder = save_tiny_pipeline(tmp_path / "model", tiny_transformer(**changes))
    model = load_model(str(folder), None, "full", CPU)
    expected = plain_diffusers(CogVideoXPipeline, folder, CLIP, latents=initial_noise(model, CLIP))
    found = sample(model, None, CLIP).latents
    assert torch.equal(found, expected)
    assert model.decode(found, CLIP.frames).shape == (9, 32, 32, 3)
    quantized = sample(model, resolve(Choice(precision="w4a8", cache="off"), lambda: ""), CLIP)
    assert quantized.report.average_activation_bits == 8


def test_image_to_video(tmp_path):
    folder = save_tiny_pipeline(tmp_path / "model", tiny_transformer(in_channels=8))
    facts = read_facts(str(folder))
    with pytest.raises(InputError, match="add --image"):
        check_clip(facts, (32, 32), 9, None)
    with pytest.raises(InputError, match="text-to-video models only"):
        check_text_to_video(facts, "evaluate")
    image = Image.linear_gradient("L").convert("RGB")
    clip = ClipSpec(CLIP.prompt, (32, 32), 9, steps=2, seed=5, image=image)
    model = load_model(str(folder), None, "full", CPU)
    found = sample(model, None, clip).latents
    other = sample(
        model, None, ClipSpec(CLIP.prompt, (32, 32), 9, steps=2, seed=5, image=image.rotate(90))
    ).latents
    assert not torch.equal(found, other)
    # diffusers draws the image's latent and the noise from one generator; given the same noise it agrees
    expected = plain_diffusers(
        CogVideoXImageToVideoPipeline,
        folder,
        clip,
        image=first_frame(image, (32, 32)),
        latents=initial_noise(model, clip),
    )
    assert torch.equal(found, expected)


def test_quantized_file_equals_quantizing_in_memory(tiny, tiny_folder, tmp_path):
    file = tmp_path / "tiny-nvfp4.safetensors"
    quantize_checkpoint(tiny_folder, file, QuantizeConfig())
    settings = resolve(Choice(precision="w4a8"), lambda: "")
    loaded = load_model(str(file), tiny_folder, "search", CPU)
    assert torch.equal(sample(loaded, settings, CLIP).latents, sample(tiny, settings, CLIP).latents)
    assert loaded.facts.checkpoint.fingerprint == tiny.facts.checkpoint.fingerprint
    with pytest.raises(InputError, match="is quantized"):
        load_model(str(file), tiny_folder, "full", CPU)
    with pytest.raises(InputError, match="add --pipeline"):
        read_facts(str(file))


def test_single_full_precision_file(tiny, tiny_folder):
    file = next((tiny_folder / "transformer").glob("*.safetensors"))
    loaded = load_model(str(file), tiny_folder, "full", CPU)
    assert torch.equal(sample(loaded, None, CLIP).latents, sample(tiny, None, CLIP).latents)


def bare_native_file(model: torch.nn.Module, file: Path, without: str = "") -> Path:
    state = {to_native(name): tensor for name, tensor in model.state_dict().items() if name != without}
    save_file(state, file)
    return file


def test_a_bare_quantized_file_takes_the_rest_from_the_folder(tiny, tiny_folder, tmp_path):
    bare = bare_native_file(tiny.transformers["full"], tmp_path / "bare.safetensors")
    quantize_checkpoint(bare, tmp_path / "q.safetensors", QuantizeConfig())
    loaded = load_model(str(tmp_path / "q.safetensors"), tiny_folder, "search", CPU)
    assert loaded.facts.config["use_rotary_positional_embeddings"] is True
    assert (loaded.facts.text_length, loaded.facts.frames, loaded.facts.size) == (16, 9, (32, 32))
    settings = resolve(Choice(precision="w4a8"), lambda: "")
    assert torch.equal(sample(loaded, settings, CLIP).latents, sample(tiny, settings, CLIP).latents)


@pytest.mark.parametrize(
    ("part", "changes", "said"),
    [
        ("transformer/config.json", {"num_layers": 3}, "num_layers 2, and .* says 3"),
        ("transformer/config.json", {"patch_size_t": 2}, "patch_size_t None"),
        ("text_encoder/config.json", {"d_model": 64}, "text encoder of width 32; .* has 64"),
        ("vae/config.json", {"latent_channels": 16}, "latent channels 4; .* has 16"),
    ],
)
def test_a_folder_of_another_model_is_refused(part, changes, said, tiny, tiny_folder, tmp_path):
    file = bare_native_file(tiny.transformers["full"], tmp_path / "bare.safetensors")
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / part).read_text())
    (folder / part).write_text(json.dumps({**config, **changes}))
    with pytest.raises(InputError, match=said):
        read_facts(str(file), folder)


def test_published_families_want_their_own_scheduler_and_vae(tiny_folder):
    family, config = FAMILIES["cogvideox-2b"], {"text_embed_dim": 32, "out_channels": 4}
    checkpoint = SimpleNamespace(family=family, path=Path("2b.safetensors"))
    with pytest.raises(InputError, match=r"VAE scaling factor of 1.15258; .* has 0.7"):
        check_parts(checkpoint, config, {"scaling_factor": 0.7}, tiny_folder)
    with pytest.raises(InputError, match=r"snr_shift_scale 3; .* has 1:"):
        check_parts(checkpoint, config, {"scaling_factor": 1.15258426}, tiny_folder)


@pytest.mark.parametrize(("weights", "name"), [("full", "text_proj"), ("search", "attn1.to_q")])
def test_every_shape_is_compared_before_it_is_put_in(weights, name, tiny):
    wrong = {"text_proj": {"text_embed_dim": 64}, "attn1.to_q": {"attention_head_dim": 32}}[name]
    facts = replace(tiny.facts, config={**tiny.facts.config, **wrong})
    with pytest.raises(InputError, match="give weights and pipeline folder of one model"):
        build_transformer(facts, weights, torch.device("cpu"), torch.float32)


def test_a_15_without_patch_bias_has_one_of_zeros(tmp_path):
    transformer = tiny_transformer(patch_size_t=2)
    transformer.patch_embed.proj.bias.data.zero_()
    folder = save_tiny_pipeline(tmp_path / "model", transformer)
    file = bare_native_file(transformer, tmp_path / "bare.safetensors", without="patch_embed.proj.bias")
    found = sample(load_model(str(file), folder, "full", CPU), None, CLIP).latents
    assert torch.equal(found, sample(load_model(str(folder), None, "full", CPU), None, CLIP).latents)


def test_weight_bytes_are_what_is_loaded(tiny):
    full, quantized = tiny.transformers["full"], tiny.transformers["search"]
    assert weight_bytes(full) == 4 * sum(p.numel() for p in full.parameters())
    assert full_precision_bytes(tiny.facts) == weight_bytes(full) // 2
    assert not [
        name
        for name, p in quantized.named_parameters()
        if p.shape[-1:] == (128,) and p.ndim == 2 and "ff" in name
    ]
    linear = quantized.transformer_blocks[0].ff.net[2]
    assert linear.data.nbytes + linear.scale.nbytes == 128 * 512 * 4.5 / 8


@pytest.mark.parametrize("weights", ["full", "search"])
def test_weight_bytes_are_known_before_loading(weights, tiny, tiny_folder, tmp_path):
    expected = expected_weight_bytes(tiny.facts, weights, CPU.device, tiny.dtype)
    assert weight_bytes(tiny.use(weights)) == expected
    if weights == "search":
        file = tmp_path / "tiny-nvfp4.safetensors"
        quantize_checkpoint(tiny_folder, file, QuantizeConfig())
        facts = read_facts(str(file), tiny_folder)
        assert weight_bytes(build_transformer(facts, weights, CPU.device, tiny.dtype)) == expected


def test_off_the_cpu_adaln_weights_wait_in_host_memory(tiny, tiny_folder, tmp_path):
    file = tmp_path / "tiny-nvfp4.safetensors"
    quantize_checkpoint(tiny_folder, file, QuantizeConfig())
    facts, meta = read_facts(str(file), tiny_folder), torch.device("meta")
    _, quantized = _read(facts, "search", meta)
    waits = {name for name, weight in quantized.items() if not weight.data.is_meta}
    assert waits == {facts.family.to_diffusers(name) for name in facts.family.modulation_layers()}
    assert len(waits) == 5 and all(weight.global_scale.is_meta for weight in quantized.values())
    saved = sum(quantized[name].nbytes - 4 for name in waits)
    there, here = (expected_weight_bytes(facts, "search", at, torch.float32) for at in (meta, CPU.device))
    assert here - there == saved > 0


def test_a_weight_that_waits_is_copied_to_its_input(tiny, monkeypatch):
    linear, asked, to = tiny.use("search").transformer_blocks[0].norm1.linear, [], torch.Tensor.to
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
    expected = linear(x)
    held = QuantizedLinear(waiting(linear.quantized, torch.device("meta")), linear.bias)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda t, *a, **k: asked.append((t.dtype, a, k)) or to(t, *a, **k)
    )
    held.global_scale = linear.global_scale
    assert torch.equal(held(x), expected)
    moved = [((x.device,), {"non_blocking": True})] * 2
    assert [(a, k) for dtype, a, k in asked if dtype in (torch.uint8, torch.float8_e4m3fn)][:2] == moved


@pytest.mark.gpu
def test_on_a_gpu_a_weight_that_waits_is_as_one_that_does_not(tiny_folder):
    """The same bits, no wait, and the bytes that were expected."""
    machine = find_machine("cuda")
    model = load_model(str(tiny_folder), None, "search", machine)
    transformer = model.use("search")
    assert weight_bytes(transformer) == expected_weight_bytes(
        model.facts, "search", machine.device, model.dtype
    )
    linear = transformer.transformer_blocks[0].norm1.linear
    assert linear.data.is_pinned() and linear.scale.is_pinned() and linear.global_scale.is_cuda
    x = torch.randn(2, 32, device=machine.device, dtype=model.dtype)
    expected = QuantizedLinear(linear.quantized.to(machine.device), linear.bias)(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = linear(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


def test_number_formats():
    gpu = Machine(torch.device("cuda"), "a GPU", 0)
    assert compute_dtype(FAMILIES["cogvideox-2b"], gpu) == torch.float16
    assert compute_dtype(FAMILIES["cogvideox-5b"], gpu) == torch.bfloat16
    assert compute_dtype(FAMILIES["cogvideox-5b"], CPU) == torch.float32
    check_dtype(FAMILIES["cogvideox-2b"], torch.float16)
    for name in ("cogvideox-5b", "cogvideox-1.5-5b"):
        with pytest.raises(InputError, match="black clip"):
            check_dtype(FAMILIES[name], torch.float16)


def test_pickled_weights_are_not_read(tiny_folder, tmp_path):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    (folder / "vae" / "diffusion_pytorch_model.safetensors").rename(
        folder / "vae" / "diffusion_pytorch_model.bin"
    )
    with pytest.raises(InputError, match="vae"):
        load_model(str(folder), None, "full", CPU)


def test_first_frame_keeps_the_middle():
    wide = Image.new("RGB", (96, 32), "red")
    wide.paste("blue", (32, 0, 64, 32))
    assert first_frame(wide, (32, 32)).getcolors() == [(1024, (0, 0, 255))]
