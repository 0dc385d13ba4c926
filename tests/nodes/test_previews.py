"""Colours of previews: each model gets its own VAE's; no host needed."""

from types import SimpleNamespace

import pytest
import torch
from sixbit_diffusion.nodes.files import reference_folder
from sixbit_diffusion.nodes.previews import preview_colours
from sixbit_diffusion.sixbit_core.checkpoint import open_checkpoint
from sixbit_diffusion.sixbit_core.families.cogvideox import PUBLISHED, SMALL


def test_every_model_gets_the_colours_of_its_own_vae() -> None:
    reference = preview_colours(open_checkpoint(reference_folder()))
    published = {preview_colours(SimpleNamespace(family=family)) for family in PUBLISHED}
    assert len(published) == 1 and reference is not None and reference not in published
    for colours in (*published, reference):
        assert len(colours.factors) == 16 and {len(row) for row in colours.factors} == {3}
    assert preview_colours(SimpleNamespace(family=SMALL, fingerprint="another")) is None


def test_the_references_colours_are_those_of_its_clips() -> None:
    diffusers = pytest.importorskip("diffusers")
    from sixbit_diffusion.reference.preview import latent_colours
    from sixbit_diffusion.reference.render import render
    from sixbit_diffusion.reference.train_vae import to_signal
    from sixbit_diffusion.reference.world import sample_scenes

    colours = preview_colours(open_checkpoint(reference_folder()))
    signal = to_signal(render(sample_scenes(1, 99), torch.device("cpu")))[:, :, :5]
    vae = diffusers.AutoencoderKLCogVideoX.from_pretrained(reference_folder() / "vae")
    with torch.inference_mode():
        latents = vae.encode(signal).latent_dist.mode() * vae.config.scaling_factor
    shown = latents.movedim(1, -1) @ torch.tensor(colours.factors) + torch.tensor(colours.bias)
    expected = latent_colours(signal).movedim(1, -1)
    assert (shown - expected).square().mean() < 0.05 * expected.var()
