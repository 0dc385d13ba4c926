"""The committed pipeline."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from sixbit_diffusion.reference import models
from sixbit_diffusion.reference.tokenizer import load_tokenizer, token_ids

FOLDER = Path(models.__file__).parent / "pipeline"
FILES = sorted(path for path in FOLDER.rglob("*") if path.is_file())


def config(part, name="config.json"):
    return json.loads((FOLDER / part / name).read_text())


def test_sizes():
    sizes = [path.stat().st_size for path in FILES]
    assert max(sizes) <= 16e6 and sum(sizes) <= 48e6
    assert not [path for path in FILES if path.suffix in {".bin", ".pt", ".pth", ".ckpt", ".pkl"}]


def test_every_tensor_has_sixteen_bits():
    count = 0
    for path in FILES:
        if path.suffix != ".safetensors":
            continue
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(key)
                assert tensor.dtype in (torch.bfloat16, torch.float16) and tensor.isfinite().all(), key
                count += tensor.numel()
    assert 16e6 < count < 20e6


def test_configurations():
    transformer = config("transformer")
    assert transformer["use_rotary_positional_embeddings"] is True
    assert (transformer["num_layers"], transformer["num_attention_heads"]) == (12, 4)
    assert transformer["sample_frames"] == 33 and transformer["max_text_seq_length"] == 32
    scheduler = config("scheduler", "scheduler_config.json")
    assert scheduler["_class_name"] == "CogVideoXDDIMScheduler"
    assert scheduler["prediction_type"] == "v_prediction" and scheduler["timestep_spacing"] == "trailing"
    assert scheduler["rescale_betas_zero_snr"] is True and scheduler["set_alpha_to_one"] is True
    assert scheduler["clip_sample"] is False and scheduler["snr_shift_scale"] == 1.0
    assert scheduler == {
        **scheduler,
        **{k: v for k, v in models.make_scheduler().config.items() if k[0] != "_"},
    }
    assert config("text_encoder")["vocab_size"] == len(load_tokenizer())
    assert config("vae")["latent_channels"] == transformer["in_channels"] == 16


def test_no_path_of_a_machine_is_kept():
    for path in FILES:
        if path.suffix in {".json", ".md"} and path.name != "tokenizer.json":
            text = path.read_text(encoding="utf-8")
            assert "_name_or_path" not in text, path
            if path.suffix == ".json":
                values = json.dumps(json.loads(text))
                assert '"/' not in values and ":\\\\" not in values, path


@pytest.fixture(scope="module")
def pipeline():
    from diffusers import CogVideoXPipeline

    return CogVideoXPipeline.from_pretrained(FOLDER)


def test_it_loads_without_a_dtype(pipeline):
    parts = (pipeline.transformer, pipeline.vae, pipeline.text_encoder)
    assert {part.dtype for part in parts} == {torch.float32}
    assert 14e6 < sum(p.numel() for p in pipeline.transformer.parameters()) < 15e6


def test_it_makes_one_step(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline(
        "a red circle moves left on a white background",
        num_inference_steps=1,
        guidance_scale=1.0,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(0),
        output_type="latent",
    ).frames
    assert made.shape == (1, 9, 16, 16, 16) and made.isfinite().all() and 0.2 < made.std() < 2


def test_it_listens_to_the_caption(pipeline):
    """At full noise v is minus the clip: its guess must have the background that the caption names."""
    ids = token_ids(load_tokenizer(), ["a red circle stays still on a white background", ""])
    with torch.inference_mode():
        text = pipeline.text_encoder(ids)[0]
        noise = torch.randn(1, 9, 16, 16, 16, generator=torch.Generator().manual_seed(0))
        guess = -pipeline.transformer(
            hidden_states=noise.expand(2, -1, -1, -1, -1),
            encoder_hidden_states=text,
            timestep=torch.tensor([999, 999]),
            image_rotary_emb=models.rotary_tables(64, "cpu"),
            return_dict=False,
        )[0]
        frames = pipeline.decode_latents(guess[:, :1])
    asked, empty = frames[:, :, 0, :4].mean(dim=(2, 3))
    assert asked.min() > 0.7  # white; without a caption, the mean of all backgrounds
    assert empty.abs().max() < 0.6
