"""`run_block` on toy blocks whose residual, and so every decision, is known beforehand."""

import gc
import weakref
from dataclasses import dataclass, field, replace

import pytest
import torch
from sixbit_diffusion.kernels import quantize_nvfp4
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig, DMPQConfig
from sixbit_diffusion.sixbit_core.fits import BlockFit, Line, LinearFit
from sixbit_diffusion.sixbit_core.plan import BlockMemory, Moment, plan_blocks
from sixbit_diffusion.sixbit_core.predictor import Predictor
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight
from sixbit_diffusion.sixbit_core.run import BlockLayout, NonFiniteError, RunState, run_block

WIDTH, TOKENS, WORDS = 16, 6, 2
SHAPES = {"q": (32, 16), "k": (32, 16), "ff_out": (16, 64)}
LAYOUT = BlockLayout(("q", "k", "ff_out"), (SHAPES,) * 2)
COND, UNCOND = ("cond", 0), ("uncond", 0)
FREE = DeltaCacheConfig(threshold=0.25, max_skips=5, start=0.0)


def make_weights() -> dict[str, QuantizedWeight]:
    generator = torch.Generator().manual_seed(1)
    return {
        kind: QuantizedWeight(*quantize_nvfp4(torch.randn(shape, generator=generator)), *shape, 0)
        for kind, shape in SHAPES.items()
    }


@dataclass
class Toy:
    """Two blocks: video + growth(t)·own(stream), text + 1; their linears are fed but not added."""

    run: RunState
    growth: float = 0.1
    weights: dict[str, QuantizedWeight] = field(default_factory=make_weights)
    outlier: float = 1.0  # largest value of the second linear's input, whose mean magnitude is about 1
    ran: list = field(default_factory=list)  # (evaluation, block, streams)

    def call(self, streams, t, steps, sigma=None, tokens=TOKENS, poison=None):
        """One call of the model; returns (video, text) of its last block."""
        self.run.begin_call(streams, 1 - t / steps if sigma is None else sigma, t / steps, t == steps - 1)
        own = torch.tensor([1.0 + len(name) + item for name, item in streams])[:, None, None]
        video = torch.ones(len(streams), tokens, WIDTH) * own
        text = torch.zeros(len(streams), WORDS, WIDTH)
        for block in range(self.run.layout.blocks):
            video, text = self.block(block, video, text, streams, t, own, poison)
        return video, text

    def block(self, block, video, text, streams, t, own, poison):
        def compute():
            self.ran.append((self.run.evaluation, block, tuple(streams)))
            if self.run.dmpq is not None:
                x = torch.cat([text, video], dim=1)
                for kind in ("q", "k"):
                    self.run.linear(block, kind, x, self.weights[kind], None)
                wide = torch.ones(*x.shape[:2], 64)
                wide[:, 0, 0] = self.outlier
                self.run.linear(block, "ff_out", wide, self.weights["ff_out"], None)
            if poison == (t, block):
                return video * torch.nan, text
            return video + (1 + self.growth * t) * own, text + 1

        return run_block(self.run, block, video, text, compute)

    def sample(self, steps, streams=(COND, UNCOND), chunks=None):
        """All steps; `chunks(t)` -> list of stream lists. Returns {(t, stream): video}."""
        seen = {}
        for t in range(steps):
            for chunk in chunks(t) if chunks else [list(streams)]:
                video, text = self.call(chunk, t, steps)
                seen.update({(t, s): (video[i], text[i]) for i, s in enumerate(chunk)})
        return seen


def predictor(**fits) -> Predictor:
    """alpha, beta by kind; the excess line decides."""
    linears = {
        name: LinearFit(Line(*fits[kind], 1.0), None, 0.1, 0.01, (), LAYOUT.macs(block, kind))
        for name, block, kind in LAYOUT.linear_names()
    }
    theta = {"6.0": {"cache_off": 0.5, "cache_on": 0.5}}
    return Predictor("toy", "f" * 16, {}, linears, {"q": 30.0, "ff_out": 5.0}, theta)


def test_skips_as_computed_by_hand():
    # Δ = 1 + 0.1 t. r(1, 0) = 0.1: skips at E = 0.1 and 0.2, not at 0.3. r(4, 1) = (0.3 / 1.1) / 3 = 0.0909:
    # skips at 0.0909 and 0.1818, not at 0.2727. The last is never skipped.
    run = RunState(LAYOUT, cache=FREE)
    out = Toy(run).sample(9)
    report = run.report()
    assert report.choices["q"] == ("bb--b--bb", "bb--b--bb")
    assert report.skipped_fraction == 4 / 9
    assert report.average_activation_bits == 16 and report.effective_activation_bits == 16 * 5 / 9
    video, text = out[2, COND]  # own = 5: the input 5, plus in both blocks the residual of t = 1, 1.1·5
    torch.testing.assert_close(video, torch.full((TOKENS, WIDTH), 5 + 2 * 5.5))
    assert torch.equal(text, torch.full((WORDS, WIDTH), 2.0))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DeltaCacheConfig(threshold=0.0, start=0.0), "bbbbbbbbb"),
        (DeltaCacheConfig(threshold=9.0, max_skips=1, start=0.0), "bb-b-b-bb"),
        (DeltaCacheConfig(threshold=9.0, max_skips=99, start=0.5), "bbbbb---b"),
        (DeltaCacheConfig(threshold=9.0, max_skips=99, start=0.0, end=0.5), "bb---bbbb"),
        (DeltaCacheConfig(threshold=9.0, max_skips=99, start=0.0), "bb------b"),
        (None, "bbbbbbbbb"),
    ],
)
def test_limits_of_skipping(config, expected):
    run = RunState(LAYOUT, cache=config)
    Toy(run).sample(9)
    assert run.report().choices["q"][0] == expected


def known_blocks(gammas=(0.1, 0.1), magnitudes=(1.0,) * 50) -> Predictor:
    linears = predictor(q=(0.0, 0.0), k=(0.0, 0.0), ff_out=(0.0, 0.0))
    return replace(linears, blocks=tuple(BlockFit(gamma, magnitudes) for gamma in gammas))


def skips(config, fits=None, steps=9, **toy):
    """Choices of the two blocks, with residuals 1 + growth·t."""
    run = RunState(LAYOUT, cache=config, predictor=fits)
    Toy(run, **toy).sample(steps)
    return run.report().choices["q"]


def test_uniform_skips_a_share_evenly_in_all_blocks():
    config = replace(FREE, policy="uniform", threshold=0.5)
    assert skips(config) == ("bb" + "b-" * 3 + "b",) * 2
    assert skips(replace(config, threshold=0.25)) == ("bbb-bbb-b",) * 2


def test_blocks_of_a_budget_of_their_own():
    # The geometric mean of Γ is 0.2: τ is 0.5 in the first block and 0.125 in the second, r as by hand above.
    assert skips(FREE, known_blocks((0.1, 0.4))) == skips(FREE)
    own = skips(replace(FREE, policy="block-budget"), known_blocks((0.1, 0.4)))
    assert own == ("bb----b-b", "bb-b-b-bb")
    assert skips(replace(FREE, policy="block-budget"), known_blocks((0.3, 0.3))) == skips(FREE)


def test_what_skipping_needs_of_a_calibration():
    for config in (replace(FREE, policy="block-budget"), replace(FREE, scaled=True)):
        for lacking in (None, replace(known_blocks(), blocks=())):
            with pytest.raises(ValueError, match="knows the model's blocks: calibrate again"):
                RunState(LAYOUT, cache=config, predictor=lacking)
    with pytest.raises(ValueError, match="knows 3 blocks, the model has 2"):
        RunState(LAYOUT, cache=FREE, predictor=known_blocks((0.1,) * 3))


def test_a_scaled_residual_grows_as_calibration_saw():
    grows = known_blocks(magnitudes=tuple(1 + n / 50 for n in range(50)))
    config = replace(FREE, threshold=9.0, max_skips=1)
    plain, scaled = (
        Toy(RunState(LAYOUT, cache=replace(config, scaled=on), predictor=grows)).sample(5)
        for on in (False, True)
    )
    growth = (1 + 2 / 5) / (1 + 1 / 5)  # from evaluation 1 to the skipped 2
    video, text = scaled[2, COND]
    torch.testing.assert_close(video - 5, growth * (plain[2, COND][0] - 5))
    assert torch.equal(text, plain[2, COND][1])
    level = Toy(RunState(LAYOUT, cache=replace(config, scaled=True), predictor=known_blocks())).sample(5)
    assert all(torch.equal(level[key][0], plain[key][0]) for key in plain)


def test_sums_of_spans_are_kept_in_host_memory_but_not_of_scaled_residuals():
    grows = known_blocks(magnitudes=tuple(1 + n / 50 for n in range(50)))

    def sampled(location, scaled):
        config = replace(FREE, threshold=9.0, max_skips=1, location=location, scaled=scaled)
        run = RunState(LAYOUT, cache=config, predictor=grows)
        return Toy(run).sample(5), run.report().cache_bytes

    for scaled in (False, True):
        (near, held), (away, there) = (sampled(location, scaled) for location in ("gpu-int8", "host"))
        assert there == (held if scaled else held * 3 // 2)  # two blocks and their sum
        for key in near:
            for a, b in zip(near[key], away[key], strict=True):
                torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
                assert torch.equal(a, b) or not scaled


def test_blocks_in_groups_skip_together():
    def choices(group, changes=(0.2, 0.4), **config):
        layout = BlockLayout(LAYOUT.names, (SHAPES,) * 4)
        memories = [BlockMemory(change=change) for change in (*changes, 0.1, 0.1)]
        cache = replace(FREE, group=group, threshold=0.25, **config)
        assert len(memories) == layout.blocks
        return [plan.skip for plan in plan_blocks(memories, Moment(3, 0.5, False), cache, None)]

    assert choices(1) == [True, False, True, True]
    assert choices(2) == [False, False, True, True]  # mean change 0.3
    assert choices(3) == [True] * 4  # 0.233, and the last by itself
    assert choices(0) == [True] * 4 and choices(0, (0.5, 0.4)) == [False] * 4
    assert choices(2, (0.2, None)) == [False, False, True, True]
    assert choices(0, policy="random", seed=1) in ([True] * 4, [False] * 4)
    with pytest.raises(ValueError, match="group must be 0 or more"):
        replace(FREE, group=-1)


STREAMS = [(name, item) for name in ("cond", "uncond") for item in range(3)]
CHUNKS = {
    "joint": lambda t: [STREAMS],
    "split": lambda t: [[s] for s in STREAMS],
    "reversed": lambda t: [STREAMS[::-1]],
    "changing": lambda t: [STREAMS[: t % 5 + 1], STREAMS[: t % 5 : -1]],
}


@pytest.mark.parametrize("name", ["split", "reversed", "changing"])
@pytest.mark.parametrize("location", ["gpu", "gpu-int8", "gpu-nvfp4", "host"])
def test_chunking_changes_nothing(name, location):
    def sample(chunks):
        config = DeltaCacheConfig(threshold=0.25, max_skips=5, start=0.0, location=location)
        known = predictor(q=(1.0, 0.0), k=(0.0, 0.0), ff_out=(0.0, 1.0))
        run = RunState(LAYOUT, DMPQConfig(), config, known)
        return Toy(run).sample(12, chunks=chunks), run.report()

    expected, joint = sample(CHUNKS["joint"])
    actual, other = sample(CHUNKS[name])
    assert joint.skipped_fraction > 0.3 and "4" in joint.choices["k"][0]
    assert other == joint
    assert all(torch.equal(a, b) for key in expected for a, b in zip(expected[key], actual[key], strict=True))


def test_second_run_equals_first():
    runs = [RunState(LAYOUT, DMPQConfig(router="random"), FREE) for _ in range(2)]
    first, second = (Toy(run).sample(9) for run in runs)
    assert all(torch.equal(first[key][0], second[key][0]) for key in first)
    assert runs[0].report() == runs[1].report()


def test_two_runs_side_by_side_do_not_touch():
    alone = Toy(RunState(LAYOUT, cache=FREE))
    expected = alone.sample(9)
    one, other = Toy(RunState(LAYOUT, cache=FREE)), Toy(RunState(LAYOUT, cache=FREE), growth=3.0)
    for t in range(9):
        video, _ = one.call([COND, UNCOND], t, 9)
        other.call([COND], t, 9)
        assert torch.equal(video[0], expected[t, COND][0])


def test_the_worst_stream_decides_a_skip():
    def choices(streams):
        run = RunState(LAYOUT, cache=FREE)
        toy = Toy(run, growth=0.1)
        block = toy.block
        toy.block = lambda b, video, text, streams, t, own, poison: block(
            b, video, text, streams, t, own * (1 + (own > 6) * t * 1.0), poison
        )  # the residual of uncond, whose own is 7, doubles and more
        toy.sample(4, streams=streams)
        return run.report().choices["q"][0]

    assert choices([COND]) == "bb-b"
    assert choices([COND, UNCOND]) == choices([UNCOND, COND]) == "bbbb"


def test_evaluations_are_told_by_sigma_and_streams():
    run = RunState(LAYOUT, cache=FREE)
    toy = Toy(run)
    for sigma, streams in [(1.0, [COND]), (1.0, [UNCOND]), (0.5, [UNCOND]), (0.5, [COND]), (0.5, [COND])]:
        toy.call(streams, 0, 9, sigma=sigma)
    assert [evaluation for evaluation, block, _ in toy.ran if block == 0] == [0, 0, 1, 1]
    assert run.evaluation == 2 and run.report().choices["q"][0] == "bb-"  # Heun: the same sigma again
    toy.call([UNCOND], 0, 9, sigma=0.25)  # cond alone, then uncond alone: two evaluations
    assert run.evaluation == 3


def test_close_frees_every_tensor_also_after_an_exception():
    run = RunState(LAYOUT, DMPQConfig(router="int8"), FREE)
    toy = Toy(run)
    toy.sample(4)
    kept = [weakref.ref(part) for entry in run._deltas._entries.values() for part in entry.payload]
    run.begin_call([COND], 0.0, 0.9, True)

    def fails():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_block(run, 0, torch.ones(1, TOKENS, WIDTH), torch.ones(1, WORDS, WIDTH), fails)
    with pytest.raises(RuntimeError, match="outside"):
        run.linear(0, "q", torch.ones(1, 1, 16), toy.weights["q"], None)
    assert kept and all(ref() is not None for ref in kept)
    run.close()
    run.close()
    gc.collect()
    assert all(ref() is None for ref in kept)
    assert run.report().cache_bytes == 2 * 2 * (TOKENS + WORDS) * WIDTH * 4
    with pytest.raises(RuntimeError, match="closed"):
        run.begin_call([COND], 0.0, 1.0, True)


def test_another_size_is_computed_and_its_state_dropped():
    run = RunState(LAYOUT, cache=FREE)
    toy = Toy(run, growth=0.0)
    for t, tokens in enumerate([6, 6, 6, 4, 4, 4, 4, 4]):
        toy.call([COND], t, 8, tokens=tokens)
    # t = 3 was planned as a skip, so its first Δ is a newcomer's; t = 4 gives the second.
    assert run.report().choices["q"][0] == "bb-bb--b"


def test_newcomer_in_a_skipped_evaluation_is_computed_alone():
    def sample(chunks):
        run = RunState(LAYOUT, DMPQConfig(router="int8"), FREE)
        toy = Toy(run, growth=0.1)
        return toy, toy.sample(8, chunks=chunks), run.report()

    def joint(t):
        return [[COND, UNCOND]] if t >= 2 else [[COND]]

    toy, out, report = sample(joint)
    _, split, split_report = sample(lambda t: [[s] for s in joint(t)[0]])
    assert report == split_report
    assert all(torch.equal(out[key][0], split[key][0]) for key in out)
    torch.testing.assert_close(out[2, COND][0], torch.full((TOKENS, WIDTH), 5 + 2 * 5.5))  # skipped
    torch.testing.assert_close(out[2, UNCOND][0], torch.full((TOKENS, WIDTH), 7 + 2 * 1.2 * 7))  # computed
    assert report.choices["q"][0][:4] == "88-8"  # and no skip before it has two residuals
    assert (2, 0, (COND, UNCOND)) in toy.ran
    assert report.effective_bits_by_evaluation[2] == 4  # of two streams, one in INT8


def test_a_stream_that_left_is_dropped():
    run = RunState(LAYOUT, cache=FREE)
    toy = Toy(run)
    for t in range(4):
        toy.call([COND, UNCOND] if t < 2 else [COND], t, 9)
    assert run._deltas.bytes == 2 * (TOKENS + WORDS) * WIDTH * 4  # one stream in two blocks


def test_gamma_routes_and_bits_by_hand():
    # Γ = 1 in block 0 (1 -> 2) and 1/2 in block 1 (2 -> 3), at every t. θ = 0.5.
    known = predictor(q=(1.0, 0.0), k=(-1.0, 1.2), ff_out=(0.0, 0.6))
    run = RunState(LAYOUT, DMPQConfig(purified_refresh=False), None, known)
    Toy(run, growth=0.0).sample(3)
    report = run.report()
    assert report.choices == {"q": ("888", "844"), "k": ("844", "888"), "ff_out": ("888", "888")}
    assert report.bits_by_evaluation[0] == 8
    macs = 2 * (512 + 512 + 1024)
    assert report.bits_by_evaluation[1] == (8 * macs - 4 * 2 * 512) / macs == 7.0
    assert report.average_activation_bits == (8 + 7 + 7) / 3


def test_gamma_is_the_worst_streams_and_unknown_after_a_skip():
    known = predictor(q=(1.0, 0.0), k=(1.0, 0.0), ff_out=(1.0, 0.0))
    run = RunState(LAYOUT, DMPQConfig(theta=0.9, purified_refresh=False), FREE, known)
    toy = Toy(run, growth=0.0)
    toy.sample(7, streams=[COND])
    # Γ 1 > 0.9 in block 0; Γ 1/2 in block 1. Skips at 2..5 (r = 0, five at most), the last is computed, in
    # INT8 since there is no Γ from the evaluation before.
    assert run.report().choices["q"] == ("88----8", "84----8")

    both = RunState(LAYOUT, DMPQConfig(theta=0.9), None, known)
    wild = Toy(both, growth=0.0)
    block = wild.block
    wild.block = lambda b, video, text, streams, t, own, poison: block(
        b, video, text, streams, t, own * torch.tensor([1.0, 50.0])[:, None, None], poison
    )
    wild.sample(3)
    assert both.report().choices["q"][1] == "888"  # cond alone would route to NVFP4


@pytest.mark.parametrize(
    ("dmpq", "after_skip"),
    [
        (DMPQConfig(router="static"), {"q": "8", "ff_out": "b"}),  # limits of the predictor: 30 and 5
        (DMPQConfig(router="static", outlier_limit=25.0), {"q": "8", "ff_out": "8"}),
        (DMPQConfig(router="static", outlier_limit=0.5), {"q": "b", "ff_out": "b"}),
        (DMPQConfig(router="static", purified_refresh=False, bits=4.0), {"q": "4", "ff_out": "4"}),
        (DMPQConfig(router="bf16", outlier_limit=25.0), {"q": "b", "ff_out": "b"}),
    ],
)
def test_purified_refresh(dmpq, after_skip):
    known = predictor(q=(0.0, 0.0), k=(0.0, 0.0), ff_out=(0.0, 0.0))
    run = RunState(LAYOUT, dmpq, DeltaCacheConfig(threshold=9.0, max_skips=1, start=0.0), known)
    Toy(run, outlier=20.0).sample(5, streams=[COND])  # ratio of ff_out's input: 20 / 1.04 and a little less
    choices = run.report().choices
    assert {kind: choices[kind][0][3] for kind in after_skip} == after_skip
    assert choices["q"][0][2] == "-" and choices["q"][0][4] != "-"
    if dmpq.router == "static":  # the evaluation after the refresh is the router's again
        assert choices["ff_out"][0][4] == choices["ff_out"][0][1]


def test_nothing_is_read_back_inside_an_evaluation(monkeypatch):
    known = predictor(q=(1.0, 0.0), k=(0.0, 0.0), ff_out=(0.0, 1.0))
    run = RunState(LAYOUT, DMPQConfig(), DeltaCacheConfig(start=0.0, location="gpu-int8"), known)
    toy = Toy(run)
    toy.sample(2)
    toy.run.begin_call([COND, UNCOND], 0.4, 0.5, False)

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor was read on the host")

    own = torch.ones(2, 1, 1)
    video, text = torch.ones(2, TOKENS, WIDTH), torch.zeros(2, WORDS, WIDTH)
    kernels = {"linear": run.linear}
    monkeypatch.setattr(run, "linear", lambda b, kind, x, w, bias: kernels["linear"](b, kind, x, w, bias))
    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "numpy"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    for block in range(2):
        video, text = toy.block(block, video, text, [COND, UNCOND], 2, own, None)
    monkeypatch.undo()
    run.finish()


def test_non_finite_output_names_evaluation_and_block():
    toy = Toy(RunState(LAYOUT, cache=FREE))
    toy.call([COND], 0, 9)
    toy.call([COND], 1, 9, poison=(1, 1))
    with pytest.raises(NonFiniteError, match=r"evaluation 1, block 1.*bfloat16"):
        toy.call([COND], 2, 9)
    last = Toy(RunState(LAYOUT))
    last.call([COND], 0, 1, poison=(0, 0))
    with pytest.raises(NonFiniteError, match="evaluation 0, block 0"):
        last.run.finish()


def test_wrong_use_is_named():
    run = RunState(LAYOUT, DMPQConfig(router="int8"))
    video, text = torch.ones(1, TOKENS, WIDTH), torch.ones(1, WORDS, WIDTH)
    with pytest.raises(RuntimeError, match="begin_call"):
        run_block(run, 0, video, text, lambda: (video, text))
    with pytest.raises(ValueError, match="once"):
        run.begin_call([COND, COND], 1.0, 0.0, False)
    run.begin_call([COND, UNCOND], 1.0, 0.0, False)
    with pytest.raises(ValueError, match="2 streams"):
        run_block(run, 0, video, text, lambda: (video, text))
    run.begin_call([COND], 0.5, 0.0, False)
    weight = make_weights()["q"]
    wrong = [(torch.ones(1, 1, 16), "z", "linear kind"), (torch.ones(1, 16), "q", r"\(B, N, K\)")]
    for x, kind, message in wrong:
        with pytest.raises(ValueError, match=message):
            run_block(run, 0, video, text, lambda x=x, kind=kind: run.linear(0, kind, x, weight, None))
    for router, message in [("gamma", "needs a predictor"), ("x", "auto")]:
        with pytest.raises(ValueError, match=message):
            RunState(LAYOUT, DMPQConfig(router=router))
    with pytest.raises(ValueError, match="skip policy"):
        RunState(LAYOUT, cache=DeltaCacheConfig(policy="x"))


@pytest.mark.gpu
@pytest.mark.parametrize("location", ["gpu", "gpu-int8", "gpu-nvfp4", "host"])
def test_gpu_run_decides_as_the_cpu_does_without_a_sync(location):
    config = DeltaCacheConfig(threshold=0.25, max_skips=5, start=0.0, location=location)
    expected = RunState(LAYOUT, cache=config)
    Toy(expected).sample(9)
    run = RunState(LAYOUT, cache=config)
    for t in range(9):
        run.begin_call([COND, UNCOND], 1 - t / 9, t / 9, t == 8)
        own = torch.tensor([5.0, 7.0], device="cuda")[:, None, None]
        video = torch.ones(2, TOKENS, WIDTH, device="cuda") * own
        text = torch.zeros(2, WORDS, WIDTH, device="cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for block in range(2):
                inp, words = video, text
                video, text = run_block(
                    run,
                    block,
                    video,
                    text,
                    lambda inp=inp, words=words, t=t, own=own: (inp + (1 + 0.1 * t) * own, words + 1),
                )
        finally:
            torch.cuda.set_sync_debug_mode("default")
    run.finish()
    assert run.report() == expected.report()


def test_a_run_that_decides_nothing_still_counts_and_times():
    run = RunState(LAYOUT)
    for _ in range(3):
        run.begin_call([COND], 0.0, 0.0, False)  # no noise level: a stream that comes again begins the next
        run.ran_untouched()
    run.finish()
    run.close()
    report = run.report()
    assert report.evaluations == 3 == len(report.seconds_by_evaluation)
    assert report.skipped_fraction == 0 and report.average_activation_bits == 16
    assert set(report.choices["q"]) == {"bbb"}
