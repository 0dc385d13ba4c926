import pytest
import torch
from sixbit_diffusion.sixbit_core.delta_cache import DeltaCache
from sixbit_diffusion.sixbit_core.delta_codecs import CODECS, SPAN, bytes_needed, resolve_location

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
    cache, inp, out, now = DeltaCache(location, 4), pair(0), pair(1), pair(2)
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
    cache, states = DeltaCache(location, 3), [pair(n, dtype=dtype) for n in range(4)]
    for _ in range(2):  # storing again replaces
        for block in range(3):
            for item in range(2):
                cache.store(block, ("cond", item), 0, states[block], states[block + 1])
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
    near, away, now = DeltaCache("gpu-int8", 4), DeltaCache("host", 4), pair(2)
    for cache in (near, away):
        cache.store(0, STREAM, 0, pair(0), pair(1))
    assert away.bytes == near.bytes  # the span is not whole
    for a, b in zip(near.apply(0, STREAM, *now), away.apply(0, STREAM, *now), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(*(cache.change(0, STREAM, now[0], pair(3)[0]) for cache in (near, away)))


def steps_of(cache: DeltaCache, blocks: range, evaluation: int, seed: int) -> list[tuple[torch.Tensor, ...]]:
    """Hidden states before, between and after blocks that are computed one after the other."""
    states = [pair(seed)]
    for block in blocks:  # as a model passes them on: what a block gave is what the next gets
        states.append(tuple(x + y for x, y in zip(states[-1], pair(seed + block + 1), strict=True)))
        cache.store(block, STREAM, evaluation, *states[-2:])
    return states


def answered(cache: DeltaCache, blocks: range, skips: list[bool]) -> tuple[tuple[torch.Tensor, ...], int]:
    """What blocks that are all skipped make of the same input, and how often host memory was asked."""
    fetches, fetch = [], cache._courier.fetch
    cache._courier.fetch = lambda key: fetches.append(key) or fetch(key)
    cache.expect([STREAM], skips)
    now = pair(99)
    for block in blocks:
        if not cache.passes(block, STREAM):
            now = cache.apply(block, STREAM, *now)
    cache._courier.fetch = fetch
    return now, len(fetches)


def test_a_span_that_is_skipped_together_is_one_sum():
    blocks = range(SPAN + 2)  # the second span has two
    cache = DeltaCache("host", len(blocks))
    states = steps_of(cache, blocks, 0, seed=0)
    after, fetches = answered(cache, blocks, [True] * len(blocks))
    assert fetches == 2
    for now, x, y, out in zip(pair(99), states[0], states[-1], after, strict=True):
        assert relative(out - now, y - x) < 0.02
    assert answered(cache, blocks, [True] * (SPAN + 1) + [False])[1] == 1 + 2  # the second is broken up
    steps_of(cache, range(2, 3), 1, seed=50)  # one block of the first is of another evaluation
    assert answered(cache, blocks, [True] * len(blocks))[1] == SPAN + 1
    steps_of(cache, range(SPAN), 2, seed=0)
    assert answered(cache, blocks, [True] * len(blocks))[1] == 2
    cache.keep(())
    assert cache.bytes == 0


def test_what_something_else_adds_between_blocks_is_in_no_sum():
    blocks = range(SPAN)
    cache, before = DeltaCache("host", SPAN), pair(0)
    for block in blocks:
        after = tuple(x + y for x, y in zip(before, pair(block + 1), strict=True))
        cache.store(block, STREAM, 0, before, after)
        if block == 2:
            after[0].add_(100.0)  # in place, as a hook may
        before = after
    now, fetches = answered(cache, blocks, [True] * SPAN)
    assert fetches == SPAN and (now[0] - pair(99)[0]).abs().max() < 50


def test_residuals_that_are_scaled_have_no_sums():
    blocks = range(SPAN)
    cache = DeltaCache("host", SPAN, sums=False)
    steps_of(cache, blocks, 0, seed=0)
    assert answered(cache, blocks, [True] * SPAN)[1] == SPAN
    summed = DeltaCache("host", SPAN)
    steps_of(summed, blocks, 0, seed=0)
    assert summed.bytes > cache.bytes
    summed.expect([STREAM], [True] * SPAN)
    with pytest.raises(ValueError, match="a sum of residuals cannot be scaled"):
        summed.apply(0, STREAM, *pair(1), scale=2.0)


def test_a_span_of_which_a_block_was_skipped_has_no_sum():
    blocks = range(SPAN)
    cache = DeltaCache("host", SPAN)
    steps_of(cache, blocks, 0, seed=0)
    begun = pair(1)
    cache.store(0, STREAM, 1, begun, pair(2))
    cache.apply(1, STREAM, *pair(2))
    steps_of(cache, range(2, SPAN), 1, seed=7)
    assert answered(cache, blocks, [True] * SPAN)[1] == SPAN


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
    cache, inp, out = DeltaCache(location, 4), pair(0, width=256), pair(1, width=256)
    cache.store(0, STREAM, 0, inp, out)
    other = pair(2, width=256)
    grown = out[0] + 0.1 * other[0]  # a change that has nothing to do with Δ
    expected = relative(grown - inp[0], out[0] - inp[0])
    gamma, change = cache.change(0, STREAM, inp[0], grown).tolist()
    assert abs(change - expected) < 0.1 * expected  # uncorrected, NVFP4 would be off by 0.7 of it
    torch.testing.assert_close(gamma, float((grown - inp[0]).abs().sum() / inp[0].abs().sum()))
    assert cache.change(0, STREAM, inp[0], out[0])[1] < 0.02


def test_another_size_or_dtype_is_dropped():
    cache = DeltaCache("gpu", 4)
    cache.store(0, STREAM, 0, pair(0), pair(1))
    assert cache.holds(0, STREAM, *pair(2)) and not cache.holds(0, ("cond", 1), *pair(2))
    assert not cache.holds(0, STREAM, *pair(2, dtype=torch.bfloat16))
    assert cache.bytes == 0
    with pytest.raises(KeyError):
        cache.apply(0, STREAM, *pair(2))


def test_reset_equals_new():
    cache = DeltaCache("gpu", 4)
    cache.store(0, STREAM, 0, pair(0), pair(1))
    cache.reset()
    assert vars(cache) == vars(DeltaCache("gpu", 4))
