"""What fits a model and what the nearest is that does."""

import pytest
from sixbit_diffusion.nodes.clip import ClipRules, check_fields

FIRST = ClipRules("CogVideoX-5B", 16)
LATER = ClipRules("CogVideoX1.5-5B", 16, patch_time=2)
IMAGE = ClipRules("CogVideoX-5B-I2V", 16, only_size=(720, 480))


@pytest.mark.parametrize(
    ("rules", "clip", "shape"),
    [
        (FIRST, (720, 480, 49), (2, 16, 13, 60, 90)),
        (LATER, (1360, 768, 81), (2, 16, 21, 96, 170)),
        (IMAGE, (720, 480, 33), (2, 16, 9, 60, 90)),
    ],
)
def test_clips_that_fit(rules: ClipRules, clip: tuple[int, int, int], shape: tuple[int, ...]) -> None:
    rules.check_clip(*clip)
    assert rules.latent_shape(*clip, batch=2) == shape
    rules.check_latent(shape)


@pytest.mark.parametrize(
    ("rules", "clip", "said"),
    [
        (FIRST, (720, 488, 49), "multiples of 16, got 720x488; the nearest is 720x480"),
        (FIRST, (4, 480, 49), "got 4x480; the nearest is 16x480"),
        (FIRST, (720, 480, 50), "takes 8N+1 frames, got 50; nearest are 49 and 57"),
        (FIRST, (720, 480, 0), "got 0; nearest are 1 and 9"),
        (LATER, (1360, 768, 85), "takes 16N+1 frames, got 85; nearest are 81 and 97"),
        (IMAGE, (480, 720, 49), "makes clips of 720x480 only, got 480x720; use 720x480"),
    ],
)
def test_others_are_refused_with_the_nearest(rules: ClipRules, clip: tuple[int, int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("+", r"\+")):
        rules.check_clip(*clip)


@pytest.mark.parametrize("shape", [(1, 16, 60, 90), (1, 4, 13, 60, 90), (1, 16, 13, 61, 90)])
def test_latents_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="CogVideoX-5B"):
        FIRST.check_latent(shape)


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ((720, 480, 49), True),
        ((16, 4096, 1025), True),
        ((None, None, None), True),
        ((100, 128, 9), "width must be a multiple of 16 from 16 to 4096, got 100; nearest are 96 and 112"),
        ((None, 5000, 9), "height must be a multiple of 16 from 16 to 4096, got 5000; the nearest is 4096"),
        ((8, None, 9), "width must be a multiple of 16 from 16 to 4096, got 8; the nearest is 16"),
        ((128, 128, 10), "frames must be 8N+1 from 1 to 1025, got 10; nearest are 9 and 17"),
        ((None, None, 0), "frames must be 8N+1 from 1 to 1025, got 0; the nearest is 1"),
        (("wide", 1.5, "many"), True),  # the host says that these are no whole numbers
    ],
)
def test_what_is_typed_is_held_against_what_any_model_makes(fields: tuple, found: bool | str) -> None:
    assert check_fields(*fields) == found
