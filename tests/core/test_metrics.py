import math

import pytest
import torch
from sixbit_diffusion.sixbit_core.metrics import COMPOSITION_HELD, composition, flicker, psnr, ssim


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
    assert ssim(a, b) == pytest.approx(total / count, abs=1e-7)


def test_ssim_keeps_the_variance_of_bright_clips():
    a = torch.full((1, 16, 18, 3), 250, dtype=torch.uint8)
    b = a.clone()
    b[:, :, ::2] -= 1
    assert ssim(a, b) == pytest.approx(0.9957443, abs=1e-6)  # by the same formula in float64


def test_a_long_comparison_is_told_frame_by_frame_and_can_be_ended():
    told = []
    ssim(clip(0), clip(1), lambda done, total: told.append((done, total)))
    assert told == [(1, 3), (2, 3), (3, 3)]

    def stop(done: int, total: int) -> None:
        told.append(done)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ssim(clip(0), clip(1), stop)
    assert told[3:] == [1]


@pytest.mark.parametrize("other", [torch.zeros(2, 12, 12, 3), torch.zeros(1, 12, 12, 3, dtype=torch.uint8)])
def test_clips_must_match(other):
    with pytest.raises(ValueError, match="two uint8 clips"):
        psnr(torch.zeros(2, 12, 12, 3, dtype=torch.uint8), other)


def square(left: int, value: int = 30) -> torch.Tensor:
    made = torch.full((2, 48, 64, 3), 220, dtype=torch.uint8)
    made[:, 10:26, left : left + 16] = value
    return made


def test_flicker_is_of_the_error_alone():
    moving = torch.arange(4, dtype=torch.uint8)[:, None, None, None].expand(4, 12, 12, 3) * 20
    assert flicker(moving, moving) == 0.0 and flicker(moving + 7, moving) == 0.0
    blinking = moving + torch.tensor([0, 3, 0, 3], dtype=torch.uint8)[:, None, None, None]
    assert flicker(blinking, moving) == 3.0 and flicker(moving[:1], moving[:1]) == 0.0
    with pytest.raises(ValueError, match="two uint8 clips"):
        flicker(moving, moving.float())


def test_composition_is_where_light_and_dark_lie():
    here, there = square(4), square(40)
    assert composition(here, here) == pytest.approx(1)
    assert composition(here, square(4, value=150)) == pytest.approx(1)  # fainter, in the same place
    assert composition(here, (here.float() * 0.5 + 20).byte()) == pytest.approx(1, abs=1e-3)
    assert COMPOSITION_HELD < composition(here, square(5)) < 1 and composition(here, there) < 0
    assert composition(here, 255 - here) == pytest.approx(-1, abs=1e-3)
    noise = torch.randint(-20, 21, here.shape, generator=torch.Generator().manual_seed(0))
    assert composition(here, (here + noise).clamp(0, 255).byte()) > 0.98  # detail does not count


def test_composition_of_plain_clips():
    plain = torch.full((1, 16, 16, 3), 9, dtype=torch.uint8)
    assert composition(plain, plain + 50) == 1 and composition(plain, square(4)[:1, :16, :16]) == 0
    with pytest.raises(ValueError, match=r"composition needs \(T, H, W, 3\)"):
        composition(plain[..., :2], plain[..., :2])
