"""Bad input to the nodes in a real host, the pack being what ComfyUI's registry installs."""

import zipfile
from pathlib import Path

import pytest

pytest.importorskip("diffusers")
from comfy_server import ROOT
from host_cases import VARIANTS, make_transformer, save_pipeline


@pytest.fixture(scope="module")
def found(host, archive: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("host")
    with zipfile.ZipFile(archive) as file:
        file.extractall(folder / "pack")
    good = folder / "models" / "diffusion_models" / "good"
    save_pipeline(VARIANTS["5b"], make_transformer(VARIANTS["5b"]), good)
    (good / "model_index.json").write_text("{}")
    for name in ("secret.safetensors", "secret.json"):
        (folder / "models" / name).write_text("{}")
    return host.run("faults", root=folder / "pack", folder=folder / "models", absent=["diffusers", "triton"])


def test_every_answer_is_one_line_before_sampling(found: dict) -> None:
    assert len(found["rows"]) >= 40
    for name, line, words in found["rows"]:
        assert words in line and line.isprintable() and len(line) < 1200, name
    assert "Traceback" not in found["log"]


def test_the_archive_has_every_node_and_no_reference(found: dict) -> None:
    assert sorted(found["nodes"]) == sorted(page.stem for page in (ROOT / "web" / "docs").glob("*.md"))
    assert found["listed"] == ["good/", "six.safetensors", "bundled"]
