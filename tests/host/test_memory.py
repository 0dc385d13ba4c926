"""The scripts for a GPU machine, here on a CPU: a whole run, tiny, without what may be missing."""

import pytest
import torch

ABSENT = (
    "av",
    "torchsde",
    "torchaudio",
    "sqlalchemy",
    "alembic",
    "kornia",
    "spandrel",
    "pydantic",
    "pydantic_settings",
    "comfyui_frontend_package",
    "comfyui_workflow_templates",
    "comfyui_embedded_docs",
    "simpleeval",
    "blake3",
)


@pytest.fixture(scope="module")
def found(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("models")
    return host.run("gpu", folder=folder, absent=ABSENT)


def test_it_stands_where_the_host_lacks_much(found: dict) -> None:
    assert set(found["stood_in"]) == set(ABSENT)


def test_a_run_is_sampled_and_blocks_are_skipped(found: dict) -> None:
    assert [run["finite"] for run in found["runs"]] == [True] * 3
    assert all(len(run["seconds_by_step"]) == 4 and run["skipped"] > 0 for run in found["runs"])


def test_what_is_needed_is_what_the_line_says(found: dict) -> None:
    run = found["runs"][0]
    assert run["need"] == sum(run["parts"][name] for name in ("weights", "sampling", "cache"))
    assert run["parts"]["weights"] == run["loaded"] and "delta cache up to" in run["status"]


def test_weights_are_loaded_once(found: dict) -> None:
    assert [run["loads"] for run in found["runs"]] == [1, 0, 0]
    assert not found["second_queue_reloads"] and not found["changed_queue_reloads"]


@pytest.mark.slow
def test_the_reference_runs_without_triton(host) -> None:
    """The script that is for a GPU without it, on a CPU: the references serve, and the line says so."""
    found = host.run("paths", absent=["triton"], kitchen=False, steps=2)
    assert found["equal"] and found["psnr_db"] > 25
    assert "Triton is not installed; the PyTorch references serve" in found["said"]


def test_without_a_gpu_it_says_so(host) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "no GPU" in host.run("gpu", cpu=False)["skipped"]
