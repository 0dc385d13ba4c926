import json

import pytest
from safetensors.torch import load_file
from sixbit_diffusion.engine.cli import main
from sixbit_diffusion.engine.facts import read_facts
from sixbit_diffusion.engine.generate import GenerateRequest, generate
from sixbit_diffusion.engine.machine import find_machine
from sixbit_diffusion.engine.settings import Choice, settle

from .conftest import save_tiny_pipeline, tiny_transformer


def calibrate(folder, out, *more) -> int:
    arguments = ["calibrate", "--model", folder, "--prompts", 1, "--steps", 4, "--bits", 6, "--device", "cpu"]
    return main([str(a) for a in (*arguments, "--out", out, *more)])


def test_a_calibration_is_used_repeats_and_is_refused_elsewhere(tiny_folder, tmp_path, capsys):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert calibrate(tiny_folder, first) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert " s a step: 1 clips are measured, then about" in lines[0] and lines[1] == "measured: clip 1 of 1"
    assert lines[2].startswith("solving for 6 bits: clip 1 of about ")
    assert said.startswith("about ") and "first.json: median R²" in said
    kept, q = tmp_path / "kept", tmp_path / "q.safetensors"
    assert calibrate(tiny_folder, second, "--inputs", kept) == 0
    inputs = load_file(kept / "inputs.safetensors")
    assert len(inputs) == 2 * 4 and inputs["blocks.1.ff_out"].shape == (4 * 4, 512)
    assert main(["quantize", str(tiny_folder), str(q), "--calibration", str(kept)]) == 0
    assert "layers in NVFP4" in capsys.readouterr().out
    other = save_tiny_pipeline(tmp_path / "other", tiny_transformer(num_layers=1))
    assert main(["quantize", str(other), str(tmp_path / "r.safetensors"), "--calibration", str(kept)]) == 2
    assert "other weights than the checkpoint" in capsys.readouterr().err
    assert first.read_bytes() == second.read_bytes()
    document = json.loads(first.read_text())
    assert document["calibration"] == {
        "steps": 4,
        "scheduler": "ddim-trailing",
        "cfg": 6.0,
        "size": [32, 32],
        "frames": 9,
        "seed": 0,
        "prompts": 1,
    }
    by_gamma = {"cache_off", "cache_on", "paper_cache_off", "paper_cache_on"}
    assert set(document["theta"]["6.0"]) == by_gamma | {"time_cache_off"}

    for router in ("gamma", "gamma-time", "static"):
        choice = Choice(router=router, bits=6.0, cache="off", predictor=first)
        out = tmp_path / router
        request = GenerateRequest(str(tiny_folder), "a star", out, choice, steps=4, device="cpu")
        report = generate(request).report
        assert report["router"] == router
        assert 5 < report["average_activation_bits"] < 7
        assert any("4" in row and "8" in row for kind in report["choices"].values() for row in kind) == (
            router != "static"
        )

    limits = document["outlier_limits"]
    facts = read_facts(str(tiny_folder))
    fixed = settle(Choice(precision="w4a8", predictor=first), facts, find_machine("cpu"))
    assert fixed.predictor.outlier_limits == pytest.approx(limits)  # PDR in W4A8 has them too

    document["model"]["fingerprint"] = "0" * 32
    first.write_text(json.dumps(document))
    capsys.readouterr()
    where = ["--model", str(tiny_folder), "--out", str(tmp_path / "out"), "--device", "cpu"]
    assert main(["generate", *where, "--prompt", "x", "--predictor", str(first)]) == 2
    assert "calibrated on other weights" in capsys.readouterr().err
    assert main(["generate", *where, "--prompt", "x", "--precision", "w4a8", "--predictor", str(first)]) == 2
    assert "calibrated on other weights" in capsys.readouterr().err
