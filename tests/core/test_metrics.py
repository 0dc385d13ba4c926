import math

import pytest
import torch
from sixbit_diffusion.engine.intervals import bootstrap_mean, wilson
from sixbit_diffusion.engine.trajectory import relative_errors
from sixbit_diffusion.sixbit_core.metrics import flicker, psnr, ssim


def clip(seed: int) -> torch.Tensor:
    return torch.randint(
        0, 256, (3, 24, 20, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def test_psnr_of_a_known_difference():
    a = torch.full((2, 12, 12, 3), 100, dtype=torch.uint8)
    assert psnr(a, a + 10) == pytest.approx(10 * math.log10(255**2 / 100))
    assert psnr(a, a) == 100.0


def test_ssim_of_known_clips():
    # Flat clips: variance and covariance vanish, so SSIM is its luminance term alone.
    a, b = (torch.full((1, 16, 16, 3), value, dtype=torch.uint8) for value in (100, 150))
    c1 = (0.01 * 255) ** 2
    assert ssim(a, b) == pytest.approx((2 * 100 * 150 + c1) / (100**2 + 150**2 + c1))
    assert ssim(clip(0), clip(0)) == pytest.approx(1.0)
    assert abs(ssim(clip(0), clip(1))) < 0.1


def test_ssim_agrees_with_a_window_written_out():
    a, b = clip(2), (clip(2).float() * 0.7 + clip(3).float() * 0.3).to(torch.uint8)
    line = torch.tensor([math.exp(-((i - 5) ** 2) / (2 * 1.5**2)) for i in range(11)], dtype=torch.float64)
    window = torch.outer(line, line) / line.sum() ** 2
    total, count = 0.0, 0
    for t in range(3):
        for channel in range(3):
            for y in range(24 - 10):
                for x in range(20 - 10):
                    p = a[t, y : y + 11, x : x + 11, channel].double()
                    q = b[t, y : y + 11, x : x + 11, channel].double()
                    mp, mq = (window * p).sum(), (window * q).sum()
                    vp, vq = (window * (p - mp) ** 2).sum(), (window * (q - mq) ** 2).sum()
                    covariance = (window * (p - mp) * (q - mq)).sum()
                    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
                    top = (2 * mp * mq + c1) * (2 * covariance + c2)
                    total += (top / ((mp**2 + mq**2 + c1) * (vp + vq + c2))).item()
                    count += 1
    assert ssim(a, b) == pytest.approx(total / count, abs=1e-9)


@pytest.mark.parametrize("other", [torch.zeros(2, 12, 12, 3), torch.zeros(1, 12, 12, 3, dtype=torch.uint8)])
def test_clips_must_match(other):
    with pytest.raises(ValueError, match="two uint8 clips"):
        psnr(torch.zeros(2, 12, 12, 3, dtype=torch.uint8), other)


def test_relative_errors_are_per_stream():
    full = torch.ones(2, 4, 4)
    changed = full.clone()
    changed[1] *= 1.5
    assert relative_errors(changed, full).tolist() == [0.0, 0.5]


def test_intervals():
    low, high = wilson(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(5, 5)[1] == 1.0
    mean, low, high = bootstrap_mean([0.0, 1.0] * 50)
    assert mean == 0.5 and 0.38 < low < 0.45 and 0.55 < high < 0.62
    assert bootstrap_mean([1.0, 2.0, 3.0]) == bootstrap_mean([1.0, 2.0, 3.0])


def test_flicker_is_of_the_error_alone():
    moving = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 12, 12, 3) * 20
    assert flicker(moving, moving) == 0.0 and flicker(moving + 7, moving) == 0.0
    blinking = moving + torch.tensor([0, 3, 0, 3], dtype=torch.uint8)[:, None, None, None]
    assert flicker(blinking, moving) == 3.0 and flicker(moving[:1], moving[:1]) == 0.0
    with pytest.raises(ValueError, match="two uint8 clips"):
        flicker(moving, moving.float())
