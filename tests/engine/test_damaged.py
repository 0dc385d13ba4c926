"""A damaged pipeline folder is refused in one line; it never gives a clip of something else."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from sixbit_diffusion.engine.cli import main
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.facts import read_facts
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import load_model

CPU = find_machine("cpu")


@pytest.fixture
def folder(tiny_folder, tmp_path) -> Path:
    return shutil.copytree(tiny_folder, tmp_path / "model")


def generate(folder: Path, out: Path) -> int:
    where = ["--model", str(folder), "--out", str(out), "--device", "cpu"]
    return main(["generate", *where, "--prompt", "a star", "--steps", "2", "--precision", "w4a8"])


def test_a_tokenizer_without_a_vocabulary(folder):
    for name in ("tokenizer.json", "spiece.model"):
        (folder / "tokenizer" / name).unlink(missing_ok=True)
    with pytest.raises(InputError, match=r"holds none of tokenizer.json, spiece.model"):
        read_facts(str(folder))


def test_a_tokenizer_to_which_every_word_is_unknown(folder):
    file = folder / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"] = [*tokenizer["model"]["vocab"][:3], ["▁", -2.0]]
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="knows no English word"):
        load_model(str(folder), None, "full", CPU)


@pytest.mark.parametrize("part", ["text_encoder/model", "vae/diffusion_pytorch_model"])
def test_a_part_that_lacks_a_tensor(part, folder):
    file = folder / f"{part}.safetensors"
    tensors = load_file(file)
    gone = next(name for name in sorted(tensors) if "weight" in name and "shared" not in name)
    tensors["another.name"] = tensors.pop(gone)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=f"lacks the tensor {gone}"):
        load_model(str(folder), None, "full", CPU)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("model_index.json", "{}"),
        ("model_index.json", "[]"),
        ("model_index.json", '{"_class_name": "CogVideoXPipeline", "vae": ["diffusers"]}'),
        ("vae/config.json", '{"block_out_channels": null, "scaling_factor": "x"}'),
        ("vae/config.json", "{}"),
        ("text_encoder/config.json", '{"d_model": "wide"}'),
        ("text_encoder/config.json", "{}"),
        ("scheduler/scheduler_config.json", '{"num_train_timesteps": "many"}'),
        ("transformer/config.json", '{"sample_width": "wide"}'),
        ("tokenizer/tokenizer.json", "{}"),
    ],
)
def test_a_broken_json_is_one_line(file, text, folder, tmp_path, capsys):
    (folder / file).write_text(text)
    code = generate(folder, tmp_path / "out")
    err = capsys.readouterr().err
    assert code == 2, err
    assert err.count("\n") == 1 and str(folder) in err


def test_frames_that_are_not_finite_are_not_written(folder, tmp_path, capsys):
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors["decoder.conv_out.conv.bias"].fill_(torch.nan)
    save_file(tensors, file, {"format": "pt"})
    assert generate(folder, tmp_path / "out") == 1
    assert "not finite" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
