"""Captions of the procedural world: plain English that names everything a clip is scored on.

`caption_of` counts through templates x wordings, so that one scene has many captions, of at most 32 tokens.
Half of the templates for two objects say which is on the left; the others leave their places open.
"""

from __future__ import annotations

_VERBS: dict[str, tuple[tuple[str, str], ...]] = {  # (one object, two objects)
    "left": (
        ("moves left", ""),
        ("slides to the left", ""),
        ("drifts left", ""),
        ("travels to the left", ""),
    ),
    "right": (
        ("moves right", ""),
        ("slides to the right", ""),
        ("drifts right", ""),
        ("travels to the right", ""),
    ),
    "up": (
        ("moves up", "move up"),
        ("rises", "rise"),
        ("drifts upwards", "drift upwards"),
        ("goes up", "go up"),
    ),
    "down": (
        ("moves down", "move down"),
        ("sinks", "sink"),
        ("drifts downwards", "drift downwards"),
        ("goes down", "go down"),
    ),
    "still": (
        ("stays still", "stay still"),
        ("does not move", "do not move"),
        ("rests in place", "rest in place"),
        ("stands still", "stand still"),
    ),
    "spinning": (("spins", ""), ("turns around", ""), ("rotates", ""), ("is spinning", "")),
    "growing": (
        ("grows", "grow"),
        ("gets bigger", "get bigger"),
        ("becomes larger", "become larger"),
        ("is growing", "are growing"),
    ),
    "shrinking": (
        ("shrinks", "shrink"),
        ("gets smaller", "get smaller"),
        ("becomes smaller", "become smaller"),
        ("is shrinking", "are shrinking"),
    ),
}
_SINGLE = (
    "a {colour} {shape} {verb} on a {background} background",
    "the {colour} {shape} {verb} over a {background} background",
    "on a {background} background, a {colour} {shape} {verb}",
    "a video of a {colour} {shape} that {verb} in front of a {background} backdrop",
    "there is a {colour} {shape} that {verb}, and the background is {background}",
    "{background} background: one {colour} {shape} {verb}",
    "one {shape}, {colour}, {verb} against {background}",
)
_PAIR: tuple[tuple[str, bool], ...] = (  # (template, whether it names the sides)
    ("a {left} on the left and a {right} on the right {verb} on a {background} background", True),
    ("a {left} and a {right} {verb} over a {background} background", False),
    ("on a {background} background, a {left} and a {right} {verb}", False),
    ("a video of a {left} next to a {right} that {verb} in front of a {background} backdrop", False),
    ("a {left} to the left of a {right}, both {verb}, and the background is {background}", True),
    ("{background} background: a {left} on the left, a {right} on the right, they {verb}", True),
)
_VERBS_EACH = 4  # of every motion
WORDINGS = (
    len(_SINGLE) * len(_PAIR) * _VERBS_EACH
)  # every template with every verb, for one object and for two


def caption_of(objects: tuple[tuple[str, str], ...], background: str, motion: str, wording: int) -> str:
    """The caption numbered `wording` (any int >= 0) of a scene.

    Args:
        objects: (colour, shape) of one or two objects, from left to right.
        background: its name.
        motion: its name.
        wording: chooses template and verb.
    """
    single, plural = _VERBS[motion][wording % _VERBS_EACH]
    wording //= _VERBS_EACH
    if len(objects) == 1:
        colour, shape = objects[0]
        template = _SINGLE[wording % len(_SINGLE)]
        return _articles(template.format(colour=colour, shape=shape, verb=single, background=background))
    left, right = (" ".join(thing) for thing in objects)
    template, _ = _PAIR[wording % len(_PAIR)]
    return _articles(template.format(left=left, right=right, verb=plural, background=background))


def names_sides(wording: int) -> bool:
    """Whether the caption numbered `wording` of two objects says which is on the left."""
    return _PAIR[wording // _VERBS_EACH % len(_PAIR)][1]


def _articles(caption: str) -> str:
    return f" {caption}".replace(" a orange", " an orange")[1:]
