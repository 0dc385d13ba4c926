import json

import av
import numpy as np
from PIL import Image
from sixbit_diffusion.engine.cli import main

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
    assert report["psnr_db"] > 10 and 0 < report["ssim"] <= 1
    assert report["weight_bytes"] < report["weight_bytes_full_precision"]
    assert report["command"].startswith("sixbit generate --model")
    with av.open(str(out / "clip.mp4")) as clip:
        frames = [frame.to_ndarray(format="rgb24") for frame in clip.decode(video=0)]
    assert len(frames) == 9 and frames[0].shape == (32, 32, 3)
    for name in ("side_by_side.png", "run.png"):
        assert np.asarray(Image.open(out / name)).std() > 0
    assert not list(out.glob(".*"))
