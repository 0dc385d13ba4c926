"""`sixbit verify`: what it writes, where it goes on, what it refuses, and its contact sheet."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sixbit_diffusion.engine import verify as verifying
from sixbit_diffusion.engine import verify_methods
from sixbit_diffusion.engine.cli import main
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.facts import read_facts
from sixbit_diffusion.engine.intervals import bootstrap_mean
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.report import compare_clips
from sixbit_diffusion.engine.verify_clips import ClipStore
from sixbit_diffusion.engine.verify_sheet import FRAME_WIDTH, Sheet, cut, draw_sheet
from sixbit_diffusion.sixbit_core.drawing import SCALE, width_of

NAMES = ["full", "w4a8", "default-tdc", "step-cache", "fewer-steps"]  # where the default is W4A8


def verify(model: Path, out: Path, *more: object) -> int:
    arguments = ["verify", "--model", model, "--steps", 4, "--device", "cpu", "--out", out, *more]
    return main([str(argument) for argument in arguments])


def test_it_goes_on_where_it_stopped_and_tells_all(tiny_folder, tmp_path, capsys, monkeypatch):
    whole, made = verify_methods.sample, []

    def counted(model, settings, clip, embeds):
        if len(made) == 5:
            raise KeyboardInterrupt
        made.append((settings, clip.steps, clip.seed))
        return whole(model, settings, clip, embeds)

    monkeypatch.setattr(verify_methods, "sample", counted)
    monkeypatch.setattr(verifying, "bootstrap_mean", partial(bootstrap_mean, draws=100))
    out, captions = tmp_path / "out", tmp_path / "captions.txt"
    captions.write_text("a star\na ring\n")
    more = ("--prompts", captions, "--seed", 3)
    assert verify(tiny_folder, out, *more) == 130
    assert "10 clips of 9 frames of 32x32, 4 steps: 10 to make, about" in capsys.readouterr().out
    assert made[:3] == [(None, 1, 3), (None, 4, 3), (None, 4, 4)]  # one step to warm up, then the clips
    assert not (out / "verify.json").exists() and len(list((out / "clips").glob("*.safetensors"))) == 3
    monkeypatch.setattr(verify_methods, "sample", lambda *given: (made.append(given), whole(*given))[1])
    made.clear()
    assert verify(tiny_folder, out, *more) == 0, capsys.readouterr().err
    assert len(made) == 7 + 4 and "7 to make" in capsys.readouterr().out

    text = (out / "verify.json").read_text()
    result = json.loads(text)
    rows = {(row["prompt"], row["method"]): row for row in result["clips"]}
    assert list(rows) == [(n, name) for n in (0, 1) for name in NAMES] and list(result["methods"]) == NAMES
    assert result["prompts"] == ["a star", "a ring"] and result["seeds"] == [3, 4]
    assert str(tmp_path) not in text and "--prompts captions.txt" in result["command"]
    store = ClipStore(out / "clips", json.loads((out / "clips" / "settings.json").read_text()))
    full, quantized = store.frames((1, "full")), store.frames((1, "w4a8"))
    close = compare_clips(quantized, full)
    assert {name: rows[1, "w4a8"][name] for name in close} == close and close["psnr_db"] < 100
    assert rows[0, "full"]["psnr_db"] is None and rows[0, "full"]["cost"] == 1
    assert rows[0, "w4a8"]["average_activation_bits"] == 8 and 0 < rows[0, "w4a8"]["cost"] < 0.5
    fewer = max(1, round(4 * rows[0, "default-tdc"]["cost"]))
    assert (rows[0, "fewer-steps"]["steps"], rows[0, "fewer-steps"]["cost"]) == (fewer, fewer / 4)
    mean = result["means"]["w4a8"]["psnr_db"]
    assert mean["mean"] == pytest.approx(sum(rows[n, "w4a8"]["psnr_db"] for n in (0, 1)) / 2)
    assert (
        mean["interval"][0] <= mean["mean"] <= mean["interval"][1]
        and "psnr_db" not in result["means"]["full"]
    )

    monkeypatch.setattr(verifying, "load_model", pytest.fail)
    (out / "verify.png").unlink()
    assert verify(tiny_folder, out, *more) == 0 and (out / "verify.png").exists()
    assert json.loads((out / "verify.json").read_text())["clips"] == result["clips"]
    assert verify(tiny_folder, out, *more, "--cfg", 5) == 2
    assert (
        "another run (cfg changed); choose another --out, or start anew with --force"
        in capsys.readouterr().err
    )


def test_a_quantized_model_is_refused_before_anything_loads(tiny_folder, tmp_path, capsys, monkeypatch):
    file = tmp_path / "tiny.safetensors"
    assert main(["quantize", str(tiny_folder), str(file), "--method", "rtn"]) == 0
    monkeypatch.setattr(verifying, "load_model", pytest.fail)
    assert verify(file, tmp_path / "out", "--pipeline", tiny_folder) == 2
    assert "tiny.safetensors is quantized; give --model the 16-bit" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_clips_of_another_run_stay_unless_forced(tmp_path):
    clip = np.full((2, 4, 4, 3), 7, np.uint8)
    store = ClipStore(tmp_path, {"steps": 4, "size": (4, 4)})
    store.add((0, "w4a8"), {"cost": 0.5}, clip)
    (tmp_path / "mine.safetensors").write_text("notes")
    again = ClipStore(tmp_path, {"steps": 4, "size": (4, 4)})
    assert again.rows == {(0, "w4a8"): {"cost": 0.5}} and (again.frames((0, "w4a8")) == clip).all()
    with pytest.raises(InputError, match=r"another run \(steps changed\).*--force"):
        ClipStore(tmp_path, {"steps": 5, "size": (4, 4)})
    assert (tmp_path / "0-w4a8.safetensors").exists()
    assert ClipStore(tmp_path, {"steps": 5, "size": (4, 4)}, force=True).rows == {}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.safetensors", "settings.json"]
    (tmp_path / "0-full.safetensors").write_bytes(b"cut short")
    with pytest.raises(InputError, match=r"0-full\.safetensors is damaged; delete it"):
        ClipStore(tmp_path, {"steps": 5, "size": (4, 4)})


def test_the_default_is_a_method_of_its_own_where_it_is_not_w4a8(tiny_folder):
    cpu = find_machine("cpu")
    blackwell = replace(cpu, capability=(10, 0))
    assert [m.name for m in verify_methods.find_methods(read_facts(str(tiny_folder)), cpu)] == NAMES
    methods = verify_methods.find_methods(read_facts("reference"), blackwell)
    assert [m.name for m in methods] == ["full", "w4a8", "default", *NAMES[2:]]
    assert methods[2].title == "default: DMPQ" and "router gamma" in methods[2].told
    order = [m.name for m in verify_methods.order_of_work(methods)]
    assert order == ["full", "step-cache", "w4a8", "default", "default-tdc", "fewer-steps"]


def test_a_command_is_told_without_folders():
    told = verifying.without_folders(
        r"sixbit verify --model /home/ann/m --out=/ann/o --prompts 'C:\Users\ann\p.txt' --pipeline / --force"
    )
    assert told == "sixbit verify --model m --out=o --prompts p.txt --pipeline . --force"


def test_nothing_is_written_over_frames(tmp_path):
    names = ["full", "w4a8"]
    row = {"seed": 0, "steps": 3, "seconds": 12345.6, "psnr_db": 100.0, "ssim": 1.0}
    mean = {name: {"mean": value} for name, value in (*row.items(), ("cost", 1.0), ("skipped_fraction", 1.0))}
    result = {
        **{"model": "m" * 300, "family": "f", "fingerprint": "0" * 32, "machine": "n" * 300, "versions": {}},
        **{"date": "2026-01-01", "size": [48, 64], "frames": 9, "steps": 50, "cfg": 6.0},
        "prompts": ["a long caption " * 30, "b"],
        "seeds": [0, 1],
        "methods": {name: {"title": name * 40, "told": ""} for name in names},
        "means": dict.fromkeys(names, mean),
        "clips": [{"prompt": n, "method": name, **row} for n in (0, 1) for name in names],
    }
    clips = [[np.full((3, 48, 64, 3), (200, 40 * n, 90 * m), np.uint8) for m in (0, 1)] for n in (0, 1)]
    draw_sheet(Sheet(result, clips), tmp_path / "sheet.png")
    image = np.asarray(Image.open(tmp_path / "sheet.png"))
    area = 3 * (FRAME_WIDTH * SCALE) * (FRAME_WIDTH * SCALE * 48 // 64)
    for n, m in np.ndindex(2, 2):
        found = (image == (200, 40 * n, 90 * m)).all(-1)
        assert found.sum() == area, (n, m)
    assert (image[:, -15 * SCALE :] == 255).all() and (image[-8 * SCALE :] == 255).all()  # margins stay free
    assert cut("short", 11, 100) == "short"
    assert cut("a long caption " * 9, 11, 100).endswith("…") and width_of(cut("ab " * 99, 11, 100), 11) <= 100
