"""Predictors beside runs that they were not made for; no host needed."""

import pytest
from sixbit_diffusion.nodes.fit_image import render_fit
from sixbit_diffusion.nodes.predictors import mismatch
from sixbit_diffusion.sixbit_core.calibrate import fit_predictor
from sixbit_diffusion.sixbit_core.calibration_run import LinearRecord
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.predictor import Predictor

HOW = {"steps": 50, "size": [480, 720], "frames": 49, "prompts": 4}


def predictor(**changes: object) -> Predictor:
    return Predictor("cogvideox-5b", "0" * 32, {**HOW, **changes}, {}, {})


@pytest.mark.parametrize(
    ("steps", "shape", "said"),
    [
        (50, (1, 16, 13, 60, 90), None),
        (30, (1, 16, 13, 60, 90), "calibrated at 50 steps, this run has 30 steps"),
        (50, (1, 16, 13, 90, 60), "calibrated at 480x720, this run has 720x480"),
        (20, (2, 16, 9, 60, 90), "calibrated at 50 steps, 49 frames, this run has 20 steps, 33 frames"),
    ],
)
def test_a_run_of_another_kind_is_said(steps: int, shape: tuple[int, ...], said: str | None) -> None:
    found = mismatch(predictor(), steps, shape)
    assert found is None if said is None else said in found and "\n" not in found


def test_the_extra_frame_of_later_models_is_no_mismatch() -> None:
    assert mismatch(predictor(frames=81), 50, (1, 16, 22, 60, 90)) is None
    assert mismatch(predictor(frames=81), 50, (1, 16, 21, 60, 90)) is None


@pytest.mark.parametrize(
    ("cfg", "scheduler", "said"),
    [
        (6, "euler simple", None),
        (None, None, None),
        (4.5, "euler simple", "calibrated at CFG 6.0, this run has CFG 4.5"),
        (6.0, "heun simple", "calibrated at euler simple, this run has heun simple"),
        (1.0, "heun karras", "at euler simple, CFG 6.0, this run has heun karras, CFG 1.0: "),
    ],
)
def test_another_scheduler_or_guidance_is_said(
    cfg: float | None, scheduler: str | None, said: str | None
) -> None:
    made = predictor(cfg=6.0, scheduler="euler simple")
    found = mismatch(made, 50, (1, 16, 13, 60, 90), cfg, scheduler)
    assert found is None if said is None else said in found and "\n" not in found


def test_what_a_predictor_does_not_say_is_no_mismatch() -> None:
    assert mismatch(Predictor("x", "0", {}, {}, {}), 50, (1, 16, 13, 60, 90), 6.0, "euler simple") is None


def test_picture_has_a_panel_for_each_kind_even_of_level_measures() -> None:
    layout = BlockLayout(("q", "ff_out"), ({"q": (16, 16), "ff_out": (16, 16)},))
    records = [
        LinearRecord(0, kind, step / 5, None if step == 0 else 0.1, 0.05, 0.1, 0.05, None, 3.0)
        for step in range(5)
        for kind in layout.names
    ]
    how = {**HOW, "steps": 5}
    picture = render_fit(fit_predictor(records, layout, "cogvideox-small", "0", how), records)
    colours = {colour for _, colour in picture.getcolors(100_000)}
    assert picture.width > picture.height and (158, 202, 225) in colours
