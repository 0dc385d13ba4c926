"""What users do to a graph in a real host: batches, cuts, compilers, other GPUs, little memory, wrong use."""

from pathlib import Path

import pytest

pytest.importorskip("diffusers")
from host_cases import VARIANTS, make_transformer, save_pipeline
from safetensors.torch import save_file

NO_FAULTS = (
    "batches_equal_single_clips",
    "chunking_may_change_in_mid_run",
    "other_sizes_equal_a_fresh_model",
    "split_sigmas_and_custom_samplers_run",
    "later_models_keep_their_length",
    "conditionings_may_come_and_go",
    "every_gpu_gets_a_path",
    "the_cache_goes_where_there_is_room",
    "what_a_hook_adds_in_place_is_added_once",
    "too_little_host_memory_is_said_before",
    "sizes_are_those_of_the_tensors",
    "nothing_of_a_run_lives_on",
    "twenty_runs_of_changing_sizes_end_where_they_began",
    "image_to_video_takes_any_image",
)
SAID = {  # a part of the one line
    "size": "small CogVideoX takes width and height in multiples of 16, got 100x64; the nearest is 96x64",
    "frames": "small CogVideoX takes 8N+1 frames, got 10; nearest are 9 and 17",
    "frames of 1.5": "small CogVideoX takes 16N+1 frames, got 9; nearest are 1 and 17",
    "size of a table": "small CogVideoX makes clips of 96x64 only, got 80x64; use 96x64",
    "not CogVideoX": "this node needs a CogVideoX model, got Stock; load one with Load 6Bit CogVideoX",
    "odd latent": "takes width and height in multiples of 16, got 96x56; the nearest is 96x64",
    "picture latent": "needs a video latent (B, C, frames, h, w), got [1, 4, 8, 12]; use Empty CogVideoX",
    "channels": "small CogVideoX takes latents of 4 channels, got 16; use its own VAE",
    "no image": "small CogVideoX needs an image; put CogVideoX Image to Video before the sampler",
    "image for text to video": "makes video from text alone; take CogVideoX Image to Video out, or",
    "image size without a model": "width and height in multiples of 16, got 100x64; the nearest is 96x64",
    "image frames with a model": "small CogVideoX takes 8N+1 frames, got 10; nearest are 9 and 17",
    "predictor": "the predictor was calibrated on other weights (cogvideox-5b, 00) than this model's",
    "router without predictor": 'router "gamma" needs a predictor for this model and there is none',
    "context windows": "cannot tell context windows apart; take one of the two out of the graph",
    "cache range": "start and end need 0 <= start < end <= 1, got 0.9 and 0.2",
    "truncated": "truncated.safetensors is cut short at transformer_blocks.",
    "half": "half.safetensors: small CogVideoX overflows in float16 and gives a black clip; use its "
    "bfloat16 weights",
    "lone": "lone.safetensors: proj_out.weight is missing; download the checkpoint again",
}


@pytest.fixture(scope="module")
def found(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = Path(tmp_path_factory.mktemp("models"))
    make_transformer(VARIANTS["5b"]).save_pretrained(folder / "tiny", max_shard_size="200KB")
    make_transformer(VARIANTS["1.5"]).save_pretrained(folder / "tiny-1.5")
    image = VARIANTS["5b-i2v"]
    save_pipeline(image, make_transformer(image), folder / "tiny-i2v")
    whole = make_transformer(VARIANTS["5b"]).state_dict()
    save_file(whole, folder / "whole.safetensors")
    raw = (folder / "whole.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(raw[: len(raw) // 2])
    save_file({name: tensor.half() for name, tensor in whole.items()}, folder / "half.safetensors")
    shard = sorted((folder / "tiny").glob("*.safetensors"))[0]
    (folder / "lone.safetensors").write_bytes(shard.read_bytes())
    answer = host.run("robustness", folder=folder, absent=["diffusers", "triton"])
    host.digests.append(answer["digest"])
    return answer


def test_every_check_is_asked_for(found: dict) -> None:
    others = {"two_samplers_in_a_graph_do_not_disturb", "wrong_use_is_said_in_one_line"}
    assert set(found["results"]) == {*NO_FAULTS, *others}


@pytest.mark.parametrize("name", NO_FAULTS)
def test_nothing_is_wrong_with(found: dict, name: str) -> None:
    assert found["results"][name] == []


def test_two_samplers_in_a_graph_do_not_disturb(found: dict) -> None:
    assert found["results"]["two_samplers_in_a_graph_do_not_disturb"] is True


@pytest.mark.parametrize("use", SAID)
def test_wrong_use_is_said_in_one_line(found: dict, use: str) -> None:
    line = found["results"]["wrong_use_is_said_in_one_line"][use]
    assert SAID[use] in line and "\n" not in line


def test_no_other_wrong_use_was_tried(found: dict) -> None:
    assert set(found["results"]["wrong_use_is_said_in_one_line"]) == set(SAID)


@pytest.mark.slow
def test_compiling_changes_nothing(host, tmp_path: Path) -> None:
    make_transformer(VARIANTS["5b"]).save_pretrained(tmp_path / "tiny")
    assert host.run("compiling", folder=tmp_path)["results"] == {"compiling_changes_nothing": []}
