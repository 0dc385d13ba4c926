import numpy as np
import pytest
from sixbit_diffusion.reference.check_evaluator import check_evaluator, degrade
from sixbit_diffusion.reference.evaluator import KINDS, Reading, read_clip, score
from sixbit_diffusion.reference.render import render
from sixbit_diffusion.reference.sample import accuracy, contact_sheet, wilson
from sixbit_diffusion.reference.world import Scene, sample_scenes

RED, BLUE = ("red", "circle"), ("blue", "star")


@pytest.fixture(scope="module")
def counts():
    return {
        name: {kind: share[0] for kind, share in shares.items()}
        for name, shares in check_evaluator(60).items()
    }


@pytest.mark.parametrize("name", ["clean", "blurred"])
def test_rendered_clips_are_read_right(counts, name):
    assert all(counts[name][kind] >= 58 for kind in KINDS), counts[name]


def test_wrong_clips_are_found_wrong(counts):
    assert all(counts["another clip's"][kind] <= 20 for kind in KINDS), counts["another clip's"]


def ask(*objects, sides=True):
    return Scene(objects, "white", "still", "", sides)


def read(*objects):
    return Reading("white", objects, "still")


def marks(scene, reading):
    return tuple(score(scene, reading)[kind] for kind in ("colour", "shape"))


@pytest.mark.parametrize("sides", [True, False])
def test_two_objects_in_the_order_asked(sides):
    assert marks(ask(RED, BLUE, sides=sides), read(RED, BLUE)) == (True, True)
    assert marks(ask(RED, BLUE, sides=sides), read(RED)) == (False, False)
    assert marks(ask(RED, BLUE, sides=sides), read()) == (False, False)
    assert marks(ask(RED), read(RED, BLUE)) == (False, False)


def test_order_counts_only_where_the_caption_names_the_sides():
    assert marks(ask(RED, BLUE), read(BLUE, RED)) == (False, False)
    assert marks(ask(RED, BLUE, sides=False), read(BLUE, RED)) == (True, True)


def test_a_colour_on_the_wrong_shape_is_wrong_either_way_round():
    swapped = [("red", "star"), ("blue", "circle")]
    for seen in (swapped, swapped[::-1]):
        assert marks(ask(RED, BLUE, sides=False), read(*seen)) == (True, False)
    assert marks(ask(RED, BLUE, sides=False), read(RED, ("green", "star"))) == (False, True)


def test_each_kind_is_marked_by_itself():
    right = {"background": "white", "objects": (RED,), "motion": "still"}
    wrong = {
        "background": {"background": "black"},
        "colour": {"objects": (("blue", "circle"),)},
        "shape": {"objects": (("red", "ring"),)},
        "motion": {"motion": "up"},
    }
    for kind, change in wrong.items():
        given = score(ask(RED), Reading(**(right | change)))
        assert given == {name: name != kind for name in KINDS}


def test_an_empty_clip_shows_nothing():
    reading = read_clip(np.full((33, 128, 128, 3), 244, np.uint8))
    assert reading == Reading("white", (), "none")
    assert reading.words() == "nothing, none, on white"


def test_a_played_back_clip_moves_the_other_way():
    scenes = sample_scenes(200, 3)
    back = {"left": "right", "right": "left", "up": "down", "down": "up", "growing": "shrinking"}
    for motion, other in back.items():
        i = next(i for i in range(200) if scenes.scene(i).motion == motion)
        clip = render(scenes.select(slice(i, i + 1)))[0].numpy()
        assert read_clip(clip).motion == motion and read_clip(clip[::-1].copy()).motion == other


def test_other_arrays_are_refused():
    with pytest.raises(ValueError, match=r"\[T, H, W, 3\] uint8, got \(2, 8, 8\) float32"):
        read_clip(np.zeros((2, 8, 8), np.float32))


def test_degraded_clips_are_noisy_and_equal_for_equal_seeds():
    clips = render(sample_scenes(1, 0)).numpy()
    np.testing.assert_array_equal(degrade(clips, 1), degrade(clips, 1))
    assert 6 < np.std(degrade(clips, 1)[0, :, :4, :4].astype(float) - clips[0, :, :4, :4]) < 10


def test_accuracy_counts_one_and_two_objects_apart():
    scenes = [ask(RED), ask(RED, BLUE), ask(RED, BLUE)]
    result = accuracy(scenes, [read(RED), read(RED, BLUE), read(BLUE, RED)])
    assert [result[group]["colour"][:2] for group in ("all", "one", "two")] == [(2, 3), (1, 1), (1, 2)]


def test_wilson_intervals():  # of 226 of 256, from the formula by hand
    assert wilson(226, 256) == pytest.approx((0.8376, 0.9167), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0) and wilson(5, 5)[1] == pytest.approx(1.0)


def test_a_contact_sheet_holds_every_clip():
    clips = render(sample_scenes(4, 0)).numpy()
    sheet = contact_sheet(clips, [ask(RED)] * 4, [read(RED)] * 4)
    assert sheet.size == (3 * (3 * 128 + 8), 2 * (128 + 26))
    np.testing.assert_array_equal(np.asarray(sheet)[:128, :128], clips[0, 0])
