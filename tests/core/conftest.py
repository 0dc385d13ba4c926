"""Tiny random CogVideoX transformers of every published kind, and the ways a checkpoint is stored."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

BASE = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "num_layers": 2,
    "time_embed_dim": 32,
    "text_embed_dim": 32,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 9,
    "max_text_seq_length": 8,
}
ROTARY = {"use_rotary_positional_embeddings": True}
KINDS = {
    "2b": {},
    "5b": ROTARY,
    "5b-i2v": {**ROTARY, "in_channels": 32, "use_learned_positional_embeddings": True},
    "1.5": {**ROTARY, "patch_size_t": 2},
    "1.5-i2v": {**ROTARY, "patch_size_t": 2, "in_channels": 32, "ofs_embed_dim": 32},
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def tiny():
    """`tiny(kind, dtype)` -> a random diffusers model."""
    models = pytest.importorskip("diffusers.models.transformers.cogvideox_transformer_3d")

    def build(kind: str = "5b", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
        torch.manual_seed(0)
        return models.CogVideoXTransformer3DModel(**{**BASE, **KINDS[kind]}).to(dtype)

    return build


@pytest.fixture
def native_state():
    """`native_state(model)` -> its state dict under native names."""
    from sixbit_diffusion.sixbit_core.families import to_native

    return lambda model: {to_native(k): v.contiguous() for k, v in model.state_dict().items()}


@pytest.fixture(scope="session")
def made() -> dict[tuple[str, torch.dtype], dict[str, torch.Tensor]]:
    """Native state dicts that `native_file` has made."""
    return {}


@pytest.fixture
def native_file(tmp_path: Path, tiny, native_state, made):
    """`native_file(kind, dtype, change)` -> a native checkpoint of a tiny model, `change(state)` applied."""

    def build(kind="5b", dtype=torch.bfloat16, change=lambda state: None, metadata=None) -> Path:
        if (kind, dtype) not in made:
            made[kind, dtype] = native_state(tiny(kind, dtype))
        state = {name: tensor.clone() for name, tensor in made[kind, dtype].items()}
        change(state)
        path = tmp_path / "native.safetensors"
        save_file(state, path, metadata)
        return path

    return build


@pytest.fixture
def store(tmp_path: Path, native_state):
    """`store(model, way)` -> a checkpoint of the model, stored in one of `WAYS`."""

    def save(model: torch.nn.Module, way: str) -> Path:
        path = tmp_path / way
        if way == "transformer folder":
            model.save_pretrained(path)
        elif way == "sharded folder":
            model.save_pretrained(path, max_shard_size="400KB")
            assert len(list(path.glob("*.safetensors"))) > 1
        elif way == "index file":
            model.save_pretrained(path, max_shard_size="400KB")
            return path / "diffusion_pytorch_model.safetensors.index.json"
        elif way == "pipeline folder":
            model.save_pretrained(path / "transformer")
            (path / "model_index.json").write_text(json.dumps({"_class_name": "CogVideoXPipeline"}))
        else:
            native = "native" in way
            state = (
                native_state(model) if native else {k: v.contiguous() for k, v in model.state_dict().items()}
            )
            prefix = {"full": "model.diffusion_model.", "pack": "diffusion_model."}.get(way.split()[0], "")
            state = {prefix + k: v for k, v in state.items()}
            if prefix:
                state["first_stage_model.decoder.weight"] = torch.zeros(3)
            path = path.with_suffix(".safetensors")
            save_file(state, path)
        return path

    return save


WAYS = (
    "transformer folder",
    "sharded folder",
    "index file",
    "pipeline folder",
    "single diffusers",
    "single native",
    "full native",
    "full diffusers",
    "pack native",
)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param
