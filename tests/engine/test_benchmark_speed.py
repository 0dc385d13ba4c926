"""The small benchmarks on a CPU and a tiny model: they run, and name what they measure as the results do."""

import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODULES = ("measure", "composition", "kernels", "memory", "model", "model_parts", "roofline")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`bench(script, arguments)` -> (bars, rows by name) of a run of it."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in MODULES:
        sys.modules.pop(name, None)

    def run(script: str, *arguments: str) -> tuple[dict, dict]:
        out = tmp_path / "result.json"
        monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py", *arguments, "--out", str(out)])
        importlib.import_module(script).main()
        result = json.loads(out.read_text())
        assert result["machine"].startswith("cpu") and result["versions"]["torch"] and result["date"]
        return {bar["id"]: bar["value"] for bar in result["bars"]}, {r["name"]: r for r in result["rows"]}

    yield run
    for name in MODULES:
        sys.modules.pop(name, None)


ON_CPU = ("--config", "tiny", "--device", "cpu", "--repeats", "1")


def test_kernels(bench):
    bars, rows = bench("kernels", *ON_CPU)
    shapes = ("256x256", "256x768", "256x1024", "1024x256")
    expected = {f"kernel.w4a8.{shape}" for shape in shapes} | {
        "kernel.norm_quant_share",
        "kernel.gelu_quant_share",
    }
    assert expected <= set(bars) and all(value > 0 for value in bars.values())
    assert all(0 < rows[f"w4a8.{shape}"]["error_against_decoded_weight"] < 0.02 for shape in shapes)
    ways = {f"without_triton_{way}_ms" for way in ("int_mm", "half")}
    assert all(ways <= rows[f"w4a8.{shape}"].keys() for shape in shapes)


def test_forward_skips_and_loop_add_up_in_one_file(bench):
    bars, rows = bench("model", *ON_CPU, "--checked-blocks", "2")
    assert set(bars) == {f"model.tiny.{name}" for name in ("vs_diffusers", "block_error", "syncs_per_step")}
    assert bars["model.tiny.block_error"] < 0.01 and bars["model.tiny.syncs_per_step"] == 0
    assert rows["forward.ours"]["peak_bytes"] < 0.4 * rows["forward.diffusers"]["peak_bytes"]

    bars, rows = bench("model", *ON_CPU, "--skip", "0.3", "--evaluations", "6")
    assert "model.tiny.skip30_overhead" not in bars  # so few evaluations skip less than that
    assert rows["skip.0.3"]["overhead"] > 0 and bars["model.tiny.vs_diffusers"] > 0
    assert 0 < rows["skip.0.3"]["share"] < 0.3 + 0.1

    few = ("--evaluations", "6", "--baseline-evaluations", "1")
    bars, rows = bench("model", *ON_CPU, "--loop", "--skip", "0.5", *few)
    assert bars["loop.tiny.vs_diffusers"] > 0 and rows["loop.ours"]["cache_bytes"] > 0


def test_roofline_is_an_estimate_and_takes_measured_shares(bench, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    roofline = importlib.import_module("roofline")
    todo = roofline.work("5b")
    assert abs(todo.linears - 338) < 1 and abs(todo.attention - 326) < 1  # trillions, counted by hand
    eager, ours = (
        roofline.row(roofline.H200, todo, roofline.Shares())[name] for name in ("eager_ms", "ours_ms")
    )
    assert abs(eager / 1780 - 1) < 0.1 and ours < eager
    shapes = ("3072x9216", "3072x12288", "12288x3072")
    rows = [{"name": f"w4a8.{n}", "ours_tops": 1000.0, "ours_ms": 2.0, "bf16_ms": 3.0} for n in shapes]
    rows += [{"name": "copy", "terabytes_per_second": 4.32}]
    rows += [{"name": name, "share_of_copy": 0.8} for name in ("norm_quant", "gelu_quant")]
    (tmp_path / "kernels.json").write_text(json.dumps({"machine": "cuda: NVIDIA H200", "rows": rows}))
    found = roofline.measured_shares(tmp_path)
    assert (found.copy, found.rows) == (0.9, 0.8) and abs(found.linear_int8 - 1000 / 1979) < 1e-9


def test_recorded_skips_are_stretched(bench, monkeypatch, tmp_path):
    pattern = importlib.import_module("model_parts").skip_pattern
    from sixbit_diffusion.sixbit_core.skip import Observation

    report = tmp_path / "report.json"
    report.write_text(json.dumps({"choices": {"q": ["88-8", "8--8"]}}))
    recorded = pattern(str(report), blocks=4, evaluations=8)

    def row(block: int) -> str:
        seen = (Observation(block, t, t / 8, 0.0, 0.0, 0) for t in range(8))
        return "".join("-" if recorded(one, None) else "8" for one in seen)

    assert [row(block) for block in range(4)] == ["8888--88"] * 2 + ["88----88"] * 2


def test_what_is_missing_is_one_line(bench, capsys):
    for arguments, message in (
        (("--config", "7b"), "--config must be"),
        (("--config", "tiny", "--baseline", "comfyui"), "need a ComfyUI"),
        (("--config", "tiny", "--loop"), "needs --skip"),
    ):
        with pytest.raises(SystemExit):
            bench("model", *arguments)
        assert message in capsys.readouterr().err


def test_memory(bench):
    few = ("--config", "tiny", "--device", "cpu", "--evaluations", "4")
    bars, rows = bench("memory", *few, "--baseline", "diffusers")
    assert set(bars) == {f"memory.tiny.{n}" for n in ("weights_gib", "speed_cost", "peak_vs_diffusers")}
    assert bars["memory.tiny.peak_vs_diffusers"] > 2
    on_gpu, in_host = rows["sampling.3x4x4.gpu"], rows["sampling.3x4x4.host"]
    assert on_gpu["cache_bytes"] > in_host["cache_bytes"] > 0 and on_gpu["share"] > 0
    assert on_gpu["expected_bytes"] > on_gpu["cache_bytes"]
    alone = ("--location", "host", "--latents", "3,4,8", "--cap", "5", "--part", "sampling", "text", "decode")
    _, rows = bench("memory", *few, *alone)
    assert {"sampling.3x4x8.host.cap5", "text", "decode"} <= set(rows)
    assert rows["text"]["peak_bytes"] > 0 and rows["decode"]["peak_bytes"] > 0


def test_a_case_goes_to_the_next_card_until_it_fits(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import memory_cards

    caps = []

    def run(case, cap, device):
        caps.append(cap)
        return 123 if cap >= 11 else None

    monkeypatch.setattr(memory_cards, "run", run)
    found = memory_cards.smallest(memory_cards.CASES[0], "cuda")
    assert caps == [5, 7, 11] and (found["card_gb"], found["peak_bytes"]) == (12, 123)
    assert "| 12 GB | 0.0 GiB |" in memory_cards.table([found])
    monkeypatch.setattr(memory_cards, "run", lambda *given: None)
    assert "| more than 24 GB |  |" in memory_cards.table([memory_cards.smallest(memory_cards.CASES[0], "")])


def test_a_case_is_run_in_a_process_of_its_own(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import memory_cards

    assert memory_cards.run(memory_cards.TINY[0], 5.0, "cpu") > 0
    with pytest.raises(RuntimeError, match="--config must be"):
        memory_cards.run(memory_cards.Case("7b", "3,4,4", ""), 5.0, "cpu")


def test_composition_holds_drafts_against_their_own_and_other_seeds(bench, tiny_folder):
    few = ("--model", str(tiny_folder), "--captions", "1", "--steps", "6", "--draft-steps", "6")
    bars, rows = bench("composition", *few, "--device", "cpu")
    kinds = {name: row["same_seed"] for name, row in rows.items()}
    at = "6of6.caption0.draft{}.final{}"
    assert kinds == {at.format(d, f): d == f for d in range(2) for f in range(2)}
    low, high = (bars[f"composition.6of6.{name}"] for name in ("same_seed_low", "other_seed_high"))
    assert high < 0.9 < low <= 1  # from one noise or not
    assert low == min(rows[at.format(seed, seed)]["composition"] for seed in (0, 1))
