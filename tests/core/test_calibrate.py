from dataclasses import replace

import pytest
import torch
from sixbit_diffusion.kernels import block_hadamard, dequantize_nvfp4, quantize_int8, quantize_nvfp4
from sixbit_diffusion.sixbit_core.calibrate import fit_block, fit_line, fit_plane, fit_predictor
from sixbit_diffusion.sixbit_core.calibration_run import CalibrationRun, LinearRecord, evenly_spaced
from sixbit_diffusion.sixbit_core.config import DMPQConfig
from sixbit_diffusion.sixbit_core.layout import BlockLayout
from sixbit_diffusion.sixbit_core.quantized import QuantizedWeight
from sixbit_diffusion.sixbit_core.run import RunState, run_block
from sixbit_diffusion.sixbit_core.thresholds import solve_theta, solve_thetas

SHAPES = {"q": (32, 64), "k": (32, 64), "ff": (16, 64)}
LAYOUT = BlockLayout(("q", "k", "ff"), (SHAPES,) * 2)
FULL = {
    kind: torch.randn(shape, generator=torch.Generator().manual_seed(i))
    for i, (kind, shape) in enumerate(SHAPES.items())
}
WEIGHTS = {
    kind: QuantizedWeight(*quantize_nvfp4(block_hadamard(full, 64)), *SHAPES[kind], 64)
    for kind, full in FULL.items()
}
STREAMS = [("cond", 0), ("uncond", 0)]
STEPS = 6


def linear_input(t: int, block: int, stream: int) -> torch.Tensor:
    x = torch.randn(300, 64, generator=torch.Generator().manual_seed(100 * t + 10 * block + stream))
    x[0, 0] = 20.0 * (1 + stream)
    return x


def sample(run: RunState, split: bool = False) -> None:
    """Γ of both blocks is (1 + t)/10, times 2 for the second stream."""
    for t in range(STEPS):
        for rows in [[0], [1]] if split else [[0, 1]]:
            run.begin_call([STREAMS[row] for row in rows], 1 - t / STEPS, t / STEPS, t == STEPS - 1)
            video, text = torch.ones(len(rows), 8, 16), torch.zeros(len(rows), 2, 16)
            for block in range(2):

                def compute(block=block, t=t, rows=rows, video=video, text=text):
                    x = torch.stack([linear_input(t, block, row) for row in rows])
                    for kind in LAYOUT.names:
                        run.linear(block, kind, x, WEIGHTS[kind], None)
                    factor = torch.tensor([1.0 + row for row in rows])[:, None, None]
                    return torch.ones(len(rows), 8, 16) * (1 + factor * (1 + t) / 10), torch.zeros(
                        len(rows), 2, 16
                    )

                run_block(run, block, video, text, compute)
    run.finish()


@pytest.fixture(scope="module")
def records() -> list[LinearRecord]:
    run = CalibrationRun(LAYOUT, lambda block, kind: FULL[kind], rows=128)
    sample(run)
    run.close()
    assert run.report().average_activation_bits == 8
    return run.records


def test_records_are_the_formulas_on_the_worst_stream(records):
    assert len(records) == STEPS * 2 * 3
    for record in records[:: 2 * 3 + 1]:
        t = round(record.progress * STEPS)
        expected = []
        for stream in range(2):
            x = evenly_spaced(linear_input(t, record.block, stream), 128)
            full, weight = FULL[record.kind], WEIGHTS[record.kind].dequantize()
            q, scale = quantize_int8(block_hadamard(x, 64))
            x8 = block_hadamard(q * scale, 64)
            x4 = block_hadamard(dequantize_nvfp4(*quantize_nvfp4(block_hadamard(x, 64), per_row=True)), 64)
            y, y4, y8, exact = x @ weight.T, x4 @ weight.T, x8 @ weight.T, x @ full.T
            e4, e8 = (y - y4).norm() / y.norm(), (y - y8).norm() / y.norm()
            expected.append([e4 - e8, e4, e8, (exact - y4).norm() / exact.norm()])
        worst = torch.tensor(expected).amax(dim=0)
        actual = torch.tensor([record.excess, record.error_nvfp4, record.error_int8, record.paper])
        torch.testing.assert_close(actual, worst, rtol=1e-3, atol=1e-5)
        assert 0.05 < record.excess < 0.15 < record.paper * 2  # E holds the weight's error too
        assert record.gamma == (None if t == 0 else pytest.approx(0.2 * t))  # of t - 1, second stream
        x = linear_input(t, record.block, 1)
        assert record.ratio == pytest.approx(float(40.0 / x.abs().mean()), rel=1e-5)


def test_split_calls_record_the_same(records):
    run = CalibrationRun(LAYOUT, lambda block, kind: FULL[kind], rows=128)
    sample(run, split=True)
    assert run.records == records


def test_without_full_weights_the_paper_error_is_null():
    run = CalibrationRun(LAYOUT)
    sample(run)
    assert all(record.paper is None for record in run.records)
    predictor = fit_predictor(run.records, LAYOUT, "toy", "f", {})
    assert all(fit.paper is None for fit in predictor.linears.values())
    assert '"paper": null' in predictor.to_json()


def test_line_by_hand():
    line = fit_line([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    assert (line.alpha, line.beta, line.r2) == pytest.approx((2.0, 1.0, 1.0))
    line = fit_line([0.0, 1.0, 2.0], [0.0, 1.0, 0.0])
    assert (line.alpha, line.r2) == (0.0, 0.0)
    assert fit_line([1.0, 1.0], [2.0, 4.0]).beta == 3.0


def test_plane_by_hand():
    grid = [(g / 4, p / 4) for g in range(5) for p in range(5)]
    gammas, progress = zip(*grid, strict=True)
    plane = fit_plane(gammas, progress, [0.3 * g - 0.2 * p + 0.5 for g, p in grid])
    shrunk = 1 / 1.01  # the ridge, on what is standardised and uncorrelated
    assert (plane.alpha, plane.slope) == pytest.approx((0.3 * shrunk, -0.2 * shrunk))
    assert plane.at(0.5, 0.5) == pytest.approx(0.55) and plane.r2 == pytest.approx(1 - (1 - shrunk) ** 2)
    level = fit_plane(gammas, progress, [float(n % 2) for n in range(25)])
    assert (level.alpha, level.slope, level.beta) == (0.0, 0.0, pytest.approx(12 / 25)) and level.r2 < 0.1
    same = fit_plane([1.0] * 25, progress, [p for _, p in grid])  # Γ does not vary
    assert same.alpha == 0.0 and same.slope == pytest.approx(shrunk)


def test_residuals_grow_as_they_did():
    run = CalibrationRun(LAYOUT)
    sample(run)
    first, later = run.blocks[0], run.blocks[2]
    assert (first.block, first.growth, later.block) == (0, None, 0)
    assert later.growth == pytest.approx(2.0, rel=1e-5)  # residuals (1 + t)/10 of every stream
    fit = fit_block([record for record in run.blocks if record.block == 0])
    assert fit.magnitude(0.0) == 1.0
    assert [fit.magnitude(t / STEPS) for t in range(STEPS)] == pytest.approx(
        [1.0 + t for t in range(STEPS)],
        rel=1e-2,  # points between evaluations are interpolated
    )
    assert fit.gamma == pytest.approx(sum(r.gamma for r in run.blocks if r.block == 0) / STEPS)


def synthetic() -> list[LinearRecord]:
    """e = 0.1·Γ + 0.01 in block 0, twice that in block 1; 20 evaluations."""
    return [
        LinearRecord(
            b, kind, t / 20, None if t == 0 else t / 20, (b + 1) * (0.1 * t / 20 + 0.01), 0.1, 0.02, None, t
        )
        for t in range(20)
        for b in range(2)
        for kind in LAYOUT.names
    ]


def test_fit_finds_the_line_and_the_means():
    predictor = fit_predictor(synthetic(), LAYOUT, "toy", "abc", {"steps": 20})
    fit = predictor.linears["blocks.1.q"]
    assert (fit.excess.alpha, fit.excess.beta, fit.excess.r2) == pytest.approx((0.2, 0.02, 1.0))
    assert (fit.error_nvfp4, fit.error_int8, fit.macs) == (pytest.approx(0.1), pytest.approx(0.02), 2048)
    assert fit.error_by_progress[9] == pytest.approx(2 * (0.1 * 18.5 / 20 + 0.01))
    assert predictor.outlier_limits["q"] == 19  # of 40 values, the 99th percentile
    assert predictor.summary() == {"linears": 6, "median_r2": pytest.approx(1.0), "positive_slopes": 6}
    with pytest.raises(ValueError, match="at least 3"):
        fit_predictor(synthetic()[:12], LAYOUT, "toy", "abc", {})


def test_same_calibration_same_bytes(records):
    shuffled = records[::-1]
    texts = {fit_predictor(r, LAYOUT, "toy", "f", {"seed": 0}).to_json() for r in (records, shuffled)}
    assert len(texts) == 1


@pytest.mark.parametrize(
    "shape", [lambda x: x, lambda x: 4 + 4 * ((x - 4) / 4) ** 3, lambda x: 0.3 * x + 5.0]
)
def test_solve_theta_closes_the_loop(shape):
    runs = []

    def run_once(theta):  # open-loop bits are 8 - theta
        runs.append(theta)
        return shape(8.0 - theta)

    solution = solve_theta(run_once, 6.5, lambda bits: 8.0 - bits, tolerance=0.02)
    reachable = shape(4.0) <= 6.5  # the last shape begins at 6.83: INT8 forced after skips alone exceeds it
    assert solution.runs == len(runs) <= 8
    assert abs(solution.bits - 6.5) <= 0.02 if reachable else solution.theta == 4.0
    assert solution.bits == shape(8.0 - solution.theta)


def test_solved_thetas_give_the_bits_on_real_runs(records):
    predictor = fit_predictor(records, LAYOUT, "toy", "f", {})
    asked = []

    def run_once(config: DMPQConfig, cache_on: bool) -> float:
        asked.append((config.router, config.error, cache_on))
        run = RunState(LAYOUT, config, None, predictor)
        sample(run)
        return run.report().average_activation_bits

    solved = solve_thetas(predictor, records, run_once, [6.0], errors=("excess", "paper"))
    keys = {"cache_off", "cache_on", "paper_cache_off", "paper_cache_on", "time_cache_off"}
    assert set(solved.theta["6.0"]) == keys
    by_gamma = {("gamma", e, c) for e in ("excess", "paper") for c in (False, True)}
    assert set(asked) == by_gamma | {("gamma-time", "excess", False)}
    for config in (DMPQConfig(), DMPQConfig(error="paper"), DMPQConfig(router="gamma-time")):
        run = RunState(LAYOUT, config, None, solved)
        sample(run)
        assert abs(run.report().average_activation_bits - 6.0) < 0.15  # 36 choices of 2 to 6 % each
    assert predictor.theta == {} and replace(solved, theta={}) == predictor
