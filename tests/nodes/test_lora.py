"""LoRA files under every known naming; no host needed."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sixbit_diffusion.nodes.lora_file import read_lora

LINEARS = {
    "blocks.0.q": (64, 64),
    "blocks.0.attn_out": (64, 64),
    "blocks.0.ff_proj": (256, 64),
    "blocks.0.ff_out": (64, 256),
    "blocks.0.norm1.linear": (384, 32),
    "blocks.11.k": (64, 64),
    "time_embedding_linear_1": (32, 64),
    "proj_out": (16, 64),
}
DIFFUSERS = {
    "blocks.0.q": "transformer_blocks.0.attn1.to_q",
    "blocks.0.attn_out": "transformer_blocks.0.attn1.to_out.0",
    "blocks.0.ff_proj": "transformer_blocks.0.ff.net.0.proj",
    "blocks.0.ff_out": "transformer_blocks.0.ff.net.2",
    "blocks.0.norm1.linear": "transformer_blocks.0.norm1.linear",
    "blocks.11.k": "transformer_blocks.11.attn1.to_k",
    "time_embedding_linear_1": "time_embedding.linear_1",
    "proj_out": "proj_out",
}
FLAT = {native: name.replace(".", "_") for native, name in DIFFUSERS.items()}
NAMINGS = {
    "diffusers": lambda n: [f"transformer.{DIFFUSERS[n]}.lora_{part}.weight" for part in "AB"],
    "bare diffusers": lambda n: [f"{DIFFUSERS[n]}.lora_{part}.weight" for part in "AB"],
    "old diffusers": lambda n: [f"transformer.{DIFFUSERS[n]}.lora.{part}.weight" for part in ("down", "up")],
    "peft": lambda n: [f"base_model.model.{DIFFUSERS[n]}.lora_{part}.weight" for part in "AB"],
    "peft, named": lambda n: [f"base_model.model.{DIFFUSERS[n]}.lora_{part}.default.weight" for part in "AB"],
    "kohya": lambda n: [f"lora_unet_{FLAT[n]}.lora_{part}.weight" for part in ("down", "up")],
    "kohya's kin": lambda n: [f"lora_unet__{FLAT[n]}.lora_{part}.weight" for part in ("down", "up")],
    "kohya, native": lambda n: [f"lora_unet_{n.replace('.', '_')}.lora_{p}.weight" for p in ("down", "up")],
    "comfyui": lambda n: [f"diffusion_model.{n}.lora_{part}.weight" for part in "AB"],
}


def pair(native: str, rank: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = LINEARS[native]
    generator = torch.Generator().manual_seed(sorted(LINEARS).index(native))
    return torch.randn(rank, columns, generator=generator), torch.randn(rows, rank, generator=generator)


def write(path: Path, naming: str, extra: dict | None = None, metadata: dict | None = None) -> Path:
    tensors = dict(extra or {})
    for native in LINEARS:
        tensors.update(zip(NAMINGS[naming](native), pair(native), strict=True))
    save_file(tensors, path, metadata=metadata)
    return path


@pytest.mark.parametrize("naming", NAMINGS)
def test_every_naming_maps_every_layer(tmp_path: Path, naming: str) -> None:
    found = read_lora(write(tmp_path / "x.safetensors", naming), LINEARS)
    assert set(found.layers) == set(LINEARS) and not found.unmatched
    for native, low in found.layers.items():
        down, up = pair(native)
        assert torch.equal(low.down, down) and torch.equal(low.up, up) and low.scale == 1


def test_attention_processors_of_old_diffusers(tmp_path: Path) -> None:
    key = "transformer_blocks.0.attn1.processor.{}_lora.{}.weight"
    down, up = pair("blocks.0.attn_out")
    tensors = {key.format("to_out", "down"): down, key.format("to_out", "up"): up}
    save_file(tensors, tmp_path / "x.safetensors")
    assert set(read_lora(tmp_path / "x.safetensors", LINEARS).layers) == {"blocks.0.attn_out"}


def test_alpha_of_kohya_counts_by_layer(tmp_path: Path) -> None:
    alphas = {f"lora_unet_{FLAT['blocks.0.q']}.alpha": torch.tensor(2.0)}
    found = read_lora(write(tmp_path / "x.safetensors", "kohya", alphas), LINEARS)
    assert found.layers["blocks.0.q"].scale == 0.5 and found.layers["blocks.11.k"].scale == 1
    assert not found.unmatched


def test_alpha_of_diffusers_metadata(tmp_path: Path) -> None:
    config = {"transformer.lora_alpha": 8, "transformer.r": 4, "transformer.alpha_pattern": {"attn1.to_k": 2}}
    metadata = {"lora_adapter_metadata": json.dumps(config)}
    found = read_lora(write(tmp_path / "x.safetensors", "diffusers", metadata=metadata), LINEARS)
    assert found.layers["blocks.0.q"].scale == 2 and found.layers["blocks.11.k"].scale == 0.5


def test_alpha_of_peft_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"lora_alpha": 8, "r": 4, "use_rslora": True}))
    found = read_lora(write(tmp_path / "adapter_model.safetensors", "peft"), LINEARS)
    assert found.layers["blocks.0.q"].scale == 4
    other = read_lora(write(tmp_path / "other.safetensors", "diffusers"), LINEARS)
    assert other.layers["blocks.0.q"].scale == 1


def test_keys_that_match_nothing_are_counted(tmp_path: Path) -> None:
    extra = {
        "text_encoder.layers.0.q.lora_A.weight": torch.zeros(4, 4),
        "transformer.transformer_blocks.99.attn1.to_q.lora_A.weight": torch.zeros(4, 64),
        "transformer.transformer_blocks.0.attn1.to_v.lora_A.weight": torch.zeros(4, 64),
        "transformer.proj_out.lora_B.bias": torch.zeros(16),
    }
    found = read_lora(write(tmp_path / "x.safetensors", "diffusers", extra), LINEARS)
    assert set(found.unmatched) == set(extra) and set(found.layers) == set(LINEARS)


@pytest.mark.parametrize(
    ("tensors", "line"),
    [
        ({"a.lora_A.weight": torch.zeros(4, 4)}, "holds no low-rank pair for a CogVideoX of this kind"),
        (
            {
                "transformer.proj_out.lora_A.weight": torch.zeros(4, 1920),
                "transformer.proj_out.lora_B.weight": torch.zeros(16, 4),
            },
            r"proj_out is \[16, 4\] times \[4, 1920\], this model's is \[16, 64\]",
        ),
        ({"transformer.proj_out.lora_magnitude_vector": torch.zeros(4)}, "is a DoRA"),
        ({"lora_unet_proj_out.dora_scale": torch.zeros(4)}, "is a DoRA"),
    ],
)
def test_what_cannot_be_used_is_one_line(tmp_path: Path, tensors: dict, line: str) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=line) as error:
        read_lora(tmp_path / "x.safetensors", LINEARS)
    assert "\n" not in str(error.value)


def test_a_damaged_configuration_is_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", "diffusers", metadata={"lora_adapter_metadata": "{"})
    with pytest.raises(ValueError, match="its configuration is no readable JSON"):
        read_lora(path, LINEARS)
