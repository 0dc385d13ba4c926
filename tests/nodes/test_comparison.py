"""Two clips beside each other; no host needed."""

import json

import pytest
import torch
from sixbit_diffusion.nodes.comparison import compare, seconds_of, side_by_side
from sixbit_diffusion.sixbit_core.metrics import psnr

REPORT = "2 evaluations\n" + json.dumps({"seconds_by_evaluation": [1.25, 0.5]})


def clip(left: int, frames: int = 3, size: tuple[int, int] = (48, 64)) -> torch.Tensor:
    """A dark square on a light ground, a pixel further in each frame."""
    made = torch.full((frames, *size, 3), 0.9)
    for frame in range(frames):
        made[frame, 10:26, left + frame : left + frame + 16] = torch.tensor([0.8, 0.1, 0.1])
    return made


def test_figures_are_those_of_the_clips() -> None:
    a, b = clip(4), clip(5)
    found = compare((a, b), ("one", "two"), (REPORT, ""))
    assert found.psnr_db == pytest.approx(psnr(*((x * 255).round().byte() for x in (a, b))), abs=1e-3)
    assert found.composition_held and 0.9 < found.composition < 1 and found.seconds == (1.75, None)
    assert found.line().startswith("one, 1.8 s; two; PSNR ") and "composition held" in found.line()
    far = compare((a, clip(40)), ("one", "two"), ("", ""))
    assert not far.composition_held and "composition changed" in far.line()


def test_progress_is_told_frame_by_frame() -> None:
    told = []
    compare((clip(4), clip(5)), ("", ""), ("", ""), lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_frames_stand_in_step_under_captions() -> None:
    a, b = clip(4), clip(30)
    found = compare((a, b), ("a name much too long for a clip as narrow as this one is", "two"), ("", REPORT))
    both = side_by_side((a, b), found)
    assert both.shape[0] == 3 and both.shape[1] % 2 == 0 and both.shape[2] == 2 * 64 + 8
    assert torch.equal(both[:, -48:, :64], a) and torch.equal(both[:, -48:, 72:], b)
    bar = both[:, :-48]
    assert (bar[0] == bar[2]).all() and bar.min() < 0.5
    assert (bar[:, : bar.shape[1] // 2, 64:72] == 1).all()  # the first caption ends at its clip


def test_transparent_clips_are_taken() -> None:
    a = torch.cat([clip(4), torch.ones(3, 48, 64, 1)], dim=-1)
    assert compare((a, clip(4)), ("", ""), ("", "")).psnr_db == 100


def test_clips_unlike_each_other_are_refused_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"got 3 frames of 64x48 and 5 frames of 64x48; sample both"):
        compare((clip(4), clip(4, frames=5)), ("", ""), ("", ""))


@pytest.mark.parametrize("text", ["12.3", "no JSON", "x\n{}", "x\n[1]"])
def test_what_is_no_report_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="report_b needs the text that 6Bit Run Report gives"):
        seconds_of(text, "report_b")
