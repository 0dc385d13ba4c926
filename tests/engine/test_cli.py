import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from sixbit_diffusion.engine import commands
from sixbit_diffusion.engine.cli import main
from sixbit_diffusion.sixbit_core import VERSION

ROOT = Path(__file__).resolve().parents[2]
GENERATE = ["generate", "--model", "TINY", "--prompt", "a star", "--out", "OUT", "--device", "cpu"]

NO_PROMPTS = (
    "--prompts gone.txt cannot be read as a text file: No such file or directory; "
    "give a file of captions, one a line, or how many"
)
BAD = [
    ([], "COMMAND"),
    (["paint"], "paint"),
    (["generate", "--model", "TINY", "--out", "OUT"], "--prompt"),
    ([*GENERATE, "--stps", "4"], "--stps"),
    ([*GENERATE, "--model", "nowhere"], "nowhere does not exist"),
    ([*GENERATE, "--prompt", "  "], "--prompt is empty"),
    ([*GENERATE, "--steps", "0"], "--steps must lie between 1 and 1000, got 0"),
    ([*GENERATE, "--steps", "2.5"], "--steps: needs a whole number, got '2.5'"),
    ([*GENERATE, "--seed", "abc"], "--seed: needs a whole number, got 'abc'"),
    ([*GENERATE, "--frames", "9" * 5000], "--frames: needs a whole number"),
    ([*GENERATE, "--size", "-128x128"], "one that begins with - is given as --size=VALUE"),
    ([*GENERATE, "--size=-128x128"], "--size: needs HEIGHTxWIDTH, 480x720 for one, got '-128x128'"),
    ([*GENERATE, "--cfg", "nan"], "--cfg"),
    ([*GENERATE, "--seed", "-1"], "--seed"),
    ([*GENERATE, "--frames", "12"], "8N+1 frames; the nearest are 9 and 17"),
    ([*GENERATE, "--frames", "0"], "the nearest are 1 and 9"),
    ([*GENERATE, "--size", "30x40"], "the nearest is 32x32"),
    ([*GENERATE, "--size", "30"], "HEIGHTxWIDTH"),
    ([*GENERATE, "--image", "first.png"], "leave --image out"),
    ([*GENERATE, "--precision", "w2a2"], "--precision must be one of full, w4a16, w4a8, w4a4, dmpq"),
    ([*GENERATE, "--router", "lucky"], "--router must be one of"),
    ([*GENERATE, "--preset", "best"], "--preset must be one of paper, quality, balanced, fast"),
    ([*GENERATE, "--cache", "on"], "--cache must be one of off, tdc"),
    ([*GENERATE, "--bits", "3"], "--bits: activation bits must lie between 4 and 8, got 3"),
    ([*GENERATE, "--threshold", "-1"], "--threshold: threshold must be 0 or more"),
    ([*GENERATE, "--size", "16384x32"], "must be 8192 or less"),
    ([*GENERATE, "--size", f"{'9' * 5000}x32"], "HEIGHTxWIDTH"),
    ([*GENERATE, "--frames", "80001"], "--frames must be 8193 or less"),
    (["evaluate", "--model", "TINY", "--prompts", "+-5", "--out", "OUT"], "+-5"),
    (["evaluate", "--model", "TINY", "--prompts", "9" * 5000, "--out", "OUT"], "--prompts must be between 1"),
    (["evaluate", "--model", "TINY", "--seeds", "0,9223372036854775808", "--out", "OUT"], "below 2^63"),
    (["calibrate", "--model", "TINY", "--seed", "9223372036854775807", "--out", "OUT"], "below 2^63"),
    ([*GENERATE, "--threshold", "inf"], "--threshold: needs a finite number, got 'inf'"),
    ([*GENERATE, "--end", "nan"], "--end: needs a finite number"),
    (["calibrate", "--model", "TINY", "--bits", "5,inf", "--out", "OUT"], "--bits: needs a finite number"),
    ([*GENERATE, "--report", "out/../out/clip.mp4"], "is written anyway"),
    ([*GENERATE, "--out", "TAKEN"], "clip.mp4 is a folder"),
    ([*GENERATE, "--max-skips", "-1"], "--max-skips: max_skips must be 0 or more"),
    ([*GENERATE, "--max-skips", "0"], "--max-skips 0 would skip nothing; give 1 or more, or --cache off"),
    ([*GENERATE, "--start", "0.9", "--end", "0.1"], "--start, --end: start and end need"),
    ([*GENERATE, "--cache-location", "moon"], "--cache-location: cache location must be one of"),
    ([*GENERATE, "--router", "gamma"], "needs a predictor"),
    ([*GENERATE, "--predictor", "absent.json"], "absent.json"),
    ([*GENERATE, "--precision", "w4a8", "--predictor", "absent.json"], "absent.json"),
    ([*GENERATE, "--precision", "w4a8", "--router", "gamma"], "--router means nothing with --precision w4a8"),
    ([*GENERATE, "--precision", "w4a4", "--bits", "6"], "--bits means nothing with --precision w4a4"),
    ([*GENERATE, "--precision", "w4a16", "--predictor", "x"], "--predictor means nothing with"),
    ([*GENERATE, "--precision", "full", "--router", "int8"], "--router means nothing with --precision full"),
    ([*GENERATE, "--device", "tpu"], "--device must be auto, cpu or cuda"),
    ([*GENERATE, "--out", "FILE"], "cannot be made a folder"),
    ([*GENERATE, "--report", "TINY"], "is a folder; give a file name"),
    (["evaluate", "--model", "TINY", "--steps", "0", "--out", "OUT"], "--steps must lie between"),
    (["generate", "--model", "FILE", "--prompt", "x", "--out", "OUT"], "file.txt is not a safetensors file"),
    (["generate", "--model", "WEIGHTS", "--prompt", "x", "--out", "OUT"], "add --pipeline"),
    (
        ["check", "--model", "WEIGHTS", "--pipeline", "reference"],
        "give weights and pipeline folder of one model",
    ),
    (["generate", "--promt", "x", "--out", "OUT"], "unknown option --promt; did you mean --prompt?"),
    (["check", "--stesp=4"], "unknown option --stesp; did you mean --steps?"),
    (["check", "--qqq"], "unknown option --qqq (see sixbit check --help)"),
    (["inspect", "FILE"], "file.txt"),
    (["inspect", "nowhere.safetensors"], "nowhere.safetensors"),
    (["quantize", "TINY", "TARGET", "--method", "gptq"], "gptq"),
    (["quantize", "TINY", "TARGET", "--rotation", "maybe"], "rotation"),
    (["quantize", "nowhere", "TARGET"], "nowhere"),
    (["quantize", "TINY", "TARGET", "--calibration", "gone"], "gone/inputs.safetensors does not exist"),
    (["quantize", "TINY", "TARGET", "--calibration", "x", "--rotation", "on"], "--calibration serves"),
    (["evaluate", "--model", "TINY", "--prompts", "0", "--out", "OUT"], "--prompts must be between 1 and"),
    (["evaluate", "--model", "TINY", "--prompts", "99", "--out", "OUT"], "give a file"),
    (["evaluate", "--model", "TINY", "--prompts", "gone.txt", "--out", "OUT"], NO_PROMPTS),
    (["evaluate", "--model", "TINY", "--seeds", "a", "--out", "OUT"], "--seeds"),
    (["verify", "--model", "TINY", "--prompts", "9", "--out", "OUT"], "give a file of captions"),
    (["verify", "--model", "TINY", "--seed", "9223372036854775807", "--out", "OUT"], "below 2^63"),
    (["evaluate", "--model", "TINY", "--workers", "0", "--out", "OUT"], "--workers"),
    (["calibrate", "--model", "TINY", "--bits", "3", "--out", "OUT"], "--bits must lie between 4 and 8"),
    (["calibrate", "--model", "TINY", "--steps", "2", "--out", "OUT"], "--steps must be 4 or more"),
]


@pytest.mark.parametrize(
    ("arguments", "said"), BAD, ids=lambda value: value if isinstance(value, str) else None
)
def test_bad_input_is_one_line_and_code_2(arguments, said, tiny_folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "file.txt").write_text("no checkpoint")
    (tmp_path / "taken" / "clip.mp4").mkdir(parents=True)
    places = {
        "TINY": str(tiny_folder),
        "OUT": str(tmp_path / "out"),
        "FILE": str(tmp_path / "file.txt"),
        "TAKEN": str(tmp_path / "taken"),
        "TARGET": str(tmp_path / "made.safetensors"),
        "WEIGHTS": str(next((tiny_folder / "transformer").glob("*.safetensors"))),
    }
    monkeypatch.chdir(tmp_path)
    code = main([places.get(argument, argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert code == 2, err
    assert err.startswith("sixbit: ") and err.count("\n") == 1 and said in err
    assert "Traceback" not in out
    assert not (tmp_path / "made.safetensors").exists() and not (tmp_path / "out" / "clip.mp4").exists()


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "sixbit: interrupted\n"),
        (RuntimeError("two\nlines"), 1, "sixbit: two lines\n"),
        (ZeroDivisionError("by zero"), 1, "sixbit: ZeroDivisionError: by zero\n"),
    ],
)
def test_other_ends(error, code, line, capsys, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("sixbit_diffusion.sixbit_core.inspect.inspect_checkpoint", fail)
    assert main(["inspect", "file"]) == code
    assert capsys.readouterr().err == line


def test_a_value_that_is_given_wins_over_the_preset():
    from sixbit_diffusion.engine.settings import Choice, resolve

    preset = resolve(Choice(preset="fast"), lambda: "")
    assert (preset.cache.threshold, preset.cache.max_skips, preset.dmpq.bits) == (0.25, 3, 5.0)
    moved = resolve(Choice(preset="fast", threshold=0.1, bits=7.0, cache_location="host"), lambda: "")
    assert (moved.cache.threshold, moved.cache.max_skips, moved.dmpq.bits) == (0.1, 3, 7.0)
    assert moved.cache.location == "host"
    assert preset.tunes and not resolve(Choice(tune=False), lambda: "").tunes
    assert resolve(Choice(precision="w4a16"), lambda: "").dmpq.purified_refresh is False
    assert resolve(Choice(precision="w4a8"), lambda: "").dmpq.purified_refresh is True
    assert (
        resolve(Choice(precision="w4a8", purified_refresh=False), lambda: "").dmpq.purified_refresh is False
    )


def test_the_machine_decides_where_no_precision_is_given():
    from sixbit_diffusion.engine.settings import Choice, resolve

    named = ROOT / "reference" / "predictor.json"
    fingerprint = json.loads(named.read_text(encoding="utf-8"))["model"]["fingerprint"]

    def chosen(capability, backend, **given):
        made = resolve(Choice(**given), lambda: fingerprint, capability=capability, backend=backend)
        return made.precision

    for capability, backend, precision, why in (
        (None, "reference", "w4a8", "no FP4 units here"),
        ((9, 0), "triton", "w4a8", "this GPU has no FP4 units"),
        ((10, 0), "triton", "dmpq", "this GPU has FP4 units"),
        ((12, 0), "triton", "dmpq", "this GPU has FP4 units"),
        ((12, 0), "int_mm", "w4a8", "FP4 units need Triton"),
        ((8, 9), "kitchen", "w4a8", "this GPU has no FP4 units"),
        ((9, 0), "half", "w4a16", "without Triton INT8 is no faster on this GPU"),
    ):
        found = resolve(Choice(), lambda: "", capability=capability, backend=backend)
        assert found.precision == precision and f"precision {precision}, since {why}" in found.note
        assert chosen(capability, backend, precision="dmpq") == "dmpq"
        # A predictor is of no use to 16-bit activations, and is not passed over in silence.
        served = chosen(capability, backend, predictor=named)
        assert served == ("w4a8" if precision == "w4a16" else precision)
        assert chosen(capability, backend, router="random") == chosen(capability, backend, bits=5.0) == "dmpq"


def test_the_label_tells_what_runs():
    from sixbit_diffusion.engine.settings import Choice, resolve

    def label(*bits, **given):
        return resolve(Choice(cache="off", **given), lambda: "").label(*bits)

    assert label(precision="dmpq", bits=5.0) == "dmpq, router int8, 8 bits, cache off"  # no predictor
    assert label(router="random", bits=5.0) == "dmpq, router random, 5 bits asked for, cache off"
    assert label(5.2, router="random", bits=5.0) == "dmpq, router random, 5.20 bits, cache off"
    assert label(8.4, precision="w4a8") == "w4a8, 8.40 bits, cache off"
    assert label(precision="full") == "full, cache off"


def test_every_command_has_help_with_an_example(capsys):
    for name in ("generate", "quantize", "calibrate", "inspect", "evaluate", "verify", "check"):
        with pytest.raises(SystemExit) as end:
            main([name, "--help"])
        assert end.value.code == 0
        assert f"example:\n  sixbit {name}" in capsys.readouterr().out
        assert callable(getattr(commands, f"run_{name}"))


def program(*arguments: str, **more: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        [sys.executable, str(ROOT), *arguments], capture_output=True, text=True, timeout=120, env=environment
    )


def test_help_needs_neither_torch_nor_diffusers(tmp_path):
    for name in ("torch", "diffusers", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('help must not need this')")
    done = program("generate", "--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "--cache-location" in done.stdout


@pytest.mark.parametrize(
    ("missing", "arguments", "said"),
    [
        ("torch", ["inspect", "x"], "this needs torch: pip install"),
        ("torch", ["check"], "this needs torch: pip install"),
        ("transformers", ["generate", "--prompt", "x"], "this needs transformers: pip install"),
        ("rich", ["calibrate"], 'this needs rich: pip install "sixbit-diffusion[engine]"'),
    ],
)
def test_what_is_not_installed_is_one_line(missing, arguments, said, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules[{missing!r}] = None")
    if arguments[0] in ("generate", "calibrate"):
        arguments = [*arguments, "--model", "reference", "--out", str(tmp_path / "out")]
    done = program(*arguments, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr


def test_check_goes_on_without_the_libraries_that_sample(tiny_folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys; sys.modules.update(diffusers=None, transformers=None)"
    )
    done = program("check", "--model", str(tiny_folder), "--device", "cpu", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for word in ("missing: diffusers", "missing: transformers", "fingerprint", "clip: 9", "memory, time:"):
        assert word in done.stdout


def test_a_checkout_started_by_path_runs_itself(tmp_path):
    """Another copy, as an installed one would be found, is left alone."""
    other = tmp_path / "sixbit_diffusion"
    other.mkdir()
    (other / "__init__.py").write_text("raise SystemExit('the other copy')")
    done = program("generate", "--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows sends no signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_ends_as_ctrl_c_does(name, tmp_path, capsys, monkeypatch):
    from sixbit_diffusion.sixbit_core.replacing import replacing

    number = getattr(signal, name)

    def killed(*_):
        with replacing(tmp_path / "made") as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), number)
            raise AssertionError("the signal was not seen")

    monkeypatch.setattr("sixbit_diffusion.sixbit_core.inspect.inspect_checkpoint", killed)
    started_with = signal.signal(number, signal.SIG_DFL)  # under nohup it is ignored, and would stay so
    try:
        assert main(["inspect", "file"]) == 128 + number
        assert capsys.readouterr().err == f"sixbit: stopped by {name}\n"
        assert not list(tmp_path.iterdir()) and signal.getsignal(number) == signal.SIG_DFL
    finally:
        signal.signal(number, started_with)


# A library imported by a command, as some are: what is raised while it is imported it keeps to itself.
SWALLOWING = """
import os, signal, sys, time

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            try:
                {when_imported}
            except BaseException:
                pass

sys.meta_path.insert(0, Finder())
"""


def importing(module: str, when_imported: str, folder: Path, *arguments: str) -> subprocess.Popen:
    """A program that has begun to import `module`, and runs `when_imported` there."""
    (folder / "sitecustomize.py").write_text(SWALLOWING.format(module=module, when_imported=when_imported))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder)}
    command = [sys.executable, str(ROOT), *arguments]
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert started.stdout.readline() == "importing\n"
    return started


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows sends no signals")
@pytest.mark.parametrize(
    ("module", "name", "code", "line"),
    [
        ("torch", "SIGINT", 130, "interrupted"),
        ("diffusers.utils", "SIGINT", 130, "interrupted"),
        ("torch", "SIGTERM", 143, "stopped by SIGTERM"),
    ],
)
def test_a_signal_while_libraries_are_imported(module, name, code, line, tmp_path):
    when_imported = f"os.kill(os.getpid(), signal.{name}); time.sleep(0.1)"
    started = importing(module, when_imported, tmp_path, "check", "--device", "cpu")
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (code, f"sixbit: {line}\n")


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows sends no signals")
@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.7, 1.1, 1.5])
def test_ctrl_c_in_the_first_seconds(seconds, tmp_path):
    arguments = ["generate", "--model", "reference", "--prompt", "x", "--device", "cpu"]
    started = importing("torch", "pass", tmp_path, *arguments, "--out", str(tmp_path / "out"))
    with pytest.raises(subprocess.TimeoutExpired):
        started.wait(timeout=seconds)
    started.send_signal(signal.SIGINT)
    _, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (130, "sixbit: interrupted\n")


def test_a_signal_that_a_library_takes_for_its_own_error(capsys, monkeypatch):
    def misreports(*_):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("Failed to import") from None

    monkeypatch.setattr("sixbit_diffusion.sixbit_core.inspect.inspect_checkpoint", misreports)
    assert main(["inspect", "file"]) == 130
    assert capsys.readouterr().err == "sixbit: interrupted\n"


def test_a_folder_that_cannot_be_written_is_refused_first(tiny_folder, tmp_path, capsys, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", denied)
    monkeypatch.setattr("sixbit_diffusion.engine.pipeline.build_transformer", pytest.fail)
    where = ["--model", str(tiny_folder), "--device", "cpu", "--out"]
    for command in (["generate", "--prompt", "x"], ["calibrate"], ["evaluate"], ["verify"]):
        assert main([*command, *where, str(tmp_path / "out")]) == 2
        assert "cannot be written to: Permission denied" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["inspect"], ["inspect", "--json"], ["check", "--device", "cpu"]])
def test_a_reader_that_goes_away_is_no_error(options, tiny_folder):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, str(ROOT), *options, *(["--model"] if options[0] == "check" else [])]
    done = subprocess.run(
        [*command, str(tiny_folder)], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0 and capsys.readouterr().out == f"sixbit {VERSION}\n"


def test_reference_is_a_name_for_inspect_and_quantize(tmp_path, capsys, monkeypatch):
    assert main(["inspect", "reference", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["licence"] == "apache-2.0" and "reference, a small CogVideoX" in found["source"]
    target = tmp_path / "q.safetensors"
    assert main(["quantize", "reference", str(target), "--method", "rtn"]) == 0
    capsys.readouterr()
    assert main(["inspect", str(target), "--json"]) == 0
    copy = json.loads(capsys.readouterr().out)
    assert all(copy[key] == found[key] for key in ("source", "licence", "fingerprint"))

    monkeypatch.setattr("sixbit_diffusion.engine.facts.reference_folder", lambda: tmp_path / "gone")
    for command in (["inspect", "reference"], ["quantize", "reference", str(target), "--force"]):
        assert main(command) == 2
        assert "without the bundled reference" in capsys.readouterr().err


@pytest.mark.parametrize("report", ["ro/r.json", "taken", "file/r.json"])
def test_a_refused_report_leaves_no_folder_behind(report, tiny_folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "ro").mkdir()
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    made = tempfile.NamedTemporaryFile

    def denied(dir, **more):
        if Path(dir).name == "ro":
            raise PermissionError(13, "Permission denied")
        return made(dir=dir, **more)

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", denied)
    arguments = ["generate", "--model", str(tiny_folder), "--prompt", "x", "--device", "cpu"]
    places = ["--out", str(tmp_path / "new" / "out"), "--report", str(tmp_path / report)]
    assert main([*arguments, *places]) == 2
    assert "--report" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "ro", "taken"]


def test_started_by_path(tiny_folder):
    done = program("inspect", str(tiny_folder), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["blocks"] == 2


def test_check_says_what_is_there(tiny_folder, capsys):
    assert main(["check", "--model", str(tiny_folder), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    for word in ("torch", "machine: cpu", "fingerprint", "memory: transformer", "time: about"):
        assert word in said
    assert main(["check", "--model", "nowhere"]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
