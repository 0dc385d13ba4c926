"""What the benchmark of quality is made of: rivals, step caches, twins, cost and solutions, on toys."""

import itertools
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.pipeline import load_model
from sixbit_diffusion.engine.sample import ClipSpec
from sixbit_diffusion.engine.settings import Choice
from sixbit_diffusion.engine.trajectory import record, replay, trajectory_error_under
from sixbit_diffusion.sixbit_core.config import DeltaCacheConfig, DMPQConfig
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.run import RunState

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("parts", "cost", "methods", "rivals", "step_caches", "twins", "reference_parts")
MODULES += ("quality_calibrate", "quality_measure", "quality_methods", "quality_parts", "quality_picture")
X = torch.randn(40, 48, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 1, 48)
W = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))


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
        rivals.RECIPES[name], layout, lambda block, kind: weights[kind], lambda name: X.abs().amax(0)
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
    torch.testing.assert_close(linear.weight, rivals.nvfp4_weight(W @ rotation))
    torch.testing.assert_close(linear(X), rivals.int8_rows(X @ rotation) @ linear.weight.T)


def test_viditq_scales_each_linear_and_rotates():
    rivals, made = toy_linear("vidit-q, int4 weights")
    linear = made["blocks.0.q"]
    scale = X.abs().amax(0).sqrt() / W.abs().amax(0).sqrt()
    torch.testing.assert_close(linear.scale, scale)
    torch.testing.assert_close(linear.weight, rivals.int4_rows((W * scale) @ rivals.rotation_matrix(48)))


def test_what_a_rival_moves_it_moves_back(monkeypatch):
    import rivals

    monkeypatch.setattr(rivals, "nvfp4_weight", lambda weight: weight)
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
    from step_caches import EasyCache

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
    from step_caches import EasyCache, TeaCache, fit_teacache

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
    from cost import Macs, model_macs, run_cost

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
    from cost import model_macs, run_cost

    run = RunState(tiny.layout, cache=DeltaCacheConfig(threshold=1e9, start=0.0, max_skips=9))
    trajectory_error_under(tiny, run, "full", recording)
    macs, skipped = model_macs(tiny.facts), run.report().skipped_fraction
    assert skipped == 0.5  # evaluations 2, 3, 4 of 6
    assert run_cost(macs, run.report(), 16, 6) == pytest.approx(1 - skipped * (1 - macs.rest / macs.total))


# Solutions and parts


@pytest.mark.parametrize(("rising", "logarithmic"), [(True, True), (False, False)])
def test_a_solution_meets_its_target(rising, logarithmic):
    from quality_measure import TRIES, solve
    from quality_methods import Solvable

    solvable = Solvable(None, "share", 0.3, 1e-3, 3.0, logarithmic, rising, 0.002)
    found = solve(solvable, lambda v: min(v / 2, 1.0) if rising else 1.0 - v / 2)
    assert abs(found["reached"] - 0.3) <= 0.002 and found["runs"] <= TRIES
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
