"""The chain of the trainer on tiny networks, without its autoencoder's training."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from sixbit_diffusion.reference.batches import Batches, group_shares
from sixbit_diffusion.reference.ema import EMA, Clock, rate_at
from sixbit_diffusion.reference.export import export_pipeline
from sixbit_diffusion.reference.models import make_vae, rotary_tables
from sixbit_diffusion.reference.state import load_state, save_state
from sixbit_diffusion.reference.train import main
from sixbit_diffusion.reference.train_transformer import (
    TransformerSettings,
    loss_of,
    make_networks,
    make_optimizers,
    train_transformer,
)
from sixbit_diffusion.reference.train_vae import EncodeSettings, caption_tokens, encode_clips
from sixbit_diffusion.reference.world import MOTIONS, sample_scenes

CPU = torch.device("cpu")
RATE = 1e-3


def make_data(clips=200, pair_share=0.2):
    """What `encode` writes, with noise for latents."""
    scenes = sample_scenes(clips, 1, pair_share=pair_share)
    generator = torch.Generator().manual_seed(0)
    return {
        "latents": torch.randn(clips, 9, 16, 16, 16, generator=generator).bfloat16(),
        "tokens": caption_tokens(scenes),
        "count": torch.from_numpy(scenes.count).to(torch.uint8),
        "motion": torch.from_numpy(scenes.motion).to(torch.uint8),
    }


@pytest.fixture(scope="module")
def data():
    return make_data()


class Trainer:
    """A tiny stage whose steps are seeded by their number."""

    def __init__(self, data, start=None):
        torch.manual_seed(0)
        self.networks = make_networks(tiny=True, start=start)
        self.rate = torch.tensor(RATE)
        self.optimizers = make_optimizers(self.networks, self.rate, cuda=False)
        self.ema = EMA(self.networks, 0.9)
        self.batches = Batches(data, 1)
        self.rotary = rotary_tables(64, CPU)

    def run(self, first, last):
        for step in range(first, last):
            torch.manual_seed(step)
            self.networks.zero_grad(set_to_none=True)
            loss_of(self.networks, self.batches, self.rotary, CPU).backward()
            for optimizer in self.optimizers:
                optimizer.step()
            self.ema.update(step)
        return self

    def values(self):
        return [p.detach().clone() for p in self.networks.parameters()] + self.ema.averages


def test_a_resumed_stage_equals_an_uninterrupted_one(data, tmp_path):
    whole = Trainer(data).run(0, 4).values()
    first = Trainer(data).run(0, 2)
    record = {"step": 2, "elapsed": 1.5, "warm": False}
    save_state(tmp_path, first.networks, first.ema, first.optimizers, record)
    second = Trainer(data)
    assert load_state(tmp_path, second.networks, second.ema, second.optimizers, False) == (2, 1.5)
    resumed = second.run(2, 4).values()
    assert all(torch.equal(a, b) for a, b in zip(whole, resumed, strict=True))
    lost = Trainer(data)
    load_state(tmp_path, lost.networks, lost.ema, lost.optimizers, False)
    for optimizer in lost.optimizers:
        optimizer.state.clear()
    assert not all(torch.equal(a, b) for a, b in zip(whole, lost.run(2, 4).values(), strict=True))


def test_a_state_is_not_resumed_as_another_kind(data, tmp_path):
    trainer = Trainer(data)
    parts = (trainer.networks, trainer.ema, trainer.optimizers)
    save_state(tmp_path, *parts, {"step": 0, "elapsed": 0.0, "warm": True})
    with pytest.raises(ValueError, match="began with --from: resume it so, or give another --work"):
        load_state(tmp_path, *parts, False)


def test_the_chain_from_clips_to_a_pipeline_and_on_from_there(tmp_path, capsys):
    from diffusers import CogVideoXPipeline

    work, folder, later = tmp_path / "work", tmp_path / "pipeline", tmp_path / "later"
    torch.manual_seed(0)
    make_vae(tiny=True).save_pretrained(work / "vae")
    assert encode_clips(work, EncodeSettings(8, pair_share=0.5, tiny=True), CPU) == 8
    latents = load_file(work / "latents.safetensors")["latents"].float()
    assert latents.shape == (8, 9, 16, 16, 16) and abs(latents.std() - 1) < 0.02

    short = {"batch": 2, "tiny": True}
    begin = time.monotonic()
    assert not train_transformer(work, TransformerSettings(60, stop_after=0.5, **short), CPU, begin)
    stopped = json.loads((work / "state.json").read_text())
    assert stopped["step"] > 0 and 0 < stopped["elapsed"] < 10
    total = stopped["elapsed"] + 0.5
    assert train_transformer(work, TransformerSettings(total, **short), CPU, time.monotonic())
    assert json.loads((work / "state.json").read_text())["step"] > stopped["step"]

    assert export_pipeline(work, folder, tiny=True) < 5e6
    assert "license: apache-2.0" in (folder / "README.md").read_text(encoding="utf-8")
    state = load_file(work / "state.safetensors")
    stored = load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(t, state[f"average.transformer.{k}"].bfloat16()) for k, t in stored.items())
    pipeline = CogVideoXPipeline.from_pretrained(folder)
    assert pipeline.transformer.dtype == pipeline.vae.dtype == torch.float32
    pipeline.set_progress_bar_config(disable=True)
    made = pipeline("a red circle", num_inference_steps=2, max_sequence_length=32, output_type="latent")
    assert made.frames.shape == (1, 9, 16, 16, 16) and made.frames.isfinite().all()

    encode = ["encode", "--work", str(later), "--vae", str(folder / "vae"), "--clips", "4", "--tiny"]
    assert main([*encode, "--device", "cpu"]) == 0
    factor = json.loads((folder / "vae" / "config.json").read_text())["scaling_factor"]
    assert json.loads((later / "vae" / "config.json").read_text())["scaling_factor"] == factor != 1
    settings = TransformerSettings(1e-9, start=folder, **short)  # no step: what it starts from
    assert train_transformer(later, settings, CPU, time.monotonic())
    state = load_file(later / "state.safetensors")
    for name, tensor in stored.items():
        assert torch.equal(state[f"weight.transformer.{name}"], tensor.float()), name
        assert torch.equal(state[f"average.transformer.{name}"], tensor.float()), name
    text = load_file(folder / "text_encoder" / "model.safetensors")
    assert torch.equal(state["average.text.shared.weight"], text["shared.weight"].float())


def test_the_deep_shape_has_the_positions_of_a_2b(tmp_path):
    from sixbit_diffusion.engine.facts import read_facts
    from sixbit_diffusion.engine.transformer import build_transformer

    deep = make_networks(deep=True)["transformer"]
    assert (deep.config.num_layers, deep.config.num_attention_heads) == (42, 2)
    assert not deep.config.use_rotary_positional_embeddings
    work, folder = tmp_path / "work", tmp_path / "pipeline"
    make_vae(tiny=True).save_pretrained(work / "vae")
    save_file(make_data(8), work / "latents.safetensors")
    settings = TransformerSettings(0.2, batch=2, tiny=True, deep=True)
    assert train_transformer(work, settings, CPU, time.monotonic())
    export_pipeline(work, folder, tiny=True, deep=True)
    facts = read_facts(str(folder))
    built = build_transformer(facts, "search", CPU, torch.float32)  # as the engine loads it
    assert not built.config.use_rotary_positional_embeddings
    assert built.patch_embed.pos_embedding.abs().sum() > 0


def test_what_does_not_fit_is_told_in_one_line(tmp_path, capsys):
    work = ["--work", str(tmp_path / "work"), "--device", "cpu", "--tiny"]
    for command, message in {
        ("encode", "--vae", str(tmp_path)): "--vae needs the folder of an autoencoder",
        ("encode", "--clips", "1"): "encode needs 4 clips or more, got 1",
        ("transformer", "--from", str(tmp_path)): "--from needs a pipeline folder",
        ("transformer",): "latents.safetensors",
    }.items():
        assert main([*command, *work]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_clips_are_drawn_by_share():
    data = make_data(400)
    pair = data["count"] == 2
    spin = data["motion"] == MOTIONS.index("spinning")
    torch.manual_seed(0)
    for asked, expected in (
        ((None, None), (pair.float().mean(), spin.float().mean())),
        ((0.5, None), (0.5, spin.float().mean())),
        ((0.4, 0.25), (0.4, 0.25)),
        ((0.0, 1.0), (0.0, 1.0)),
    ):
        clips = Batches(data, 4, *asked).draw_clips(20000)
        assert abs(pair[clips].float().mean() - expected[0]) < 0.02
        assert abs(spin[clips].float().mean() - expected[1]) < 0.02
    clips = Batches(data, 4, 0.5, 0.2).draw_clips(60000)
    drawn = clips.bincount(minlength=400)
    assert drawn.min() > 0  # every clip, and equally often within its kind
    assert drawn[pair].float().std() < 0.15 * drawn[pair].float().mean()


def test_shares_must_fit_the_data():
    assert group_shares([5, 3, 2], None, None) == pytest.approx([0.5, 0.3, 0.2])
    for sizes, pair, spin in (([5, 3, 2], 0.9, None), ([5, 0, 2], 0.4, None), ([0, 5, 5], 0.2, 0.2)):
        with pytest.raises(ValueError, match="lower them or encode other clips"):
            group_shares(sizes, pair, spin)
    with pytest.raises(ValueError, match="lacks count, motion: run the stage `encode` again"):
        Batches({"latents": torch.zeros(1), "tokens": torch.zeros(1)}, 1)


def test_a_batch_is_noise_and_signal_by_the_schedule(data):
    torch.manual_seed(0)
    batches = Batches({name: values[:12] for name, values in data.items()}, 64)
    x, t, ids, v = batches.draw()
    assert x.shape == v.shape == (64, 9, 16, 16, 16) and ids.shape == (64, 32)
    assert ((t >= torch.arange(64) * 1000 // 64) & (t <= (torch.arange(64) + 1) * 1000 // 64)).all()
    a, b = batches.signal[t].view(-1, 1, 1, 1, 1), batches.noise[t].view(-1, 1, 1, 1, 1)
    torch.testing.assert_close(a**2 + b**2, torch.ones_like(a))
    assert batches.signal[-1] == 0  # zero terminal SNR
    x0, noise = a * x - b * v, b * x + a * v
    assert abs(noise.std() - 1) < 0.01
    clips = data["latents"][:12, 0].float().flatten(1)
    assert torch.cdist(x0[:, 0].flatten(1), clips).amin(1).max() < 0.1  # each is one of the clips
    assert 0 < (ids == batches.empty).all(1).float().mean() < 0.3


def test_averages_follow_the_weights():
    module = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(0.0)
        rising, steady = EMA(module, 0.9), EMA(module, 0.9, rising=False)
        module.weight.fill_(1.0)
    for ema, expected in ((rising, 0.9), (steady, 0.1)):
        ema.update(0)
        assert ema.averages[0].item() == pytest.approx(expected)
        for step in range(1, 200):
            ema.update(step)
        ema.copy_to(module)
        assert module.weight.item() == pytest.approx(1.0, abs=1e-3)


def test_the_rate_rises_and_falls():
    assert rate_at(1.0, 0.0, 0, 100) == pytest.approx(0.01)
    assert rate_at(1.0, 0.0, 200, 100) == 1.0
    assert rate_at(1.0, 0.5, 200, 100) == pytest.approx(0.5)
    assert rate_at(1.0, 1.0, 200, 100) == pytest.approx(0.0)
    clock = Clock(10.0, elapsed=9.0)
    assert 0.9 <= clock.progress < 1.0 and Clock(10.0, elapsed=50.0).progress == 1.0
