import pytest
import torch
from sixbit_diffusion.engine import sample as sampling
from sixbit_diffusion.engine.attach import attached, swapped
from sixbit_diffusion.engine.sample import ClipSpec, initial_noise, sample
from sixbit_diffusion.engine.schedule import TimestepReader, plan
from sixbit_diffusion.engine.settings import Choice, resolve
from sixbit_diffusion.engine.trajectory import record, trajectory_error
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig, DMPQConfig
from sixbit_diffusion.sixbit_core.run import RunState

CLIP = ClipSpec("a blue ring", (32, 32), 9, steps=4)


def left_behind(model) -> list[str]:
    """Modules of either transformer that carry a forward of their own."""
    return [
        f"{weights}: {name}"
        for weights, transformer in model.transformers.items()
        for name, module in transformer.named_modules()
        if "forward" in module.__dict__
    ]


def test_swapped_forward_runs_inside_only(tiny):
    inside = []
    chosen = resolve(Choice(precision="dmpq"), lambda: "")
    sample(tiny, chosen, CLIP, on_step=lambda *_: inside.append(len(left_behind(tiny))))
    assert inside == [1 + 2] * 4  # transformer and two blocks, which compute their linears themselves
    assert left_behind(tiny) == []


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt()])
def test_nothing_stays_after_a_run_that_ends_badly(tiny, error):
    chosen = resolve(Choice(precision="w4a8"), lambda: "")
    expected = sample(tiny, chosen, CLIP).latents

    def stop(done: int, of: int) -> None:
        if done == 2:
            raise error

    with pytest.raises(type(error)):
        sample(tiny, chosen, CLIP, on_step=stop)
    assert left_behind(tiny) == []
    assert torch.equal(sample(tiny, chosen, CLIP).latents, expected)


def test_state_is_closed_after_a_run_that_ends_badly(tiny, monkeypatch):
    runs = []

    class Watched(RunState):
        def close(self) -> None:
            runs.append(self)
            super().close()

    monkeypatch.setattr(sampling, "RunState", Watched)

    def stop(done: int, of: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        sample(tiny, resolve(Choice(precision="w4a8"), lambda: ""), CLIP, on_step=stop)
    assert len(runs) == 1


def test_two_runs_at_once_are_refused(tiny):
    transformer = tiny.use("full")
    with (
        swapped([(transformer, transformer.forward)]),
        pytest.raises(RuntimeError, match="forward of its own"),
    ):
        sample(tiny, resolve(Choice(precision="full"), lambda: ""), CLIP)
    assert left_behind(tiny) == []


def test_first_latent_that_is_not_finite_stops_the_run(tiny):
    steps = []
    transformer = tiny.use("full")
    clean = transformer.proj_out.bias.detach().clone()

    def spoil(done: int, of: int) -> None:
        steps.append(done)
        if done == 2:
            transformer.proj_out.bias.data.fill_(float("nan"))

    try:
        with pytest.raises(RuntimeError, match=r"not finite .* after step 3"):
            sample(tiny, None, ClipSpec(CLIP.prompt, (32, 32), 9, steps=10), on_step=spoil)
    finally:
        transformer.proj_out.bias.data.copy_(clean)
    assert steps[-1] <= 4


def test_bad_block_is_named(tiny):
    transformer = tiny.use("search")
    bias = transformer.transformer_blocks[1].ff.net[2].bias
    clean = bias.clone()
    bias.fill_(float("inf"))
    try:
        with pytest.raises(RuntimeError, match="block 1"):
            sample(tiny, resolve(Choice(precision="w4a8"), lambda: ""), CLIP)
    finally:
        bias.copy_(clean)
    assert left_behind(tiny) == []


def test_an_evaluation_is_found_by_its_timestep(tiny):
    recording = record(tiny, CLIP)
    transformer, run = tiny.use("search"), RunState(tiny.layout, DMPQConfig(router="int8"))
    evaluations = plan(tiny.pipeline.scheduler, CLIP.steps)
    with torch.no_grad(), attached(transformer, run, evaluations, tiny.facts.family):
        for index in (2, 2, 1):
            transformer(**recording.inputs[index])
        with pytest.raises(RuntimeError, match="timestep 3, which the schedule does not have"):
            transformer(**{**recording.inputs[0], "timestep": torch.tensor([3, 3])})
    assert run.report().progress == (0.5, 0.5, 0.25)
    run.close()


def test_a_list_of_timesteps_is_brought_to_the_host_once(monkeypatch):
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(1) or tolist(tensor))
    reader, steps = TimestepReader(), torch.tensor([999, 749, 499, 249])
    assert [reader.read(t.expand(2)) for t in steps] == [999, 749, 499, 249] and len(reads) == 1
    assert reader.read(steps[2]) == 499 and reader.read(7) == 7 and len(reads) == 1
    steps[2] = 3
    assert reader.read(steps[2]) == 3 and reader.read(torch.tensor([5, 6])[1:]) == 6 and len(reads) == 3
    with torch.inference_mode():
        assert reader.read(torch.tensor([8, 8])) == 8


def test_a_run_reads_its_timesteps_twice(tiny, monkeypatch):
    """Once for the blocks, once for the sampler; nothing else of an evaluation waits for the device."""
    found, read = [], TimestepReader._knows
    monkeypatch.setattr(
        TimestepReader, "_knows", lambda self, t: found.append(read(self, t)) or found[-1], raising=True
    )
    sample(tiny, resolve(Choice(precision="w4a8"), lambda: ""), CLIP)
    assert len(found) == 8 and found.count(False) == 2


def test_two_items_of_a_batch_are_two_streams_each(tiny):
    """What each item becomes does not depend on its neighbour, as long as the decisions are the same."""
    eager = DeltaCacheConfig(threshold=10.0, max_skips=2, start=0.0)
    clips = [ClipSpec(text, (32, 32), 9, steps=6, seed=n) for n, text in enumerate(("a ring", "a red star"))]
    embeds = [tiny.encode(clip.prompt) for clip in clips]
    transformer, pipeline = tiny.use("search"), tiny.pipeline
    made = []
    for picked in ((0,), (1,), (0, 1)):
        run = RunState(
            tiny.layout, DMPQConfig(router="bf16"), eager
        )  # INT8 would round sums of other orders apart
        evaluations = plan(pipeline.scheduler, 6)
        with attached(transformer, run, evaluations, tiny.facts.family):
            latents = pipeline(
                prompt_embeds=torch.cat([embeds[n].prompt for n in picked]),
                negative_prompt_embeds=torch.cat([embeds[n].negative for n in picked]),
                height=32,
                width=32,
                num_frames=9,
                num_inference_steps=6,
                latents=torch.cat([initial_noise(tiny, clips[n]) for n in picked]),
                output_type="latent",
                return_dict=False,
            )[0]
            run.finish()
        report = run.report()
        run.close()
        assert report.streams == 2 * len(picked) and report.choices["q"][0] == "bb--bb"
        made.append(latents)
    assert made[2].shape[0] == 2
    torch.testing.assert_close(made[2], torch.cat(made[:2]), rtol=0, atol=1e-4)


def test_trajectory_error_is_zero_for_the_recorded_run_and_ranks_precisions(tiny):
    recording = record(tiny, CLIP)
    assert torch.equal(recording.latents, sample(tiny, None, CLIP).latents)
    errors = {}
    for precision in ("full", "w4a16", "w4a4"):
        chosen = resolve(Choice(precision=precision, cache="off"), lambda: "")
        errors[precision], report = trajectory_error(tiny, chosen, recording)
        assert report.evaluations == 4
    assert errors["full"] == 0
    assert 0 < errors["w4a16"] < errors["w4a4"] < 1
    assert left_behind(tiny) == []
