"""Lists of files and names of copies; no host needed."""

import json
import os
from pathlib import Path

import pytest
from sixbit_diffusion.nodes.files import (
    REFERENCE,
    entry_of,
    file_name,
    find_model,
    list_models,
    quantized_copy,
)


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def listed(root: Path) -> list[str]:
    return [name for name in list_models([root]) if name != REFERENCE]


def test_pipelines_shards_and_files_are_one_entry_each(tmp_path: Path) -> None:
    touch(
        tmp_path,
        "CogVideoX-5b/model_index.json",
        "CogVideoX-5b/transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "CogVideoX-5b/transformer/diffusion_pytorch_model.safetensors.index.json",
        "CogVideoX-5b/vae/diffusion_pytorch_model.safetensors",
        "CogVideoX-5b-6bit.safetensors",
        "shards/a-00001-of-00002.safetensors",
        "shards/a-00002-of-00002.safetensors",
        "shards/a.safetensors.index.json",
        "shards/beside.safetensors",
        "shards/.a.safetensors.tmp-1.safetensors",
        "b-00001-of-00002.safetensors",
        "b-00002-of-00002.safetensors",
        "b.safetensors.index.json",
        "deep/er/one.sft",
        ".cache/x.safetensors",
    )
    assert listed(tmp_path) == [
        "CogVideoX-5b-6bit.safetensors",
        "CogVideoX-5b/",
        "b.safetensors.index.json",
        "deep/er/one.sft",
        "shards/",
        "shards/beside.safetensors",
    ]
    for name in listed(tmp_path):
        path = find_model(name, [tmp_path])
        assert path.exists() and entry_of(path, [tmp_path]) == name.rstrip("/")


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_links_are_followed_and_copies_lie_beside_the_link(tmp_path: Path) -> None:
    root = tmp_path / "models"
    touch(tmp_path, "cache/blob", "other/x.safetensors")
    root.mkdir()
    (root / "linked.safetensors").symlink_to(tmp_path / "cache" / "blob")
    (root / "folder").symlink_to(tmp_path / "other", target_is_directory=True)
    (tmp_path / "other" / "up").symlink_to(root, target_is_directory=True)
    assert listed(root) == ["folder/x.safetensors", "linked.safetensors"]
    copy = quantized_copy(find_model("linked.safetensors", [root]))
    assert copy == root / "linked-6bit.safetensors"


@pytest.mark.parametrize("name", ["../outside.safetensors", "sub/../../outside.safetensors", "gone"])
def test_what_is_not_under_the_folders_is_not_found(tmp_path: Path, name: str) -> None:
    root = tmp_path / "models"
    touch(tmp_path, "outside.safetensors", "models/sub/x.safetensors")
    with pytest.raises(ValueError, match="there is no model"):
        find_model(name, [root])


@pytest.mark.parametrize(
    ("source", "copy"),
    [
        ("CogVideoX1.5-5B/", "CogVideoX1.5-5B-6bit.safetensors"),
        ("one.bf16.safetensors", "one.bf16-6bit.safetensors"),
        ("b.safetensors.index.json", "b-6bit.safetensors"),
    ],
)
def test_name_of_the_copy_says_so(tmp_path: Path, source: str, copy: str) -> None:
    path = tmp_path / source
    if source.endswith("/"):
        path.mkdir()
    else:
        path.write_text(json.dumps({}))
    assert quantized_copy(path) == tmp_path / copy


def test_a_typed_name_is_a_plain_file() -> None:
    assert file_name(" mine ", ".json") == file_name("mine.json", ".json") == "mine.json"
    for name in ("", "  ", "../mine", "a/b", "a\\b", ".hidden", "a\nb", "c:d"):
        with pytest.raises(ValueError, match="name must be that of a file"):
            file_name(name, ".json")
