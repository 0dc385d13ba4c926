"""The bundled reference in the host is the pipeline that diffusers runs."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
from safetensors.torch import save_file
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import load_model

PROMPT = "a red star is moving right on a white background"
STEPS = 2


@torch.inference_mode()
def write_case(path: Path) -> None:
    """Text, latents and frames of diffusers' own pipeline, from noise drawn as the host draws it."""
    model = load_model("reference", None, "full", find_machine("cpu"))
    embeds = model.encode(PROMPT)
    noise = torch.randn((1, 16, 9, 16, 16), generator=torch.manual_seed(0)).transpose(1, 2)
    tensors = {"positive": embeds.prompt, "negative": embeds.negative}
    scale = model.pipeline.vae.config.scaling_factor
    for name, weights in (("as stored", "full"), ("6-bit", "search")):
        model.use(weights)
        latents = model.pipeline(
            prompt_embeds=embeds.prompt,
            negative_prompt_embeds=embeds.negative,
            height=128,
            width=128,
            num_frames=33,
            num_inference_steps=STEPS,
            guidance_scale=6.0,
            latents=noise,
            output_type="latent",
            return_dict=False,
            max_sequence_length=embeds.prompt.shape[1],
        )[0]
        tensors[f"latents {name}"] = latents.transpose(1, 2) / scale
    tensors["decoded latents"] = tensors["latents as stored"].clone()
    frames = model.pipeline.decode_latents(tensors["decoded latents"].transpose(1, 2) * scale)[0]
    tensors["frames"] = (frames / 2 + 0.5).clamp(0, 1).permute(1, 2, 3, 0)
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, path)


@pytest.fixture(scope="module")
def found(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    case = tmp_path_factory.mktemp("reference") / "case.safetensors"
    write_case(case)
    return host.run("reference", case=case, prompt=PROMPT, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["as stored", "6-bit"])
def test_reference_equals_diffusers(found: dict, weights: str) -> None:
    assert found[weights]["text"] < 1e-5 and found[weights]["negative"] < 1e-5
    assert found[weights]["latents"] < 5e-4
    assert found[weights]["frames"] < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["as stored", "6-bit"])
def test_reference_is_loaded_by_its_name_too(found: dict, weights: str) -> None:
    """Load 6Bit CogVideoX with the entry that it lists last."""
    assert found[weights]["offered"] is True and found[weights]["by name"] == 0
    assert not found[weights]["copied"]  # it is quantized as it is loaded
    assert (found[weights]["bytes"] < found["as stored"]["bytes"] / 2) == (weights == "6-bit")
