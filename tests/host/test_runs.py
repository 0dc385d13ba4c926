"""Sampling runs in a real host: off is off, runs repeat, nothing is left, every sampler and cut works."""

import pytest

pytest.importorskip("diffusers")
from host_cases import VARIANTS, make_transformer

CHECKS = {
    "off_is_bit_equal": True,
    "off_is_counted_and_timed": [],
    "skips_happen_and_repeat": True,
    "text_goes_to_the_node_that_samples": [],
    "a_host_without_the_channel_samples_as_ever": True,
    "what_will_run_is_said_before": True,
    "runs_of_other_sizes_do_not_disturb": True,
    "joint_split_and_reordered_calls_agree": [],
    "batches_agree_with_single_clips": True,
    "texts_of_other_lengths_run": True,
    "samplers_and_cuts_run": [],
    "evaluations_are_counted": True,
    "progress_comes_from_sigma": True,
    "last_evaluation_is_never_skipped": True,
    "interrupting_leaves_nothing": [],
    "step_caches_beside_warn": [],
    "two_cache_nodes_the_last_counts_and_it_is_said": [],
    "six_bit_copy_is_made_once": True,
    "dmpq_routes_and_repeats": [],
    "int8_protect_is_in_16_bits_at_both_ends": [],
    "six_bit_activations_follow_the_machine": [],
    "int8_runs_without_triton_by_every_product": [],
    "several_gpus_are_left_alone": [],
    "six_bit_blocks_are_fused": [],
    "weights_streamed_through_one_buffer_are_right": [],
    "interrupting_a_fused_block_leaves_nothing": [],
    "runs_unlike_the_calibration_are_said": [
        "6Bit: the predictor was calibrated at 50 steps, this run has 8 steps: the bits may come out "
        "otherwise than asked for"
    ],
    "another_scheduler_or_guidance_is_said": {
        "the same": [],
        "the engine's": [],
        "ddim, which is euler": [],
        "other steps": ["8 steps, this run has 4 steps"],
        "CFG": ["CFG 6.0, this run has CFG 3.0"],
        "no guidance": ["CFG 6.0, this run has CFG 1.0"],
        "sampler": ["euler simple, this run has heun simple"],
        "a sampler of steps of its own": [],
        "schedule": ["euler simple, this run has euler on another schedule"],
        "both": ["heun karras, this run has euler on another schedule"],
        "some of the steps": ["8 steps, this run has 3 steps"],
        "gone from this host": [],
    },
    "dmpq_needs_six_bits": "Apply DMPQ needs a model with 6-bit weights; "
    "load it with Load 6Bit CogVideoX, weights 6-bit",
    "stock_lora_acts_and_leaves": [],
    "lowvram_is_equal": [],
    "unloading_frees_everything": [],
    "other_models_are_refused": "this node needs a CogVideoX model, got SimpleNamespace; "
    "load one with Load 6Bit CogVideoX",
}


@pytest.fixture(scope="module")
def results(host, tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("diffusion_models")
    make_transformer(VARIANTS["5b"]).save_pretrained(folder / "tiny", max_shard_size="200KB")
    answer = host.run("runs", folder=folder)
    if not host.digests:  # test_robustness did not come before
        host.digests.append(host.run("digest", folder=folder)["digest"])
    host.digests.append(answer["digest"])
    return answer["results"]


def test_every_check_is_asked_for(results: dict) -> None:
    assert set(results) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_run(results: dict, name: str) -> None:
    assert results[name] == CHECKS[name]


def test_a_fresh_process_gives_the_same_clip(host, results: dict) -> None:
    assert len(host.digests) > 1 and len(set(host.digests)) == 1
