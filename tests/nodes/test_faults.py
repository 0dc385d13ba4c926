"""Names and files that nodes are given, where no host is needed: one line, nothing outside the folders."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from sixbit_diffusion.nodes import files as files_module
from sixbit_diffusion.nodes.files import REFERENCE, file_name, find_model, list_models
from sixbit_diffusion.nodes.lora_file import CONFIG, read_lora
from sixbit_diffusion.nodes.predictors import find_predictor, list_predictors

LINEARS = {"blocks.0.q": (64, 64)}
KEY = "diffusion_model.blocks.0.q"
HOSTILE = {
    "a folder up": "../outside",
    "far up": "../../../../../../etc/passwd",
    "down and up": "sub/../../outside",
    "absolute": "/etc/passwd",
    "on a drive": "C:\\Windows\\win",
    "backslashes": "..\\outside",
    "a zero": "a\0b",
    "long": "a" * 300,
    "long in bytes": "模" * 80,
    "two lines": "a\nb",
    "an escape": "\x1b[31m",
    "in no encoding": "\udcff",
}


def check_line(error: BaseException) -> str:
    line = str(error)
    assert line.isprintable() and 0 < len(line) <= 1200, line
    return line


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_find_no_file(tmp_path: Path, name: str) -> None:
    root = tmp_path / "models"
    (root / "sub").mkdir(parents=True)
    for file in ("outside.safetensors", "outside.json"):
        (tmp_path / file).write_text("{}")
    given = HOSTILE[name]
    with pytest.raises(ValueError) as caught:
        find_model(f"{given}.safetensors", [root])
    assert "there is no model" in check_line(caught.value)
    with pytest.raises(ValueError) as caught:
        find_predictor(f"{given}.json", root, "00")
    line = check_line(caught.value)
    assert "name must be that of a file, without a folder" in line or "there is no predictor file" in line
    if (
        "/" in given
        or "\\" in given
        or not given.isprintable()
        or len(given.encode("utf-8", "replace")) > 200
    ):
        with pytest.raises(ValueError, match="name must be that of a file"):
            file_name(given, ".json")


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", ".hidden", "CON", "nul.txt", "com1", "a:b", "a*", 'a"b']
)
def test_names_that_no_file_can_have_everywhere(name: str) -> None:
    with pytest.raises(ValueError, match="name must be that of a file"):
        file_name(name, ".safetensors")


@pytest.mark.parametrize("name", ["mine", "Bärenfüße 模型 🎬", "console", "v1.2-final (copy)", "a" * 200])
def test_names_that_are_fine(tmp_path: Path, name: str) -> None:
    made = file_name(f" {name} ", ".json")
    assert made == file_name(f"{name}.json", ".json") == f"{name}.json"
    (tmp_path / made).touch()
    assert list_predictors(tmp_path)[1:] == [made]


def test_what_a_killed_process_leaves_is_in_no_list(tmp_path: Path) -> None:
    for name in (".a.safetensors.tmp-1", ".clip.tmp-1.safetensors", ".p.tmp-1.json"):
        (tmp_path / name).touch()
    assert list_models([tmp_path]) in ([], [REFERENCE]) and len(list_predictors(tmp_path)) == 1


def test_the_reference_says_where_to_get_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files_module, "reference_folder", lambda: tmp_path / "reference" / "pipeline")
    assert REFERENCE not in list_models([tmp_path])
    with pytest.raises(ValueError) as caught:
        find_model(REFERENCE, [tmp_path])
    line = check_line(caught.value)
    assert "copy the folder reference/pipeline of the pack's repository to" in line and str(tmp_path) in line


def change(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """A good pair, with some tensors in the place of others."""
    pair = {"lora_A.weight": torch.ones(4, 64), "lora_B.weight": torch.ones(64, 4), **tensors}
    return {f"{KEY}.{name}": tensor for name, tensor in pair.items() if tensor is not None}


NO_ALPHA = "the alpha of blocks.0.q is no number"
LORAS: dict[str, tuple[dict[str, torch.Tensor], dict | None, str]] = {
    "nothing": ({}, None, "holds no low-rank pair"),
    "half a pair": (change(**{"lora_B.weight": None}), None, "holds no low-rank pair"),
    "other keys": ({"a\nb\x1b[31m" + "c" * 5000: torch.ones(1)}, None, "only keys like"),
    "another model's": (change(**{"lora_A.weight": torch.ones(4, 32)}), None, "this model's is [64, 64]"),
    "of rank 0": (
        change(**{"lora_A.weight": torch.ones(0, 64), "lora_B.weight": torch.ones(64, 0)}),
        None,
        "this model's is [64, 64]",
    ),
    "of one dimension": (change(**{"lora_A.weight": torch.ones(64)}), None, "this model's is [64, 64]"),
    "in whole numbers": (
        change(**{"lora_A.weight": torch.ones(4, 64).to(torch.int8)}),
        None,
        "needed are floats",
    ),
    "alpha NaN": (change(alpha=torch.tensor(math.nan)), None, NO_ALPHA),
    "two alphas": (change(alpha=torch.ones(2)), None, NO_ALPHA),
    "no alpha in it": (change(alpha=torch.ones(0)), None, NO_ALPHA),
    "alpha by pattern in text": (change(), {"alpha_pattern": {"blocks.0.q": "x"}}, NO_ALPHA),
    "alpha beyond a float": (change(), {"lora_alpha": math.inf}, NO_ALPHA),
    "configuration a list": (change(), [], "its configuration is no JSON object"),
    "DoRA": (change(), {"use_dora": True}, "is a DoRA"),
}


@pytest.mark.parametrize("name", LORAS)
def test_loras_that_are_refused(tmp_path: Path, name: str) -> None:
    tensors, config, said = LORAS[name]
    path = tmp_path / "adapter_model.safetensors"
    save_file(tensors, path)
    if config is not None:
        (tmp_path / CONFIG).write_text(json.dumps(config))
    with pytest.raises(ValueError) as caught:
        read_lora(path, LINEARS)
    assert said in check_line(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\x00"])
def test_a_lora_whose_configuration_is_damaged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "adapter_model.safetensors"
    save_file(change(), path)
    assert read_lora(path, LINEARS).layers
    (tmp_path / CONFIG).write_text(text or os.linesep)
    with pytest.raises(ValueError, match="its configuration is no readable JSON"):
        read_lora(path, LINEARS)
