from dataclasses import fields

import numpy as np
import pytest
from sixbit_diffusion.reference.captions import WORDINGS, names_sides
from sixbit_diffusion.reference.render import render
from sixbit_diffusion.reference.world import (
    BACKGROUNDS,
    COLOURS,
    MOTIONS,
    SHAPES,
    SPINNING_SHAPES,
    SceneBatch,
    sample_prompts,
    sample_scenes,
)


def combinations(scenes):
    return {scenes.words(i) for i in range(len(scenes))}


def draw_one(**changes):
    """One red circle of radius 20 that rests in the middle of a white frame, but for `changes`."""
    scene = {
        "count": [1],
        "shape": [[0, 0]],
        "colour": [[0, 1]],
        "background": [list(BACKGROUNDS).index("white")],
        "motion": [MOTIONS.index("still")],
        "wording": [0],
        "centre": [[[64, 64], [64, 64]]],
        "travel": [[0, 0]],
        "radius": [[[20, 20], [20, 20]]],
        "angle": [[[0, 0], [0, 0]]],
    } | changes
    return render(SceneBatch(**{k: np.array(v) for k, v in scene.items()}))[0].numpy()


def is_red(clip):
    return (clip == np.array(COLOURS["red"])).all(axis=-1)


def test_training_never_holds_what_is_held_out():
    train = combinations(sample_scenes(20000, 0)) | combinations(sample_scenes(8000, 1, pair_share=0.5))
    held_out = combinations(sample_scenes(2000, 2, "held-out"))
    assert len(held_out) > 400 and train.isdisjoint(held_out)
    assert {objects for objects, _, _ in train} & {objects for objects, _, _ in held_out}


def test_a_tenth_of_every_motion_is_held_out():
    both = sample_scenes(20000, 0, "all")
    train = combinations(sample_scenes(20000, 0))
    unseen = [both.words(i) not in train for i in range(len(both)) if both.count[i] == 1]
    assert 0.05 < np.mean(unseen) < 0.16
    assert {scene.motion for scene in sample_prompts(200, 0)} == set(MOTIONS)


def test_equal_seeds_give_equal_scenes():
    first, again, other = (sample_scenes(300, seed, "held-out") for seed in (3, 3, 4))
    for field in fields(SceneBatch):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(again, field.name))
    assert sample_prompts(300, 3) == sample_prompts(300, 3) != sample_prompts(300, 4)
    assert not np.array_equal(first.centre, other.centre)


def test_the_prompts_of_published_figures_stay():
    assert [scene.caption for scene in sample_prompts(256, 7)[:3]] == [
        "an orange circle and a cyan triangle get smaller over a brown background",
        "the blue ring drifts left over a grey background",
        "beige background: one purple circle rests in place",
    ]


def test_what_spins_can_be_seen_to():
    scenes = sample_scenes(3000, 0)
    spinning = scenes.motion == MOTIONS.index("spinning")
    shapes = {SHAPES[k] for k in scenes.shape[spinning, 0]}
    assert shapes == set(SPINNING_SHAPES) and (scenes.count[spinning] == 1).all()
    turn = np.degrees(np.diff(scenes.angle, axis=2))[..., 0]
    assert (turn[spinning] > 139).all() and (turn[spinning] < 161).all() and (turn[~spinning] == 0).all()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_pair_share(share):
    scenes = sample_scenes(4000, 0, pair_share=share)
    assert abs((scenes.count == 2).mean() - share) < 0.03
    pairs = scenes.select(scenes.count == 2)
    assert (pairs.colour[:, 0] != pairs.colour[:, 1]).all()


def test_bad_requests_are_told():
    with pytest.raises(ValueError, match="split of train, held-out, all"):
        sample_scenes(1, 0, "test")
    with pytest.raises(ValueError, match=r"pair_share in \[0, 1\], got 2"):
        sample_scenes(1, 0, pair_share=2)


def test_every_object_stays_inside_its_frame_or_half():
    scenes = sample_scenes(400, 5, "all", pair_share=0.5)
    for start in range(0, 400, 100):
        part = scenes.select(slice(start, start + 100))
        ends = np.broadcast_to(np.array([0, 32]), (100, 2))
        clips = render(part, frames=ends).numpy().astype(int)
        ground = np.array(list(BACKGROUNDS.values()))[part.background][:, None, None, None]
        painted = (clips != ground).any(axis=-1)
        assert not painted[:, :, [0, -1]].any() and not painted[..., [0, -1]].any()
        assert not painted[part.count == 2][..., 63:65].any()


def test_a_circle_is_drawn_where_it_stands():
    red = is_red(draw_one())
    assert red.shape == (33, 128, 128) and (red == red[0]).all()
    assert abs(red[0].sum() - np.pi * 19.25**2) < 12  # half of the soft edge is not pure
    assert red[0, 63, 63] and red[0, 63, 45] and not red[0, 63, 43] and not red[0, 43, 63]


def test_objects_travel_grow_and_spin():
    moved = is_red(draw_one(travel=[[40, 0]]))
    columns = [np.flatnonzero(frame.any(axis=0)).mean() for frame in moved[[0, 16, 32]]]
    np.testing.assert_allclose(np.diff(columns), [20, 20], atol=0.6)
    grown = is_red(draw_one(radius=[[[10, 20], [0, 0]]]))
    assert grown[0].sum() < grown[16].sum() < grown[32].sum() / 1.5
    turned = is_red(draw_one(shape=[[SHAPES.index("triangle"), 0]], angle=[[[0, np.pi], [0, 0]]]))
    corner = int(64 - 1.2 * 20) + 3  # one corner up at first, down at last
    assert turned[0, corner, 63:65].all() and not turned[32, corner, 63:65].any()
    np.testing.assert_array_equal(turned[0], turned[32, ::-1, ::-1])


def test_shapes_are_far_apart():
    covers = [is_red(draw_one(shape=[[k, 0]]))[0] for k in range(len(SHAPES))]
    for i, a in enumerate(covers):
        for b in covers[:i]:
            assert (a & b).sum() / (a | b).sum() < 0.85


def test_a_window_is_a_part_of_the_frame():
    scenes = sample_scenes(6, 8)
    whole = render(scenes)
    frames = np.broadcast_to(np.arange(4, 9), (6, 5))
    part = render(scenes, frames=frames, origin=np.tile([16, 32], (6, 1)), size=64)
    assert (part.int() - whole[:, 4:9, 32:96, 16:80].int()).abs().max() <= 1


def test_sides_are_named_where_the_caption_says_so():
    for scene in sample_prompts(600, 1):
        assert scene.sides == (" left" in scene.caption and len(scene.objects) == 2)
    assert 0 < sum(names_sides(wording) for wording in range(WORDINGS)) < WORDINGS


def test_captions_name_everything_they_are_scored_on():
    for scene in sample_prompts(300, 2):
        words = [word for thing in scene.objects for word in thing] + [scene.background]
        assert all(f" {word}" in f" {scene.caption}" for word in words), scene
        if len(scene.objects) == 2:  # from left to right
            left, right = (scene.caption.index(f"{c} {s}") for c, s in scene.objects)
            assert left < right
    assert not any(" a orange" in f" {scene.caption}" for scene in sample_prompts(300, 2))
    still = {s.caption for s in sample_prompts(300, 2) if s.motion == "still"}
    assert not any(verb in c for c in still for verb in ("moves", "grow", "spin", "rise", "sink"))
