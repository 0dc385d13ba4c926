"""Tuning by a clock of ours: what is chosen, shown, kept and given up; candidates agree to the bit."""

from __future__ import annotations

import pytest
import torch
from sixbit_diffusion.kernels import (
    disk_cache,
    gelu_int8,
    hadamard_quantize_int8,
    norm_modulate_int8,
    quantize_int8,
    tuner,
    use_backend,
)
from sixbit_diffusion.kernels.tuner import Tuner, fastest

CANDIDATES = ("table", "quick", "slow")


class Unfit(Exception):
    pass


class Bench:
    """A GPU that takes `ms` for each candidate, and `seconds` of a clock to time one."""

    def __init__(self, seconds: float = 1.0, **ms: float) -> None:
        self.ms = {"table": 5.0, "quick": 1.0, "slow": 9.0} | ms
        self.seconds, self.now, self.launched, self.lines = seconds, 0.0, [], []

    def launch(self, candidate: str) -> None:
        self.launched.append(candidate)

    def time_ms(self, launch) -> float:
        self.now += self.seconds
        launch()
        taken = self.ms[self.launched[-1]]
        if taken < 0:
            raise Unfit
        return taken

    def show(self, *line: object) -> None:
        self.lines.append(line)

    def tuner(self, file=None, budget: float = 20.0) -> Tuner:
        return Tuner(file, (Unfit,), budget, self.time_ms, lambda: self.now)

    def choose(self, tuner: Tuner, key: str = "product 8x16", may_time: bool = True) -> str:
        return tuner.choose(key, CANDIDATES, self.launch, may_time, self.show)


def test_the_fastest_is_found_once_and_shown(tmp_path):
    bench, file = Bench(), tmp_path / "tuning.json"
    tuner = bench.tuner(file)
    assert [bench.choose(tuner) for _ in range(3)] == ["quick"] * 3
    assert bench.launched == list(CANDIDATES) and tuner.spent == 3
    assert bench.lines == [("product 8x16", n, 3) for n in (1, 2, 3)]

    another = Bench()  # process
    assert another.choose(another.tuner(file)) == "quick" and not another.launched
    assert another.choose(another.tuner(file), "product 8x32") == "quick" and another.launched


def test_a_choice_that_is_no_candidate_any_more_is_made_anew(tmp_path):
    file = tmp_path / "tuning.json"
    for gone in (repr("gone"), ["a list"], {}, None):
        disk_cache.keep(file, "product 8x16", gone)
        bench = Bench()
        assert bench.choose(bench.tuner(file)) == "quick" and bench.launched
    tuner = bench.tuner()
    tuner.choices["product 8x16"] = "gone"
    assert bench.choose(tuner) == "quick"


def test_the_file_is_read_once(tmp_path, monkeypatch):
    bench, reads = Bench(), []
    monkeypatch.setattr(tuner, "entries", lambda file: reads.append(file) or {})
    spent = bench.tuner(tmp_path / "tuning.json", budget=0)
    assert [bench.choose(spent, f"product 8x{n}") for n in (16, 16, 32)] == ["table"] * 3
    assert len(reads) == 1


def test_what_this_gpu_cannot_launch_is_passed_over():
    bench = Bench(quick=-1)
    assert bench.choose(bench.tuner()) == "table"
    none = Bench(table=-1, quick=-1, slow=-1)
    assert none.choose(none.tuner()) == "table"


def test_no_more_seconds_than_there_are(tmp_path):
    bench, file = Bench(seconds=8), tmp_path / "tuning.json"
    tuner = bench.tuner(file)
    assert bench.choose(tuner) == "quick"  # a third might end at 24 s
    assert bench.launched == ["table", "quick"] and not file.exists()  # half a comparison is not kept
    assert bench.choose(tuner, "product 8x32") == "table" and tuner.spent <= tuner.budget
    assert len(bench.lines) == 2


def test_where_nothing_may_be_timed_the_table_serves_and_is_not_remembered():
    bench = Bench()
    tuner = bench.tuner()
    assert bench.choose(tuner, may_time=False) == "table" and not bench.launched
    assert bench.choose(tuner) == "quick"
    assert bench.choose(tuner, may_time=False) == "quick"


def test_off_on_the_cpu_and_in_a_graph(monkeypatch):
    bench = Bench()
    x = torch.zeros(1)

    def pick(rows: int = 5) -> str:
        return fastest("product", (rows, 16), CANDIDATES, bench.launch, x)

    assert pick() == "table"
    with tuner.tuning(False, tuner=bench.tuner()):
        assert pick() == "table"
    with tuner.tuning(True, tuner=bench.tuner()):
        assert pick() == "table"  # the CPU
        monkeypatch.setattr(tuner, "_may_time", lambda x: True)
        assert pick() == "quick" and len(bench.launched) == 3
        assert pick(8) == "quick" and len(bench.launched) == 3  # 5 to 8 rows are one class
        assert pick(9) == "quick" and len(bench.launched) == 6
    assert pick() == "table"


def test_the_device_of_an_operand_is_current_while_it_is_timed(monkeypatch):
    class OnSecondGPU:
        is_cuda, device, get_device = True, torch.device("cuda:1"), lambda self: 1

    current, seen = [0], []
    monkeypatch.setattr(torch.cuda.device, "__enter__", lambda self: current.append(self.idx))
    monkeypatch.setattr(torch.cuda.device, "__exit__", lambda self, *_: current.pop() and None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: seen.append(current[-1]))
    monkeypatch.setattr(tuner, "_gpu", lambda x: "GPU")
    timer = Tuner(None, time_ms=lambda launch: seen.append(current[-1]) or 1.0)
    with tuner.tuning(True, tuner=timer):
        fastest("product", (8, 16), CANDIDATES, print, OnSecondGPU())
    assert seen == [1] * 4 and current == [0]


def test_kernels_that_differ_in_their_tiles_do_not_share_a_choice(monkeypatch, device, make):
    rows = pytest.importorskip("sixbit_diffusion.kernels.rows_triton")
    monkeypatch.setattr(rows, "capability_of", lambda x: (8, 9))
    monkeypatch.setattr(tuner, "_may_time", lambda x: True)
    x = make(3, 3072, dtype=torch.bfloat16, device=device)
    launched, chosen = [], Tuner(None, time_ms=lambda launch: 1.0)

    def record(name, shape, candidates, launch, x):
        tile = fastest(name, shape, candidates, launch, x)
        launched.append((tile, candidates))
        return tile

    monkeypatch.setattr(rows, "fastest", record)
    with tuner.tuning(True, tuner=chosen), use_backend("triton"):
        for _ in range(2):
            quantize_int8(x)
            hadamard_quantize_int8(x, 128)
    assert all(tile in candidates for tile, candidates in launched)
    assert len(chosen.choices) == 2  # or each would time the other's away


def test_graphs_and_compilers_stop_it(monkeypatch):
    class OnGPU:
        is_cuda = True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert tuner._may_time(OnGPU())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not tuner._may_time(OnGPU())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert not tuner._may_time(OnGPU())


@pytest.fixture
def each(monkeypatch, device):
    """`each(call)`: its results under the first candidate and others."""
    if device == "cuda" and torch.cuda.get_device_capability()[0] == 9:
        pytest.skip("this GPU has a measured table, and nothing to time")

    def results(call) -> list:
        found, counts = [], set()
        for number in (0, 1, 4):

            def take(kernel, shape, candidates, launch, x, number=number):
                counts.add(len(candidates))
                return candidates[number % len(candidates)]

            for module in ("gemm_triton", "rows_triton"):
                name = f"sixbit_diffusion.kernels.{module}.fastest"
                monkeypatch.setattr(name, take)
            with use_backend("triton"):
                found.append(call())
        assert min(counts) > 1
        return found

    return results


def test_every_candidate_of_a_pass_over_rows_gives_the_same_bits(each, device, make):
    text, video = (make(2, n, 256, seed=n).to(device) for n in (3, 9))
    norm, modulation = make(256).to(device), make(2, 2, 256, seed=1).to(device)
    for call in (
        lambda: quantize_int8(video[0]),
        lambda: gelu_int8(video, 128, True),
        lambda: norm_modulate_int8(text, video, norm, norm, 1e-5, modulation, modulation, 128, True),
    ):
        first, *others = each(call)
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (10, 0), (12, 0)], ids=str)
def test_every_tile_of_int8_gives_the_same_bits(device, capability, make):
    gemm = pytest.importorskip("sixbit_diffusion.kernels.gemm_triton")
    if device == "cuda" and torch.cuda.get_device_capability() != capability:
        pytest.skip("the tiles of another GPU")
    a, b = (torch.randint(-127, 128, (n, 144), dtype=torch.int8).to(device) for n in (150, 272))
    row_scale, column_scale, bias = (make(n, 1).to(device) for n in (150, 272, 272))
    tiles = gemm.int8_tiles(capability)
    assert len(tiles) == len(set(tiles)) == 4
    results = []
    for tile in tiles:
        y = torch.empty(150, 272, device=device)
        gemm._launch(tile, a, b, y, row_scale, column_scale, bias.flatten())
        results.append(y)
    exact = (a.cpu().int() @ b.cpu().int().T).float() * row_scale.cpu() * column_scale.cpu().T
    assert torch.equal(results[0].cpu(), exact + bias.cpu().T)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.gpu
def test_on_a_gpu_tiles_are_timed_and_kept(monkeypatch, tmp_path, make):
    gemm = pytest.importorskip("sixbit_diffusion.kernels.gemm_triton")
    from sixbit_diffusion.kernels.support_triton import UNFIT

    a, b = (torch.randint(-127, 128, (n, 1024), dtype=torch.int8).cuda() for n in (3000, 2048))
    given = (a, b, *(make(n, 1).cuda() for n in (3000, 2048)), None, torch.bfloat16)
    capability = torch.cuda.get_device_capability()
    monkeypatch.setattr(gemm, "INT8_OTHERS", {gemm._table_key(capability): (gemm.SMALL_GEMM_TILE, gemm.WIDE)})
    expected, file, lines = gemm.scaled_gemm(*given), tmp_path / "tuning.json", []
    found = Tuner(file, UNFIT)
    with tuner.tuning(True, lambda *line: lines.append(line), found):
        assert torch.equal(gemm.scaled_gemm(*given), expected)
        assert torch.equal(gemm.scaled_gemm(*given), expected)
    ((key, choice),) = found.choices.items()
    assert "4096x2048x1024" in key and [line[1:] for line in lines] == [(n, 3) for n in (1, 2, 3)]
    assert disk_cache.recall(file, key) == repr(choice) and 0 < found.spent < 60


def test_a_measured_table_is_not_timed():
    gemm = pytest.importorskip("sixbit_diffusion.kernels.gemm_triton")
    from sixbit_diffusion.kernels.row_tiles import row_tiles

    assert len(gemm.int8_tiles((9, 0))) == len(row_tiles(3072, torch.bfloat16, 0, (9, 0), 128)) == 1
