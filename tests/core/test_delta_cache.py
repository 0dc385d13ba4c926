import pytest
import torch
from sixbit_diffusion.sixbit_core.delta_cache import CODECS, DeltaCache, bytes_needed, resolve_location

STREAM = ("cond", 0)
LOCATIONS = sorted(CODECS)
TOLERANCE = {"gpu": 1e-6, "host": 0.02, "gpu-int8": 0.02, "gpu-nvfp4": 0.15}


def pair(seed: int, width: int = 64, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, width, generator=generator).to(dtype) for n in (12, 5))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.mark.parametrize("location", LOCATIONS)
def test_apply_restores_the_residual_and_leaves_the_input_alone(location):
    cache, inp, out, now = DeltaCache(location), pair(0), pair(1), pair(2)
    cache.store(3, STREAM, 7, inp, out)
    before = [part.clone() for part in now]
    result = cache.apply(3, STREAM, *now)
    for x, y, kept, after in zip(inp, out, before, result, strict=True):
        assert relative(after - kept, y - x) < TOLERANCE[location]
    assert all(torch.equal(a, b) for a, b in zip(now, before, strict=True))
    assert cache.evaluation(3, STREAM) == 7


@pytest.mark.parametrize("location", [*LOCATIONS, "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_predicted_bytes_are_the_actual_ones(location, dtype):
    cache = DeltaCache(location)
    for _ in range(2):  # storing again replaces
        for block in range(3):
            for item in range(2):
                cache.store(block, ("cond", item), 0, pair(0, dtype=dtype), pair(1, dtype=dtype))
    assert cache.bytes == cache.peak_bytes == bytes_needed(location, 17, 64, 3, 2, dtype)
    cache.keep([("cond", 1)])
    assert cache.bytes == bytes_needed(location, 17, 64, 3, 1, dtype)
    cache.keep(())
    assert cache.bytes == 0 and cache.peak_bytes == bytes_needed(location, 17, 64, 3, 2, dtype)


def test_bytes_of_the_5b_in_bf16():
    # 480x720, 49 frames: 13 x 30 x 45 video tokens and 226 of text
    sizes = {
        location: bytes_needed(location, 17776, 3072, 42, 2, torch.bfloat16) / 1e9
        for location in ("gpu", "gpu-int8", "gpu-nvfp4")
    }
    assert {k: round(v, 1) for k, v in sizes.items()} == {"gpu": 9.2, "gpu-int8": 4.9, "gpu-nvfp4": 2.6}


def test_host_memory_holds_what_the_gpu_would_in_int8():
    near, away, now = DeltaCache("gpu-int8"), DeltaCache("host"), pair(2)
    for cache in (near, away):
        cache.store(0, STREAM, 0, pair(0), pair(1))
    assert away.bytes == near.bytes
    for a, b in zip(near.apply(0, STREAM, *now), away.apply(0, STREAM, *now), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(*(cache.change(0, STREAM, now[0], pair(3)[0]) for cache in (near, away)))


def test_auto_takes_what_fits():
    def size(location: str) -> int:
        return bytes_needed(location, 17776, 3072, 42, 2, torch.bfloat16)

    for free, expected in ((10, "gpu"), (5, "gpu-int8"), (3, "gpu-nvfp4"), (2, "host")):
        assert resolve_location("auto", free * 10**9, size) == expected
        assert resolve_location("gpu", free * 10**9, size) == "gpu"
        roomy = resolve_location("auto", free * 10**9, size, fits_host=True)
        assert roomy == ("host" if expected == "gpu-nvfp4" else expected)
    assert resolve_location("auto") == "gpu"


@pytest.mark.parametrize("location", LOCATIONS)
def test_change_is_that_of_the_residual_not_of_its_rounding(location):
    cache, inp, out = DeltaCache(location), pair(0, width=256), pair(1, width=256)
    cache.store(0, STREAM, 0, inp, out)
    other = pair(2, width=256)
    grown = out[0] + 0.1 * other[0]  # a change that has nothing to do with Δ
    expected = relative(grown - inp[0], out[0] - inp[0])
    gamma, change = cache.change(0, STREAM, inp[0], grown).tolist()
    assert abs(change - expected) < 0.1 * expected  # uncorrected, NVFP4 would be off by 0.7 of it
    torch.testing.assert_close(gamma, float((grown - inp[0]).abs().sum() / inp[0].abs().sum()))
    assert cache.change(0, STREAM, inp[0], out[0])[1] < 0.02


def test_another_size_or_dtype_is_dropped():
    cache = DeltaCache()
    cache.store(0, STREAM, 0, pair(0), pair(1))
    assert cache.holds(0, STREAM, *pair(2)) and not cache.holds(0, ("cond", 1), *pair(2))
    assert not cache.holds(0, STREAM, *pair(2, dtype=torch.bfloat16))
    assert cache.bytes == 0
    with pytest.raises(KeyError):
        cache.apply(0, STREAM, *pair(2))


def test_reset_equals_new():
    cache = DeltaCache("gpu")
    cache.store(0, STREAM, 0, pair(0), pair(1))
    cache.reset()
    assert vars(cache) == vars(DeltaCache("gpu"))
