"""6-bit copies in a real host: said first, made once, checked by fingerprint, and nothing left behind."""

from pathlib import Path

import pytest
from sixbit_diffusion.sixbit_core.checkpoint import open_checkpoint
from sixbit_diffusion.sixbit_core.quantize_weight import METHODS

pytest.importorskip("diffusers")
from host_cases import VARIANTS, make_transformer, save_pipeline
from safetensors.torch import save_file

CHECKS = {
    "every_source_gives_one_model": [],
    "copy_is_said_made_once_and_taken_again": [],
    "copy_of_other_weights_is_refused": "other-6bit.safetensors is no 6-bit copy of other.safetensors; "
    "move or delete it",
    "a_full_disk_is_said_before": ["0.00 GB free; free some space", "0.00 GB free; free some space", True],
    "node_writes_what_was_asked_for": [],
    "plain_nvfp4_loads": True,
    "wrong_requests_are_one_line": [
        "rtn-off.safetensors exists and is another file; choose another name or delete it",
        "is quantized already; give the original checkpoint",
        "name must be that of a file, without a folder, got '../up'; take letters and digits",
        "small CogVideoX overflows in float16 and gives a black clip; use its bfloat16 weights",
        "there is no model gone in the diffusion_models folders; choose one of the list",
    ],
    "interrupting_leaves_no_file": [],
}


@pytest.fixture(scope="module")
def found(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = Path(tmp_path_factory.mktemp("diffusion_models"))
    model = make_transformer(VARIANTS["5b"])
    model.save_pretrained(folder / "tiny", max_shard_size="200KB")
    save_pipeline(VARIANTS["5b"], model, folder / "pipeline")
    (folder / "pipeline" / "model_index.json").write_text("{}")
    checkpoint = open_checkpoint(folder / "tiny")
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.infos}
    config = {"sixbit_config": (folder / "tiny" / "config.json").read_text()}
    save_file(tensors, folder / "native.safetensors", metadata=config)
    prefixed = {f"model.diffusion_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(prefixed, folder / "prefixed.safetensors", metadata=config)
    return host.run("quantize", folder=folder)


def test_every_check_is_asked_for(found: dict) -> None:
    assert set(found["results"]) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_quantize(found: dict, name: str) -> None:
    result, expected = found["results"][name], CHECKS[name]
    if isinstance(expected, list) and isinstance(result, list) and len(expected) == len(result):
        assert all(a == e or str(a).endswith(str(e)) for a, e in zip(result, expected, strict=True)), result
    else:
        assert result == expected


def test_only_methods_that_exist_are_listed(found: dict) -> None:
    assert found["methods"] == list(METHODS)
