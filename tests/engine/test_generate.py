import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
from PIL import Image
from sixbit_diffusion.engine import generate as generating
from sixbit_diffusion.engine.cli import main
from sixbit_diffusion.engine.errors import InputError
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.memory import check_memory
from sixbit_diffusion.engine.settings import Choice
from sixbit_diffusion.engine.video import write_mp4

REPORT_KEYS = {
    "model fingerprint precision router cache steps cfg seed size frames average_activation_bits "
    "effective_activation_bits skipped_fraction seconds seconds_per_step weight_bytes "
    "weight_bytes_full_precision cache_bytes peak_memory_bytes psnr_db ssim choices machine versions command"
}


def run(*arguments: str) -> int:
    return main([str(a) for a in arguments])


def test_generate_writes_everything(tiny_folder, tmp_path, capsys):
    out = tmp_path / "made"
    where = ("--model", tiny_folder, "--device", "cpu", "--out", out, "--report", tmp_path / "copy.json")
    code = run("generate", *where, "--prompt", "a red star", "--steps", 4, "--precision", "w4a8", "--compare")
    said = capsys.readouterr()
    assert code == 0, said.err
    assert said.err == ""
    report = json.loads((out / "report.json").read_text())
    assert report == json.loads((tmp_path / "copy.json").read_text())
    assert set(next(iter(REPORT_KEYS)).split()) <= set(report)
    assert set(report["seconds"]) == {"load", "text", "sample", "decode", "total"}
    spent = report["seconds"]
    assert spent["total"] == pytest.approx(sum(spent.values()) - spent["total"], abs=1.0)
    assert set(report["seconds_full_precision"]) == {"load", "sample", "decode"}
    assert report["psnr_db"] > 10 and 0 < report["ssim"] <= 1
    assert report["weight_bytes"] < report["weight_bytes_full_precision"]
    assert report["command"].startswith("sixbit generate --model")
    with av.open(str(out / "clip.mp4")) as clip:
        frames = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
    assert len(frames) == 9 and frames[0].shape == (32, 32, 3)
    for name in ("side_by_side.png", "run.png"):
        assert np.asarray(Image.open(out / name)).std() > 0
    assert not list(out.glob(".*"))


def test_the_comparison_is_not_counted(tiny_folder, tmp_path, monkeypatch):
    """Full precision takes 30 s here, by a clock of its own, and the 6-bit clip has none of them."""
    now, real = [0.0], generating.sample

    def slow(model, settings, *more):
        made = real(model, settings, *more)
        now[0] += 30.0 if settings is None else 2.0
        return replace(made, seconds=30.0 if settings is None else 2.0)

    monkeypatch.setattr(generating, "sample", slow)
    monkeypatch.setattr(generating, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    request = generating.GenerateRequest(
        str(tiny_folder), "a star", tmp_path / "out", steps=2, compare=True, device="cpu"
    )
    report = generating.generate(request).report
    assert report["seconds"]["sample"] == 2 and report["seconds_full_precision"]["sample"] == 30
    assert report["seconds"]["total"] < 3


@pytest.mark.parametrize("tune", [None, False])
def test_kernels_may_tune_while_a_clip_is_sampled_unless_told_not_to(
    tiny_folder, tmp_path, monkeypatch, tune
):
    from sixbit_diffusion.kernels import tuner

    def sample(*_):
        assert len(tuner._active) == (0 if tune is False else 1)
        for _, show in tuner._active:
            show("a product", 1, 4)
        raise InterruptedError

    shown = []
    monkeypatch.setattr(generating, "sample", sample)
    choice = Choice(precision="w4a8", tune=tune)
    request = generating.GenerateRequest(str(tiny_folder), "a star", tmp_path / "out", choice, device="cpu")
    with pytest.raises(InterruptedError):
        generating.generate(request, lambda *step: shown.append(step))
    assert shown == ([] if tune is False else [("tuning", 1, 4)]) and not tuner._active


def test_nothing_of_an_earlier_run_stays_when_writing_fails(tiny_folder, tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("report.json", "side_by_side.png", "run.png", "clip.mp4"):
        (out / name).write_text("of the run before")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(generating, "draw_run", fail)
    request = generating.GenerateRequest(str(tiny_folder), "a star", out, steps=2, device="cpu")
    with pytest.raises(OSError, match="disk full"):
        generating.generate(request)
    assert [file.name for file in out.iterdir()] == ["clip.mp4"]
    assert (out / "clip.mp4").read_bytes() != b"of the run before"


def test_a_name_with_a_colon_is_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a:b").mkdir()
    write_mp4(Path("a:b") / "clip.mp4", np.zeros((3, 32, 32, 3), np.uint8), 8)
    assert (tmp_path / "a:b" / "clip.mp4").stat().st_size > 0


def test_a_clip_beyond_the_memory_of_the_machine_is_refused(tiny):
    small = replace(find_machine("cpu"), memory_bytes=1 << 20)
    check_memory(tiny.facts, (32, 32), 9, True, small)
    with pytest.raises(InputError, match=r"4097 frames of 1024x1024 need 96\.0. GiB or more.* has 1\.0 MiB"):
        check_memory(tiny.facts, (1024, 1024), 4097, True, small)
