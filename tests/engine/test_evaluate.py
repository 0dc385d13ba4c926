import json
import subprocess
import sys
from dataclasses import replace

import pytest
from sixbit_diffusion.engine import evaluate as evaluating
from sixbit_diffusion.engine.cli import main
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.prompts import Prompt, read_prompts
from sixbit_diffusion.engine.rows import RowStore, mine, run_workers
from sixbit_diffusion.sixbit_core.predictor import Predictor


def evaluate(folder, out, *more) -> int:
    arguments = [
        "evaluate",
        "--model",
        folder,
        "--prompts",
        2,
        "--seeds",
        "0,1",
        "--steps",
        3,
        "--device",
        "cpu",
    ]
    return main([str(a) for a in (*arguments, "--precision", "w4a8", "--out", out, *more)])


def test_rows_summary_and_resuming(tiny_folder, tmp_path, capsys, monkeypatch):
    whole, made = evaluating.evaluate_clip, []

    def stops(*given, **more):
        if len(made) == 2:
            raise KeyboardInterrupt
        made.append(given)
        return whole(*given, **more)

    out = tmp_path / "result.json"
    monkeypatch.setattr(evaluating, "evaluate_clip", stops)
    assert evaluate(tiny_folder, out, "--against-full") == 130
    assert not out.exists() and (tmp_path / "result.json.partial").exists()

    def goes_on(*given, **more):
        made.append(given)
        return whole(*given, **more)

    resets = []
    monkeypatch.setattr(evaluating, "reset_peak_memory", resets.append)
    monkeypatch.setattr(evaluating, "evaluate_clip", goes_on)
    assert evaluate(tiny_folder, out, "--against-full") == 0, capsys.readouterr().err
    assert len(made) == 4 and len(resets) == 2  # memory is measured anew for each of the two clips left
    result = json.loads(out.read_text())
    assert set(result) == {"machine", "versions", "command", "date", "bars", "summary", "rows"}
    assert [(row["seed"], row["precision"]) for row in result["rows"]] == [(0, "w4a8"), (1, "w4a8")] * 2
    assert result["summary"]["clips"] == 4
    assert result["summary"]["psnr_db"]["mean"] == pytest.approx(
        sum(r["psnr_db"] for r in result["rows"]) / 4
    )
    assert not list(tmp_path.glob("*partial*"))


def test_partial_rows_of_another_run_are_refused(tiny_folder, tmp_path, capsys):
    (tmp_path / "result.json.partial").write_text('{"steps": 50}\n{"key": "0/0", "row": {}}\n')
    assert evaluate(tiny_folder, tmp_path / "result.json") == 2
    assert "another measurement" in capsys.readouterr().err


def test_a_row_cut_short_is_measured_again(tmp_path):
    store = RowStore(tmp_path / "r.json", {"what": 1})
    store.add("a", {"x": 1})
    with (tmp_path / "r.json.partial").open("a") as file:
        file.write('\n{"key": "b", "ro')
    again = RowStore(tmp_path / "r.json", {"what": 1})
    assert again.rows == {"a": {"x": 1}}
    again.add("b", {"x": 2})
    assert RowStore(tmp_path / "r.json", {"what": 1}).rows == {"a": {"x": 1}, "b": {"x": 2}}


def test_a_file_cut_in_its_first_line_is_begun_anew(tmp_path):
    for cut in ("", "\n", '\n{"what'):
        (tmp_path / "r.json.partial").write_text(cut)
        RowStore(tmp_path / "r.json", {"what": 1}).add("a", {"x": 1})
        assert RowStore(tmp_path / "r.json", {"what": 1}).rows == {"a": {"x": 1}}
        (tmp_path / "r.json.partial").unlink()


@pytest.mark.parametrize(
    "content",
    [b"\xff\xfe", b"my own notes", b'\n{"what": 1}\n{"key": "a"}', b'\n{"what": 1}\n[1]', b"[]\n[]"],
)
def test_a_partial_file_that_is_not_ours_is_refused_and_kept(content, tmp_path):
    file = tmp_path / "r.json.partial"
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"r\.json\.partial"):
        RowStore(tmp_path / "r.json", {"what": 1})
    assert file.read_bytes() == content


def test_only_our_own_partial_files_are_read_and_removed(tmp_path):
    for name in ("r[1].json.partial-notes", "r1.json.partial-0", "r[1].json.partial.bak"):
        (tmp_path / name).write_text("mine")
    for shard in (None, (0, 2), (1, 2)):
        RowStore(tmp_path / "r[1].json", {}, shard).add(str(shard), {"x": 1})
    store = RowStore(tmp_path / "r[1].json", {})
    assert set(store.rows) == {"None", "(0, 2)", "(1, 2)"}
    store.clear()
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "r1.json.partial-0",
        "r[1].json.partial-notes",
        "r[1].json.partial.bak",
    ]


@pytest.mark.parametrize("changed", ["captions", "versions", "predictor", "machine"])
def test_rows_of_other_captions_predictor_version_or_machine_are_refused(
    changed, tiny_folder, tmp_path, monkeypatch
):
    class Kept(Exception):
        pass

    def keep(path, what, shard):
        assert changed in what
        raise Kept(json.dumps(what, sort_keys=True))

    monkeypatch.setattr(evaluating, "RowStore", keep)
    captions = tmp_path / "captions.txt"
    captions.write_text("a star")

    def key() -> str:
        request = evaluating.EvaluateRequest(
            str(tiny_folder), tmp_path / "r.json", prompts=str(captions), device="cpu"
        )
        with pytest.raises(Kept) as kept:
            evaluating.evaluate(request)
        return str(kept.value)

    before = key()
    assert key() == before
    if changed == "captions":
        captions.write_text("a ring")
    elif changed == "versions":
        monkeypatch.setattr(evaluating, "versions", lambda: {"torch": "0"})
    elif changed == "machine":
        machine = find_machine("cpu")
        monkeypatch.setattr(evaluating, "find_machine", lambda _: replace(machine, name="another"))
    else:
        whole = evaluating.settle
        known = Predictor("tiny", "f", {}, {}, {"q": 7.0})
        monkeypatch.setattr(evaluating, "settle", lambda *a: replace(whole(*a), predictor=known))
    assert key() != before


def test_shards_share_the_work_and_the_rows(tmp_path):
    keys = [str(n) for n in range(7)]
    assert sorted(mine(keys, (0, 3)) + mine(keys, (1, 3)) + mine(keys, (2, 3))) == keys
    for index in range(2):
        RowStore(tmp_path / "r.json", {}, (index, 2)).add(str(index), {"x": index})
    store = RowStore(tmp_path / "r.json", {})
    assert store.rows == {"0": {"x": 0}, "1": {"x": 1}}
    store.clear()
    assert not list(tmp_path.iterdir())


def test_a_worker_that_fails_is_told(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import sys\nsys.exit(f'no luck with {sys.argv[-1]}')\n")
    with pytest.raises(RuntimeError, match="a worker failed: no luck with"):
        run_workers([sys.executable, str(script)], 2, lambda: None)


def test_workers_share_the_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    script = tmp_path / "worker.py"
    script.write_text(
        "import os, pathlib, sys\n"
        "shard = sys.argv[-1].replace('/', '-')\n"
        f"pathlib.Path({str(tmp_path)!r}, shard).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    run_workers([sys.executable, str(script)], 3, lambda: None)
    assert [(tmp_path / f"{n}-3").read_text() for n in range(3)] == ["4", "7", "4"]


def test_workers_end_when_starting_one_fails(monkeypatch):
    started, start = [], subprocess.Popen

    def second_fails(*given, **more):
        if started:
            raise KeyboardInterrupt
        started.append(start(*given, **more))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", second_fails)
    with pytest.raises(KeyboardInterrupt):
        run_workers([sys.executable, "-c", "import time; time.sleep(60)"], 2, lambda: None)
    assert started[0].poll() is not None


def test_the_evaluator_marks_a_clip_of_the_reference():
    from sixbit_diffusion.reference.render import render
    from sixbit_diffusion.reference.world import sample_scenes

    scenes = sample_scenes(2, 5, "held-out")
    clips = render(scenes).numpy()
    own, other = scenes.scene(0), scenes.scene(1)
    right = evaluating.score_frames(Prompt(own.caption, own), clips[0])
    assert right == {"objects": len(own.objects), **dict.fromkeys(evaluating.KINDS, True)}
    wrong = evaluating.score_frames(Prompt(other.caption, other), clips[0])
    assert not all(wrong[kind] for kind in evaluating.KINDS)
    assert evaluating.score_frames(Prompt("a sentence of one's own"), clips[0]) == {}
    rows = [{**right, "seconds": {"total": 1.0}}, {**wrong, "seconds": {"total": 2.0}}]
    accuracy = evaluating.summarize(rows)["accuracy"]
    assert accuracy["joint"]["share"] == 0.5 and accuracy["joint"]["interval"][0] < 0.5


def test_reference_prompts_come_from_its_world():
    held_out = read_prompts("reference", "5", 16, held_out=True)
    assert len(held_out) == 5 and all(prompt.scene.caption == prompt.text for prompt in held_out)
    assert held_out == read_prompts("reference", "5", 16, held_out=True)
    assert {p.text for p in held_out}.isdisjoint(
        p.text for p in read_prompts("reference", None, 16, held_out=False)
    )


@pytest.mark.slow
def test_two_workers_give_the_rows_of_one(tiny_folder, tmp_path, capsys):
    assert evaluate(tiny_folder, tmp_path / "one.json") == 0
    assert evaluate(tiny_folder, tmp_path / "two.json", "--workers", 2) == 0, capsys.readouterr().err
    one, two = (json.loads((tmp_path / f"{name}.json").read_text())["rows"] for name in ("one", "two"))
    for row in (*one, *two):
        for name in ("seconds", "seconds_by_evaluation", "seconds_per_step", "peak_memory_bytes", "command"):
            row.pop(name)
    assert one == two
