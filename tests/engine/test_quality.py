"""What the benchmark of quality is made of: rivals, step caches, twins, cost and solutions, on toys."""

import itertools
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sixbit_diffusion.engine.cost import Macs, model_macs, run_cost, step_cache_cost
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import load_model
from sixbit_diffusion.engine.sample import ClipSpec
from sixbit_diffusion.engine.settings import Choice
from sixbit_diffusion.engine.step_cache import EasyCache
from sixbit_diffusion.engine.trajectory import record, replay, trajectory_error_under
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig, DMPQConfig
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.run import RunState

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("quality", "parts", "methods", "rivals", "step_caches", "twins", "reference_parts")
MODULES += ("quality_calibrate", "quality_clips", "quality_measure", "quality_methods", "quality_parts")
MODULES += ("quality_bars", "quality_picture", "quality_pool", "quality_watch")
X = torch.randn(40, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 48)
W = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
MOMENTS = torch.stack([part.T @ part for part in X.split(16, dim=1)])


@pytest.fixture(autouse=True)
def path(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def recording(tiny):
    return record(tiny, ClipSpec("a star", (32, 32), 9, steps=6))


# Rivals


def toy_linear(name: str):
    import rivals

    layout = BlockLayout(("q", "k", "ff"), ({kind: tuple(W.shape) for kind in ("q", "k", "ff")},))
    weights = {"q": W, "k": 4 * W, "ff": W}
    made = rivals.make_linears(
        rivals.RECIPES[name],
        layout,
        lambda block, kind: weights[kind],
        lambda name: X.abs().amax(0),
        lambda name: MOMENTS if name.endswith("q") else None,
    )
    return rivals, made


def test_smoothquant_is_its_formula():
    _rivals, made = toy_linear("smoothquant, int4 weights")
    scale = X.abs().amax(0).sqrt() / (4 * W).abs().amax(0).sqrt()  # q and k together
    torch.testing.assert_close(made["blocks.0.q"].scale, scale)
    moved, weight = X / scale, W * scale
    step = moved.abs().amax(1, keepdim=True) / 127
    expected = (moved / step).round() * step
    rows = weight.abs().amax(1, keepdim=True) / 7
    torch.testing.assert_close(
        made["blocks.0.q"](X), expected @ ((weight / rows).round() * rows).T, rtol=1e-4, atol=1e-3
    )
    torch.testing.assert_close(made["blocks.0.ff"].scale, X.abs().amax(0).sqrt() / W.abs().amax(0).sqrt())


def test_rotations_are_hadamard_blocks_with_signs():
    rivals, made = toy_linear("quarot")
    rotation = rivals.rotation_matrix(48)
    torch.testing.assert_close(rotation @ rotation.T, torch.eye(48), rtol=0, atol=1e-5)
    assert (rotation != 0).sum() == 48 * 16 and set(rotation.abs().unique().tolist()) == {0.0, 0.25}
    assert len({bool(v) for v in rotation.sum(1) > 0}) == 2
    linear = made["blocks.0.q"]
    moved = (X @ rotation).T @ (X @ rotation)
    moments = torch.stack([moved[n : n + 16, n : n + 16] for n in range(0, 48, 16)])
    torch.testing.assert_close(rivals.moved_moments(MOMENTS, None, rotation), moments, rtol=1e-4, atol=1e-2)
    known = rivals.moved_moments(MOMENTS, None, rotation)
    scaled = X / X.abs().amax(0)
    found = rivals.moved_moments(MOMENTS, X.abs().amax(0), None)
    torch.testing.assert_close(found[1], scaled[:, 16:32].T @ scaled[:, 16:32], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear.weight, rivals.nvfp4_weight(W @ rotation, known))
    assert not torch.equal(linear.weight, rivals.nvfp4_weight(W @ rotation, None))
    torch.testing.assert_close(made["blocks.0.ff"].weight, rivals.nvfp4_weight(W @ rotation, None))
    torch.testing.assert_close(linear(X), rivals.int8_rows(X @ rotation) @ linear.weight.T)


def test_viditq_scales_each_linear_and_rotates():
    rivals, made = toy_linear("vidit-q, int4 weights")
    linear = made["blocks.0.q"]
    scale = X.abs().amax(0).sqrt() / W.abs().amax(0).sqrt()
    torch.testing.assert_close(linear.scale, scale)
    torch.testing.assert_close(linear.weight, rivals.int4_rows((W * scale) @ rivals.rotation_matrix(48)))


def test_what_a_rival_moves_it_moves_back(monkeypatch):
    import rivals

    monkeypatch.setattr(rivals, "nvfp4_weight", lambda weight, moments: weight)
    monkeypatch.setattr(rivals, "int4_rows", lambda weight: weight)
    monkeypatch.setattr(rivals, "ROUNDINGS", {"int8": lambda x: x, "nvfp4": lambda x: x})
    for name in rivals.RECIPES:
        torch.testing.assert_close(toy_linear(name)[1]["blocks.0.q"](X), X @ W.T, rtol=1e-4, atol=1e-3)


def test_a_rival_runs_in_place_of_the_packs_linears(tiny, recording):
    import rivals
    from methods import Ours
    from parts import Bench

    bench = Bench(Namespace(predictor=None, steps=6), find_machine("cpu"), tiny.facts, tiny)
    uniform = rivals.MakeRival(rivals.RECIPES["uniform w4a8"], lambda name: torch.ones(128))
    settings = Ours("x", Choice(precision="w4a8", cache="off")).settings(bench, 0)
    error, report = trajectory_error_under(tiny, uniform(bench, settings), "search", recording)
    assert report.average_activation_bits == 8
    plain = RunState(tiny.layout, DMPQConfig(router="int8"))
    ours, _ = trajectory_error_under(tiny, plain, "search", recording)
    assert 0 < error < 3 * ours and error != ours


# Step caches


def test_easycache_by_hand():
    cache, ran = EasyCache(0.25), []

    def compute(x):
        ran.append(cache.asked - 1)
        return 2 * x  # k = 2, |v_i| = 2·x_i

    out = [cache.step(torch.tensor([10.0 + t]), compute, 12) for t in range(12)]
    # E grows by 2·1/(2·x_i): two steps are answered after x_i = 11, three after 14, the last one never
    assert ran == [0, 1, 4, 8, 11]
    assert out[2].item() == 12.0 + (22.0 - 11.0) and out[3].item() == 13.0 + 11.0
    assert cache.asked == 12 and cache.answered == 12 - len(ran)


def test_teacache_by_hand():
    from step_caches import TeaCache, relative_change

    cache = TeaCache(0.25, [2.0, 0.0])  # f(x) = 2 x
    embedded = [torch.full((1, 4), 1.05**t) for t in range(10)]
    assert relative_change(embedded[1], embedded[0]) == pytest.approx(0.05)
    answers = [cache.decide(e, 10) for e in embedded]  # 0.1 a step: two are answered, the third computed
    assert answers == [False, True, True, False, True, True, False, True, True, False]
    assert (cache.asked, cache.answered) == (10, 6)


def test_step_caches_on_a_transformer(tiny, recording):
    from step_caches import TeaCache, fit_teacache

    transformer = tiny.use("full")
    coefficients = fit_teacache(transformer, [recording])
    assert len(coefficients) == 5
    for cache in (EasyCache(0.0), TeaCache(-1e9, coefficients)):
        with cache.on(transformer, 6):
            assert replay(transformer, recording) == 0.0
        assert (cache.asked, cache.answered) == (6, 0) and "forward" not in transformer.__dict__
    for cache, expected in ((EasyCache(1e9), 3), (TeaCache(1e9, coefficients), 4)):
        with cache.on(transformer, 6):
            error = replay(transformer, recording)
        assert cache.answered == expected and 0 < error < 1
    tea = TeaCache(1e9, coefficients)
    with tea.on(transformer, 6), torch.no_grad():
        first = transformer(**recording.inputs[0])[0]
        again = transformer(**{**recording.inputs[0]})[0]  # same input: the residual gives the same output
    torch.testing.assert_close(again, first)


# Twins


def test_a_twin_is_the_same_function_with_outliers(tiny_folder, tmp_path):
    from twins import write_twin

    clip, ratios = ClipSpec("a star", (32, 32), 9, steps=2), []
    model = load_model(str(tiny_folder), None, "full", find_machine("cpu"))
    wanted = record(model, clip).outputs
    for factor in (1, 8, 32):
        folder = write_twin(tiny_folder, tmp_path / f"s{factor}", factor)
        twin = load_model(str(folder), None, "full", find_machine("cpu"))
        found = record(twin, clip)
        for a, b in zip(found.outputs, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        run = RunState(twin.layout, DMPQConfig(router="int8"), DeltaCacheConfig())
        trajectory_error_under(twin, run, "search", found)
        ratios.append([run._memory[1].ratios[kind] for kind in ("q", "attn_out", "ff_proj")])
    for before, after in itertools.pairwise(ratios):
        assert all(b > 1.5 * a for a, b in zip(before, after, strict=True)), ratios
    changed = load_file(next((tmp_path / "s8" / "transformer").glob("*.safetensors")))
    assert (changed["transformer_blocks.0.norm1.norm.weight"] == 8).sum() == 2  # one of 64 channels
    with pytest.raises(ValueError, match="power of two, got 3"):
        write_twin(tiny_folder, tmp_path / "s3", 3)


# Cost


def test_cost_by_hand(tiny):
    facts = tiny.facts
    macs, tokens = model_macs(facts), facts.tokens(facts.size, facts.frames)
    assert macs.linears[0] == {k: tokens * facts.layout.macs(0, k) for k in facts.layout.names}
    assert macs.attention == 2 * tokens * tokens * 128 and macs.modulation == 2 * 32 * 6 * 128
    small = Macs([{k: 100 for k in facts.layout.names}] * 2, 50, 10, 30)
    assert small.total == 2 * (600 + 60) + 30

    def report(**settings):
        run = RunState(tiny.layout, **settings)
        trajectory_error_under(tiny, run, "search", record(tiny, ClipSpec("a", (32, 32), 9, steps=3)))
        return run.report()

    w4a8 = report(dmpq=DMPQConfig(router="int8"))
    assert run_cost(small, w4a8, 4, 3) == pytest.approx(
        (2 * (600 * 4 * 8 / 256 + 50 + 10 * 4 * 16 / 256) + 30) / small.total
    )
    assert run_cost(small, report(), 16, 3) == pytest.approx(1.0)
    skipping = report(cache=DeltaCacheConfig(threshold=9.0, start=0.0))
    assert skipping.skipped_fraction == 0.0  # of three evaluations none may be skipped
    longer = report(cache=None)
    assert run_cost(small, longer, 16, 6) == pytest.approx(0.5)


def test_a_skipped_block_costs_nothing(tiny, recording):
    run = RunState(tiny.layout, cache=DeltaCacheConfig(threshold=1e9, start=0.0, max_skips=9))
    trajectory_error_under(tiny, run, "full", recording)
    macs, skipped = model_macs(tiny.facts), run.report().skipped_fraction
    assert skipped == 0.5  # evaluations 2, 3, 4 of 6
    assert run_cost(macs, run.report(), 16, 6) == pytest.approx(step_cache_cost(macs, skipped))


# Solutions and parts


@pytest.mark.parametrize(("rising", "logarithmic"), [(True, True), (False, False)])
def test_a_solution_meets_its_target(rising, logarithmic):
    from quality_measure import TRIES, solve
    from quality_methods import Solvable

    solvable = Solvable(None, "share", 0.3, 1e-3, 3.0, logarithmic, rising, 0.002)
    found = solve(solvable, lambda v: min(v / 2, 1.0) if rising else 1.0 - v / 2)
    assert abs(found["reached"] - 0.3) <= 0.002 and found["runs"] <= TRIES - 2  # halving alone takes more
    assert found["value"] == pytest.approx(0.6 if rising else 1.4, abs=0.01)
    out_of_reach = solve(solvable, lambda v: 0.1)
    assert out_of_reach["reached"] == 0.1 and out_of_reach["runs"] == TRIES


def test_skip_methods_share_names_with_what_is_solved():
    import quality_methods as table

    solvables = table.to_solve_skips(0.3, [1.0, 0.0])
    solved = dict.fromkeys(solvables, 0.1)
    names = [m.name for m in (*table.skip_methods(0.3, solved, [1.0]), *table.cached_methods(solved))]
    assert set(solvables) | {table.FEWER, "w4a8"} == set(names) and len(names) == len(set(names))
    assert all(one.make(0.2).name == name for name, one in solvables.items())
    assert all(one.tolerance <= 0.003 for one in solvables.values())
    assert len({m.identity for m in table.skip_methods(0.3, solved, [1.0])}) == len(table.SKIPS) + 3


def test_rows_are_kept_by_method(tiny_folder, tmp_path, capsys, monkeypatch):
    import parts

    given = Namespace(
        model=str(tiny_folder),
        predictor=None,
        device="cpu",
        steps=2,
        workers=1,
        shard=None,
        out=tmp_path / "r.json",
    )
    asked = []

    def measure(bench, group, units):
        for unit in units:
            asked.append((group, unit))
            if len(asked) == 3:
                raise KeyboardInterrupt
            yield unit, {"psnr_db": float(group) + len(unit)}

    part = parts.Part(
        ["0", "1"],
        ["a", "bb"],
        measure,
        lambda rows: ({"x": 1.0}, parts.means(rows, ["a"], ["psnr_db"])),
        loads=False,
    )
    job = parts.Job("toy-s1-2", "quality", part, [], [], "command")
    with pytest.raises(KeyboardInterrupt):
        parts.run_part(given, job)
    parts.run_part(given, job)
    assert asked == [("0", "a"), ("0", "bb"), ("1", "a"), ("1", "a"), ("1", "bb")]
    results = parts.read_results(given.out)
    assert results["bars"] == [{"id": "quality.x", "value": 1.0}]
    assert results["rows"][3] == {"part": "toy-s1-2", "group": "1", "unit": "bb", "psnr_db": 3.0}
    assert results["parts"]["toy-s1-2"]["summary"]["a"]["psnr_db"]["mean"] == 1.5
    from quality_picture import curves

    results["rows"] = [{**row, "cost": 0.5} for row in results["rows"]]
    found = curves(results, 1, 2)
    assert found["a"][0][:2] == (0.5, 1.5) and curves(results, 1, 25) == {} == curves(results, 8, 2)


def test_a_router_and_a_cache_of_one_name_are_two_curves():
    from quality_picture import curves

    rows = [
        {"part": part, "group": "0", "unit": "random", "psnr_db": 30.0, "cost": 0.5}
        for part in ("routers-s1-2-6", "skips-s1-2-0.46")
    ]
    found = curves({"parts": {row["part"]: {} for row in rows}, "rows": rows}, 1, 2)
    assert {name: len(points) for name, points in found.items()} == {"random router": 1, "random": 1}


def asked_for(monkeypatch, *options):
    """What `quality.py` makes of a command line."""
    import quality
    import quality_parts

    found = []
    monkeypatch.setattr(quality_parts, "run", lambda given, *rest: found.append(given) or 0)
    monkeypatch.setattr(sys, "argv", ["quality.py", *options])
    assert quality.main() == 0
    return found[0], quality_parts._published(found[0])


@pytest.mark.parametrize("option", [("--prompts", "8"), ("--followed", "4"), ("--model", "other")])
def test_a_trial_leaves_what_is_published_alone(option, monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit):
        asked_for(monkeypatch, "--part", "weights", *option)
    assert "an --out of its own" in capsys.readouterr().err
    _given, published = asked_for(
        monkeypatch, "--part", "weights", *option, "--out", str(tmp_path / "r.json")
    )
    assert not published


def test_the_usual_set_up_is_published(monkeypatch):
    assert asked_for(monkeypatch, "--part", "weights", "--prompts", "64")[1]
    for other in (("--twin", "8"), ("--steps", "25"), ("--bits", "5"), ("--share", "0.2")):
        assert not asked_for(monkeypatch, "--part", "weights", *other)[1]


@pytest.mark.parametrize(
    ("part", "what"), [("routers", "average_activation_bits"), ("skips", "skipped_fraction")]
)
def test_bars_want_equal_bits_and_shares(part, what, monkeypatch, capsys):
    import quality_bars
    import quality_methods as table
    import quality_parts

    given, published = asked_for(monkeypatch, "--part", part)
    assert published
    methods, conclude = {
        "routers": (
            table.router_methods(6.0, dict.fromkeys(table.SOLVED_ROUTERS, 0.1)),
            quality_bars.routers,
        ),
        "skips": (
            table.skip_methods(0.3, dict.fromkeys(table.to_solve_skips(0.3, []), 0.1), []),
            quality_bars.skips,
        ),
    }[part]
    whole = quality_parts._sampled(given, methods, conclude).conclude

    def rows(**at):
        told = {"psnr_db": 30.0, "error": 0.1, "seconds": 1.0}
        return [
            {m.name: {**told, what: at.get(m.name, 0.46) + d} for m in methods if m.name} for d in (-0.1, 0.1)
        ]

    bars, summary = whole(rows(random=0.479))  # equal enough, and equal in the mean only
    assert len(bars) > 1 and None not in bars.values() and "seconds" not in summary["random"]
    assert summary["no bars"] == {} and not capsys.readouterr().err
    ours = quality_bars.OURS[part]
    assert summary["differences"][f"{ours} - random"]["psnr_db"] == {"mean": 0.0, "interval": [0.0, 0.0]}
    refused, summary = whole(rows(random=0.481))
    (bar,) = [bar for bar, value in refused.items() if value is None]
    assert "random" in bar and len(refused) == len(bars)  # the others stay
    assert summary["random"][what]["mean"] == pytest.approx(0.481)
    said = capsys.readouterr().err.strip()
    assert said.count("\n") == 0 and f"no bar {bar}" in said and "0.481 of random" in said
    assert summary["no bars"][bar] in said


@pytest.mark.parametrize("part", ["skips", "cached"])
def test_bars_of_skipping_speak_of_45_percent(part, monkeypatch, capsys):
    import quality_bars
    import quality_methods as table
    import quality_parts

    solved = dict.fromkeys(table.to_solve_skips(0.46, []), 0.1)
    monkeypatch.setattr(quality_parts, "_solved", lambda given, part: solved)
    monkeypatch.setattr(quality_parts, "_teacache", lambda given: [])
    given, published = asked_for(monkeypatch, "--part", part)
    assert published and given.share == 0.46
    made = quality_parts.PARTS[part](given)
    ours = quality_bars.OURS[part]

    def rows(**at):
        shares = {name: at.get(name, 0.46) for name in made.units} | {"w4a8": 0.0}
        return [{name: {"psnr_db": 30.0, "skipped_fraction": share} for name, share in shares.items()}]

    bars, summary = made.conclude(rows())
    assert bars and None not in bars.values() and summary["short of the share"] == {}
    fewer = {name: 0.449 for name in made.units}
    bars, summary = made.conclude(rows(**fewer))
    assert (
        set(bars.values()) == {None}
        and "0.449" in summary["no bars"]["skip_" + ("cost_db" if ours[0] == "w" else "alone_db")]
    )
    assert summary["short of the share"] == {name: 0.449 for name in made.units if name != "w4a8"}


def test_the_prompts_of_a_trial_are_the_first_of_the_whole():
    import quality_parts

    def captions(part, prompts):
        return [p.text for p in quality_parts._prompts(Namespace(part=part, prompts=prompts))]

    assert captions("weights", 2) == captions("weights", 64)[:2] == captions("accuracy", 256)[:2]
    assert captions("solve-skips", 2) == captions("calibrate", 4)[:2] != captions("weights", 2)


def test_thresholds_serve_the_model_that_they_were_solved_for(tiny_folder, tmp_path):
    import parts
    import quality_parts

    given = Namespace(model=str(tiny_folder), predictor=None, device="cpu", steps=2, twin=1, share=0.3)
    given.workers, given.shard, given.out = 1, None, tmp_path / "r.json"
    part = parts.Part(
        ["random"],
        ("",),
        lambda bench, group, units: iter([("", {"method": group, "value": 0.5})]),
        lambda rows: ({"x": None, "y": 1.0}, {row[""]["method"]: row[""] for row in rows}),
        loads=False,
    )
    old = {
        "bars": [{"id": "quality.x", "value": 3.0}, {"id": "quality.z", "value": 4.0}],
        "rows": [],
        "parts": {},
    }
    parts.write_json(given.out, old)
    parts.run_part(given, parts.Job("solve-skips-s1-2-0.3", "quality", part, [], [], "command"))
    found = parts.read_results(given.out)
    bars = {bar["id"]: bar["value"] for bar in found["bars"]}
    assert bars == {"quality.y": 1.0, "quality.z": 4.0}  # a bar that no longer holds goes
    assert quality_parts._solved(given, "solve-skips") == {"random": 0.5}
    for other in ("fingerprint", "predictor"):
        changed = {**found, "parts": {}}
        for name, one in found["parts"].items():
            changed["parts"][name] = {**one, "of": {**one["of"], other: "another"}}
        parts.write_json(given.out, changed)
        with pytest.raises(InputError, match="another model or predictor; run --part solve-skips again"):
            quality_parts._solved(given, "solve-skips")


class Counting:
    """A method that tells how often it ran."""

    baseline, identity = None, "counting"

    def __init__(self, name, key="same"):
        self.name, self._key, self.ran, self.went = name, key, 0, 0

    def key(self, bench, number):
        return self._key

    def sample(self, bench, clip, embeds):
        self.ran += 1
        latents = torch.full((1, 3, 4, 4, 4), 0.1 * self.ran)
        return latents, {"skipped_fraction": 0.5, "seconds": 1.0}

    def follow(self, bench, recording):
        self.went += 1
        return 0.25


def test_what_one_part_has_sampled_no_other_samples_again(tiny, tmp_path, monkeypatch):
    import quality_clips
    import quality_measure
    from parts import Bench

    given = Namespace(predictor=None, steps=2, work=tmp_path, tied="a")
    prompts = [Namespace(text="a star")] * 2
    bench = Bench(given, find_machine("cpu"), tiny.facts, tiny, prompts)
    full = []
    monkeypatch.setattr(quality_clips, "sample", lambda *a: full.append(a) or sampled_once(*a))
    sampled_once = quality_measure.record.__globals__["sample"]

    def rows(*methods, group="1", followed=1):
        part = quality_measure.Sampled({m.name: m for m in methods}, followed)
        return dict(part.measure(bench, group, [m.name for m in methods]))

    first, second, other = Counting("a"), Counting("b"), Counting("c", "another")
    before = rows(first)["a"]
    assert "error" not in before and first.ran == 1 and len(full) == 1
    again = rows(second, other)
    assert again["b"] == before and second.ran == 0 and other.ran == 1 and len(full) == 1
    followed = rows(first, second, followed=2)
    assert followed["a"] == followed["b"] == {**before, "error": 0.25} and (first.went, second.went) == (1, 0)
    assert rows(second)["b"] == before  # where it is not asked for it is not told
    for path in (tmp_path / "clips").iterdir():
        path.write_bytes(path.read_bytes()[:40])
    assert rows(second)["b"] == before and second.ran == 1 and len(full) == 2
    given.tied = "another calibration"
    rows(second)
    rows(second, group="0")
    assert second.ran == 3
    monkeypatch.setattr(quality_clips, "_CODE", "other code")
    rows(second)
    assert second.ran == 4


def test_the_code_that_decides_a_clip_is_in_its_name(tmp_path):
    import quality_clips

    for folder in ("kernels", "sixbit_core", "engine", "benchmarks", "nodes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("results"))

    def name():
        return quality_clips.code_digest(tmp_path, tmp_path / "benchmarks")

    def change(file):
        with (tmp_path / file).open("a") as end:
            end.write("\nX = 1\n")
        return name()

    assert name() == quality_clips._CODE
    assert change("nodes/run.py") == change("benchmarks/quality_picture.py") == name()
    deciding = ["kernels/int8.py", "sixbit_core/families/cogvideox.py", "engine/sample.py"]
    deciding += [f"benchmarks/{module}.py" for module in quality_clips.MODULES]
    assert len({name(), *map(change, deciding)}) == len(deciding) + 1
    before = name()
    (tmp_path / "kernels" / "int8.py").rename(tmp_path / "kernels" / "int7.py")
    assert name() != before


def test_what_decides_a_clip_asks_no_module_that_does_not():
    import quality_clips

    asked = {
        found
        for module in quality_clips.MODULES
        for found in re.findall(r"^from (\w+) import", (ROOT / f"benchmarks/{module}.py").read_text(), re.M)
        if (ROOT / f"benchmarks/{found}.py").exists()
    }
    assert asked <= {*quality_clips.MODULES, "quality_calibrate"}  # whose files are in `tied`


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({}, {}, True),
        ({"dmpq": {"theta": 0.1}}, {"dmpq": {"theta": 0.2}}, False),
        ({"weights": "rtn"}, {}, False),
        ({"cache": {"threshold": 0.1}}, {"cache": {"threshold": 0.2}}, False),
    ],
)
def test_a_key_is_of_what_a_method_does(a, b, same, tiny):
    from methods import Ours
    from parts import BALANCED, Bench
    from rivals import RECIPES, MakeRival

    bench = Bench(Namespace(predictor=None, steps=6), find_machine("cpu"), tiny.facts, tiny)
    choice = Choice(precision="w4a8", preset="balanced")
    one, two = Ours("a", choice, **a), Ours("b", choice, "x", **b)
    assert (one.key(bench, 0) == two.key(bench, 0)) is same
    assert one.key(bench, 0) != one.key(bench, 1)  # what is random is drawn anew for every prompt
    made = [Ours("a", choice, make_run=MakeRival(recipe, None)).key(bench, 0) for recipe in RECIPES.values()]
    assert len({*made, one.key(bench, 0)}) == len(RECIPES) + 1 and choice != BALANCED


# Several parts in one go


def toy_pool(tiny_folder, tmp_path, monkeypatch, measure, names=("weights", "solve-skips", "skips")):
    """What watches toy parts, and how to work on them in this process."""
    import parts
    import quality_pool
    import quality_watch

    claims = tmp_path / "claims"
    claims.mkdir()
    given = Namespace(model=str(tiny_folder), predictor=None, device="cpu", steps=2, out=tmp_path / "r.json")
    given = Namespace(**vars(given), claims=claims, deadline=None)
    each = [Namespace(**vars(given), part=name) for name in names]

    def make_job(one, program, command):
        assert one.part != "skips" or (claims / "solve-skips.there").exists()  # its thresholds
        part = parts.Part(
            ["0", "1"],
            ("a", "b"),
            lambda bench, group, units: measure(one.part, group, units),
            lambda rows: ({one.part: float(len(rows))}, {}),
            loads=False,
        )
        return parts.Job(f"{one.part}-toy", "quality", part, [], program, command)

    for module in (quality_pool, quality_watch):
        monkeypatch.setattr(module, "make_job", make_job)
        monkeypatch.setattr(module, "prepare", lambda given: None)
    watch = quality_watch.Watch(each, "command", quality_pool.Claims(claims), 0.0)

    def work(by="0/2"):
        mine = [Namespace(**vars(one), shard=by) for one in each]
        return quality_pool.take_work(mine, "command")

    return watch, work


def rows_of(asked):
    def measure(part, group, units):
        for unit in units:
            asked.append((part, group, unit))
            yield unit, {"psnr_db": 1.0}

    return measure


def test_parts_wait_for_what_they_need_and_are_not_measured_twice(tiny_folder, tmp_path, monkeypatch, capsys):
    import parts
    import quality_pool
    import quality_watch

    asked = []
    watch, work = toy_pool(tiny_folder, tmp_path, monkeypatch, rows_of(asked))
    monkeypatch.setattr(quality_pool.time, "sleep", lambda seconds: watch.look())
    watch.look()
    assert work() == 0
    order = [part for part, _, _ in asked]
    assert order == ["weights"] * 4 + ["solve-skips"] * 4 + ["skips"] * 4 and not watch.failed
    found = parts.read_results(tmp_path / "r.json")
    assert [bar["id"] for bar in found["bars"]] == ["quality.skips", "quality.solve-skips", "quality.weights"]
    assert not [path for path in tmp_path.iterdir() if "partial" in path.name]
    (tmp_path / "again").mkdir()
    again = quality_watch.Watch(watch.each, "command", quality_pool.Claims(tmp_path / "again"), 0.0)
    again.look()
    assert all(again.claims.has(one.part, "there") for one in again.each) and len(asked) == 12
    assert capsys.readouterr().out.count("is there already") == 3


def test_two_processes_share_the_groups(tiny_folder, tmp_path, monkeypatch):
    import quality_pool

    asked = []
    watch, work = toy_pool(tiny_folder, tmp_path, monkeypatch, rows_of(asked), ["weights"])
    watch.look()
    assert watch.claims.take("weights", "0", "1/2") and not watch.claims.take("weights", "0", "0/2")

    def rest(seconds):  # the other one ends its group
        quality_pool._open(Namespace(**vars(watch.each[0])), "1/2").store.add("0/a", {})
        quality_pool._open(Namespace(**vars(watch.each[0])), "1/2").store.add("0/b", {})
        watch.look()

    monkeypatch.setattr(quality_pool.time, "sleep", rest)
    assert work() == 0 and {group for _, group, _ in asked} == {"1"}


def test_a_part_that_fails_stops_no_other(tiny_folder, tmp_path, monkeypatch, capsys):
    import parts
    import quality_pool

    asked = []

    def measure(part, group, units):
        if part == "solve-skips":
            raise RuntimeError("broken")
        yield from rows_of(asked)(part, group, units)

    watch, work = toy_pool(tiny_folder, tmp_path, monkeypatch, measure, ["solve-skips", "weights", "skips"])
    monkeypatch.setattr(quality_pool.time, "sleep", lambda seconds: watch.look())
    for _ in range(4):  # two groups, each tried twice
        watch.look()
        with pytest.raises(RuntimeError):
            work()
        watch.ended("0/2", "RuntimeError: broken")
    assert work() == 0
    assert (
        watch.failed["solve-skips"] == "RuntimeError: broken"
        and "solve-skips failed" in watch.failed["skips"]
    )
    assert {part for part, _, _ in asked} == {"weights"}
    assert list(parts.read_results(tmp_path / "r.json")["parts"]) == ["weights-toy"]


def test_a_group_whose_process_died_is_taken_by_another(tiny_folder, tmp_path, monkeypatch, capsys):
    import quality_pool

    asked, died = [], []

    def measure(part, group, units):
        for unit, row in rows_of(asked)(part, group, units):
            yield unit, row
            if not died:
                died.append(group)
                raise KeyboardInterrupt

    watch, work = toy_pool(tiny_folder, tmp_path, monkeypatch, measure, ["weights"])
    monkeypatch.setattr(quality_pool.time, "sleep", lambda seconds: watch.look())
    watch.look()
    with pytest.raises(KeyboardInterrupt):
        work()
    watch.look()
    watch.ended("0/2", "killed")
    assert work("1/2") == 0 and not watch.failed
    assert sorted(asked) == [("weights", g, u) for g in "01" for u in "ab"]  # its row was kept


def test_a_model_that_does_not_load_is_no_groups_fault(tiny_folder, tmp_path, monkeypatch):
    import quality_pool

    asked = []
    watch, work = toy_pool(tiny_folder, tmp_path, monkeypatch, rows_of(asked), ["weights"])
    whole = quality_pool.open_bench

    def refuse(part):
        raise torch.OutOfMemoryError("out of memory")

    watch.look()
    monkeypatch.setattr(quality_pool, "open_bench", refuse)
    for _ in range(6):
        with pytest.raises(torch.OutOfMemoryError):
            work()
        assert not watch.claims.taken("0/2")
        watch.ended("0/2", "out of memory")
    assert not watch.attempts and not watch.failed

    def open_late(part):  # meanwhile another takes what was free
        assert watch.claims.take("weights", "0", "1/2")
        return whole(part)

    def rest(seconds):
        watch.claims.release("weights", "0")
        watch.look()

    monkeypatch.setattr(quality_pool, "open_bench", open_late)
    monkeypatch.setattr(quality_pool.time, "sleep", rest)
    assert work() == 0 and [group for _, group, _ in asked] == ["1", "1", "0", "0"]


def test_a_group_finished_before_its_process_died_did_not_fail(tiny_folder, tmp_path, monkeypatch):
    import quality_pool

    watch, _work = toy_pool(tiny_folder, tmp_path, monkeypatch, rows_of([]), ["weights"])
    watch.look()
    store = quality_pool._open(watch.each[0], "1/2").store
    for group in "01":
        assert watch.claims.take("weights", group, "1/2")
    for unit in "ab":
        store.add(f"0/{unit}", {"psnr_db": 1.0})
    watch.ended("1/2", "killed")
    assert list(watch.attempts) == [("weights", "1")]
    assert not watch.claims.free("weights", "0") and watch.claims.free("weights", "1")


WORKER = """
import pathlib, sys
folder, end, by = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[-1]
begun = len(list(folder.glob("weights@*")))
(folder / "starts").open("a").write("x")
if begun == end:
    sys.exit("out of memory")
(folder / f"weights@{begun}").write_text(by)
sys.exit("died")
"""


def test_processes_that_take_nothing_are_not_started_for_ever(tiny_folder, tmp_path, monkeypatch, capsys):
    import quality_watch

    watch, _work = toy_pool(tiny_folder, tmp_path, monkeypatch, rows_of([]), ["weights"])
    monkeypatch.setattr(watch, "ended", lambda by, said: None)
    program = [sys.executable, "-c", WORKER, str(watch.claims.folder), "4"]
    quality_watch._watch_workers(watch, program, 1, None)
    assert (watch.claims.folder / "starts").read_text() == "x" * (4 + 2)  # the four took something
    told = capsys.readouterr()
    assert "processes end before they begin: out of memory" in told.out
    assert told.err.count("died") == 4 and told.err.count("out of memory") == 2  # each one's own last words


def test_nothing_is_begun_after_the_deadline(tiny_folder, tmp_path, monkeypatch):
    import quality_pool

    asked = []
    watch, work = toy_pool(tiny_folder, tmp_path, monkeypatch, rows_of(asked), ["weights"])
    for one in watch.each:
        one.deadline = 100.0
    now = iter([0.0, 0.0, 0.0, 200.0])
    monkeypatch.setattr(quality_pool.time, "time", lambda: next(now))
    assert work() == 0 and len(asked) == 2


def test_all_is_every_part(monkeypatch):
    import quality
    import quality_watch

    found = []
    monkeypatch.setattr(quality_watch, "run_parts", lambda each, *rest: found.extend(each) or 0)
    monkeypatch.setattr(sys, "argv", ["quality.py", "--part", "all", "--until", "560"])
    assert quality.main() == 0
    assert [(one.part, one.prompts) for one in found] == list(quality.PROMPTS.items())
    assert not any(one.trial for one in found) and found[0].until == 560


@pytest.mark.slow
def test_every_part_end_to_end(tiny_folder, tmp_path):
    import json
    import subprocess

    command = [sys.executable, str(ROOT / "benchmarks" / "quality.py"), "--part", "all", "--prompts", "2"]
    command += ["--followed", "1", "--steps", "6", "--device", "cpu", "--workers", "2", "--twin", "8"]
    command += ["--model", str(tiny_folder), "--work", str(tmp_path / "w"), "--out", str(tmp_path / "r.json")]
    stopped = subprocess.run([*command, "--until", "5"], capture_output=True, text=True, timeout=300)
    assert stopped.returncode in (1, 2), stopped.stdout + stopped.stderr
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "r.json").read_text())
    assert len(found["parts"]) == 9 and found["bars"] == [] and (tmp_path / "r.png").exists()
    assert list(tmp_path.glob("*partial*")) == []


@pytest.mark.parametrize("name", ["gptq.safetensors", "inputs.safetensors", "teacache.json"])
def test_a_part_is_of_the_files_that_calibration_left(name, tmp_path, monkeypatch):
    import quality_parts

    jobs = []
    monkeypatch.setattr(quality_parts, "run_part", lambda given, job: jobs.append(job))
    (tmp_path / "s1").mkdir()
    (tmp_path / "s1" / "gptq.safetensors").write_text("a", encoding="utf-8")
    for text in ("a", "a", "b"):
        (tmp_path / "s1" / name).write_text(text, encoding="utf-8")
        given = Namespace(part="weights", twin=1, steps=2, prompts=1, followed=1, work=tmp_path, trial=True)
        assert quality_parts.run(given, [], "command") == 0
    first, again, other = (job.part.identity for job in jobs)
    assert first == again != other


@pytest.mark.parametrize("part", ["weights", "whole", "rivals"])
def test_what_needs_gptq_weights_begins_only_after_calibration(part, tmp_path, capsys):
    import quality_parts

    (tmp_path / "s1").mkdir()
    given = Namespace(part=part, twin=1, steps=2, prompts=1, followed=1, work=tmp_path, trial=True)
    assert quality_parts.run(given, [], "command") == 2
    assert "gptq.safetensors does not exist; run --part calibrate" in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_one_line(tmp_path, monkeypatch, capsys):
    import quality_parts

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    sys.modules.pop("quality_picture", None)
    given = Namespace(part="picture", twin=1, steps=2, work=tmp_path, out=tmp_path / "r.json")
    assert quality_parts.run(given, [], "command") == 2
    assert "the picture needs matplotlib" in capsys.readouterr().err


def test_a_worker_whose_parent_is_gone_ends(tiny_folder, tmp_path, monkeypatch):
    import parts

    given = Namespace(model=str(tiny_folder), predictor=None, device="cpu", steps=2, workers=2, shard="0/2")
    given.out, asked, parents = tmp_path / "r.json", [], iter([7, 7, 1])

    def measure(bench, group, units):
        asked.append(group)
        yield "", {"psnr_db": 1.0}

    part = parts.Part([str(n) for n in range(8)], ("",), measure, lambda rows: ({}, {}), loads=False)
    monkeypatch.setattr(parts.os, "getppid", lambda: next(parents))
    parts.run_part(given, parts.Job("toy", "quality", part, [], [], "command"))
    assert asked == ["0", "2"]
