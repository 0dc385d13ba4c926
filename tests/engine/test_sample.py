import torch
from diffusers import CogVideoXPipeline
from sixbit_diffusion.engine import sample as sampling
from sixbit_diffusion.engine.sample import ClipSpec, initial_noise, sample
from sixbit_diffusion.engine.settings import Choice, RunSettings, resolve
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig

CLIP = ClipSpec("a red star is moving right", (32, 32), 9, steps=6, seed=3)
EAGER = DeltaCacheConfig(threshold=10.0, max_skips=2, start=0.0)


def settings(precision: str, cache: DeltaCacheConfig | None = None, **changes) -> RunSettings:
    chosen = resolve(Choice(precision=precision, cache="off", **changes), lambda: "")
    return RunSettings(chosen.precision, chosen.dmpq, cache, chosen.predictor, chosen.weights)


def test_nothing_on_is_plain_diffusers_bit_for_bit(tiny, tiny_folder):
    plain = CogVideoXPipeline.from_pretrained(tiny_folder)
    plain.set_progress_bar_config(disable=True)
    expected = plain(
        CLIP.prompt,
        height=32,
        width=32,
        num_frames=9,
        num_inference_steps=6,
        guidance_scale=6.0,
        latents=initial_noise(tiny, CLIP),
        output_type="latent",
        max_sequence_length=16,
    ).frames
    assert torch.equal(sample(tiny, None, CLIP).latents, expected)
    assert torch.equal(sample(tiny, settings("full"), CLIP).latents, expected)


def test_noise_is_drawn_as_comfyui_draws_it(tiny):
    drawn = torch.randn((1, 4, 3, 4, 4), generator=torch.Generator().manual_seed(CLIP.seed))
    assert torch.equal(initial_noise(tiny, CLIP), drawn.transpose(1, 2))


def test_fixed_precisions(tiny):
    full = sample(tiny, None, CLIP).latents
    for precision, bits in (("w4a16", 16), ("w4a8", 8), ("w4a4", 4)):
        run = sample(tiny, settings(precision), CLIP)
        assert run.report.average_activation_bits == bits
        assert run.report.skipped_fraction == 0
        assert not torch.equal(run.latents, full)
        assert torch.isfinite(run.latents).all()


def test_skips_happen_and_cost_no_bits(tiny):
    run = sample(tiny, settings("w4a8", EAGER), CLIP)
    # Two evaluations make the two residuals, then two skips, one computed, and never the last: C C S S C C
    assert run.report.choices["q"] == ("88--88", "88--88")
    assert run.report.skipped_fraction == 2 / 6
    assert run.report.average_activation_bits == 8
    assert run.report.effective_activation_bits == 8 * 4 / 6
    assert run.report.cache_bytes > 0


def test_no_skip_before_start_or_after_end(tiny):
    late = DeltaCacheConfig(threshold=10.0, max_skips=2, start=0.5, end=0.8)
    # progress at each of the six evaluations: 0, 1/6, 2/6, 3/6, 4/6, 5/6
    assert sample(tiny, settings("w4a8", late), CLIP).report.choices["q"][0] == "888--8"


def test_auto_is_settled_by_free_memory_and_reported(tiny, monkeypatch):
    chosen = settings("w4a8", EAGER)
    for free, location in ((None, "auto"), (10**9, "gpu"), (0, "host")):
        monkeypatch.setattr(sampling, "free_bytes", lambda _, free=free: free)
        assert sample(tiny, chosen, CLIP).report.cache["location"] == location


def test_second_run_equals_first(tiny):
    chosen = settings("w4a4", EAGER)
    first, second = sample(tiny, chosen, CLIP), sample(tiny, chosen, CLIP)
    assert torch.equal(first.latents, second.latents)
    assert first.report == second.report


def test_without_guidance_there_is_one_stream(tiny):
    clip = ClipSpec(CLIP.prompt, (32, 32), 9, steps=3, cfg=1.0)
    assert sample(tiny, settings("w4a8"), clip).report.streams == 1
    assert sample(tiny, settings("w4a8"), CLIP).report.streams == 2


def test_other_size_and_length_in_the_same_session(tiny):
    chosen = settings("w4a8", EAGER)
    first = sample(tiny, chosen, CLIP).latents
    other = sample(tiny, chosen, ClipSpec(CLIP.prompt, (32, 48), 17, steps=4))
    assert other.latents.shape == (1, 5, 4, 4, 6)
    assert torch.equal(sample(tiny, chosen, CLIP).latents, first)
