"""Workflows on a real server: listed, valid, and run over HTTP where they need no download.

The reference's clip is the one that the engine gives.
"""

import json
import subprocess
import sys
import urllib.error
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from comfy_server import ROOT, Server, running_server
from PIL import Image
from workflow_form import all_fields, kind_of, specs

STEPS = 5  # in place of the file's 50, for time; divides 1000, so both choose the same timesteps
API = sorted((ROOT / "workflows" / "api").glob("*.json"))
GOLDEN = sorted((ROOT / "tests" / "host" / "golden").glob("*/api/*.json"))  # as releases shipped them
REFERENCE = ROOT / "workflows" / "api" / "reference.json"
BESIDE = ROOT / "workflows" / "api" / "reference_before_after.json"
DRAFT = ROOT / "workflows" / "api" / "reference_draft_to_final.json"
CLIENT = ROOT / "workflows" / "api" / "queue_workflow.py"
OF_THE_USER = ("model_name", "clip_name", "vae_name", "image", "predictor")  # files that need not be there


@pytest.fixture(scope="module")
def server(host, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server(host, tmp_path_factory.mktemp("server") / "base") as server:
        yield server


def with_frames(prompt: dict) -> dict:
    """The prompt with its decoded frames saved as PNG too, since the video is lossy."""
    decoded = next(key for key, node in prompt.items() if node["class_type"].startswith("VAEDecode"))
    saved = {"images": [decoded, 0], "filename_prefix": "frames"}
    return {**prompt, "frames": {"class_type": "SaveImage", "inputs": saved}}


def read_frames(server: Server, outputs: dict) -> torch.Tensor:
    folder = server.base / "output"
    images = [Image.open(folder / i["subfolder"] / i["filename"]) for i in outputs["frames"]["images"]]
    return torch.from_numpy(np.stack([np.asarray(image.convert("RGB")) for image in images]))


@torch.inference_mode()
def engine_frames(
    prompt: dict, nudge: float = 0.0, sampler: dict | None = None, **told: object
) -> torch.Tensor:
    """The same clip by the engine, cut down to 8 bits as the host's SaveImage does: it does not round.

    Apply DMPQ is INT8 on a CPU.

    Args:
        nudge: relative change of the first noise.
        sampler: inputs of the sampler, where there are several.
        told: what `sixbit generate` is told, where it is not as the nodes say.
    """
    from sixbit_diffusion.engine import sample
    from sixbit_diffusion.engine.facts import read_facts
    from sixbit_diffusion.engine.machine import find_machine
    from sixbit_diffusion.engine.pipeline import load_model
    from sixbit_diffusion.engine.settings import Choice, settle

    kinds = {node["class_type"]: node["inputs"] for node in prompt.values()}
    sampler, size = sampler or kinds["KSampler"], kinds["SixBitEmptyLatent"]
    texts = {key: node["inputs"]["text"] for key, node in prompt.items() if "text" in node["inputs"]}
    said = {
        "precision": "w4a8" if "SixBitApplyDMPQ" in kinds else "w4a16",
        "cache": "tdc" if "SixBitTemporalDeltaCache" in kinds else "off",
    }
    choice = Choice(**{**said, **told})
    machine = find_machine("cpu")
    settings = settle(choice, read_facts("reference"), machine)
    model = load_model("reference", None, settings.weights, machine)
    clip = sample.ClipSpec(
        texts[sampler["positive"][0]],
        (size["height"], size["width"]),
        size["frames"],
        texts[sampler["negative"][0]],
        sampler["steps"],
        sampler["cfg"],
        sampler["seed"],
    )
    own = sample.initial_noise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "initial_noise", lambda *given: own(*given) * (1 + nudge))
        sampled = sample.sample(model, settings, clip)
    video = model.pipeline.decode_latents(sampled.latents)[0]
    return ((video / 2 + 0.5).clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 3, 0)


def shortened(path: Path, steps: int = STEPS) -> dict:
    prompt = json.loads(path.read_text(encoding="utf-8"))
    for node in prompt.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = steps
    return prompt


def of_length(prompt: dict, frames: int) -> dict:
    """The prompt for a shorter clip, in place."""
    for node in prompt.values():
        if node["class_type"] == "SixBitEmptyLatent":
            node["inputs"]["frames"] = frames
    return prompt


def sampler_of(prompt: dict) -> dict:
    return next(node["inputs"] for node in prompt.values() if node["class_type"] == "KSampler")


def renamed(prompt: dict, old: str, new: str) -> dict:
    """The prompt with another id for one node."""

    def moved(value: object) -> object:
        return [new, value[1]] if isinstance(value, list) and value[0] == old else value

    return {
        new if key == old else key: {
            **node,
            "inputs": {name: moved(value) for name, value in node["inputs"].items()},
        }
        for key, node in prompt.items()
    }


def with_int8(prompt: dict) -> dict:
    """The prompt with Apply DMPQ where the sampler gets its model, and no other node between."""
    loader = next(key for key, node in prompt.items() if node["class_type"] == "SixBitLoadReference")
    inputs = {"model": [loader, 0], "preset": "balanced", "router": "int8"}
    routed = {"class_type": "SixBitApplyDMPQ", "inputs": inputs}
    kept = {
        key: node
        for key, node in prompt.items()
        if node["class_type"] not in ("SixBitTemporalDeltaCache", "SixBitRunReport")
    }
    latents = next(key for key, node in kept.items() if node["class_type"] == "KSampler")
    for node in kept.values():
        for name, value in node["inputs"].items():
            if isinstance(value, list) and value[0] not in kept:
                node["inputs"][name] = ["dmpq", 0] if name == "model" else [latents, 0]
    kept = {key: node for key, node in kept.items() if node["inputs"].get("images") != [latents, 0]}
    return {**kept, "dmpq": routed}


def named(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


@pytest.fixture(scope="module")
def schemas(server: Server) -> dict:
    return server.ask("object_info")


def test_template_browser_lists_every_workflow(server: Server) -> None:
    assert sorted(server.ask("api/workflow_templates")["sixbit"]) == [path.stem for path in API]


@pytest.mark.parametrize("path", API + GOLDEN, ids=named)
def test_api_form_fits_the_host(schemas: dict, path: Path) -> None:
    prompt = json.loads(path.read_text(encoding="utf-8"))
    for key, node in prompt.items():
        inputs, known = node["inputs"], set()
        for name, spec, optional in specs(schemas[node["class_type"]]):
            known.add(name)
            value, options = inputs.get(name), spec[1] if len(spec) > 1 else {}
            if value is None:
                assert optional, f"{key}: {name} is missing"
            elif isinstance(value, list):
                given = schemas[prompt[value[0]]["class_type"]]["output"][value[1]]
                assert kind_of(spec) in (given, "*"), f"{key}: {name} is {kind_of(spec)}, gets {given}"
            elif kind_of(spec) == "COMBO" and name not in OF_THE_USER:
                assert value in (spec[0] if isinstance(spec[0], list) else options["options"]), (key, name)
            elif kind_of(spec) in ("INT", "FLOAT"):
                assert options.get("min", value) <= value <= options.get("max", value), (key, name)
        assert set(inputs) <= known, key
    assert any(schemas[node["class_type"]]["output_node"] for node in prompt.values())


@pytest.mark.parametrize("path", API + GOLDEN, ids=named)
def test_editor_form_has_this_hosts_fields(schemas: dict, path: Path) -> None:
    """Sockets, fields in order, outputs. A later host or release has fields more, today's nodes have not."""
    prompt = json.loads(path.read_text(encoding="utf-8"))
    for node in json.loads((path.parents[1] / path.name).read_text(encoding="utf-8"))["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        schema, given = schemas[node["type"]], prompt[str(node["id"])]["inputs"]
        fields = all_fields(schema, given)
        today = node["type"].startswith("SixBit") and path in API
        stored = len(fields) if today else len(node["widgets_values"])
        assert node["widgets_values"] == [value for _, _, value in fields[:stored]], node
        named = [(name, kind) for name, kind, _ in fields[:stored] if name]
        shown = [(entry["name"], entry["type"]) for entry in node["inputs"] if "widget" in entry]
        sockets = {(entry["name"], entry["type"]) for entry in node["inputs"] if "widget" not in entry}
        assert shown == named, node
        assert sockets <= {(name, kind_of(spec)) for name, spec, _ in specs(schema)}, node
        outputs = [entry["type"] for entry in node["outputs"]]
        assert outputs == schema["output"][: None if today else len(outputs)], node


@pytest.mark.parametrize("frames", [9, pytest.param(33, marks=pytest.mark.slow)])
def test_reference_workflow_gives_the_engines_clip(server: Server, frames: int) -> None:
    pytest.importorskip("diffusers")
    from sixbit_diffusion.sixbit_core.metrics import psnr

    prompt = of_length(shortened(REFERENCE), frames)
    found = read_frames(server, server.execute(with_frames(prompt)))
    assert len(found) == frames and psnr(found, engine_frames(prompt)) >= 60


def compared(server: Server, prompt: dict) -> tuple[torch.Tensor, dict, dict]:
    """What Compare Clips shows, what it says, and the outputs of all nodes."""
    clips = next(key for key, node in prompt.items() if node["class_type"] == "SixBitCompare")
    shown = next(key for key, node in prompt.items() if node["inputs"].get("source") == [clips, 1])
    saved = {"class_type": "SaveImage", "inputs": {"images": [clips, 0], "filename_prefix": "frames"}}
    outputs = server.execute({**prompt, "frames": saved})
    words, found = outputs[shown]["text"][0].split("\n", 1)
    return read_frames(server, outputs), {"words": words, **json.loads(found)}, outputs


def halves(both: torch.Tensor, one: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two clips below the captions, each as large as `one`."""
    height, width = one.shape[1:3]
    assert both.shape[2] == 2 * width + 8 and both.shape[1] % 2 == 0
    return both[:, -height:, :width], both[:, -height:, width + 8 :]


@pytest.mark.parametrize("frames", [9, pytest.param(33, marks=pytest.mark.slow)])
def test_before_and_after_stand_side_by_side(server: Server, frames: int) -> None:
    """Left the engine's clip in full precision, right that of the reference workflow, captions above them."""
    pytest.importorskip("diffusers")
    from sixbit_diffusion.sixbit_core.metrics import psnr

    prompt = of_length(shortened(BESIDE), frames)
    both, found, _ = compared(server, prompt)
    after = read_frames(server, server.execute(with_frames(of_length(shortened(REFERENCE), frames))))
    left, right = halves(both, after)
    assert torch.equal(right, after) and not torch.equal(left, after)
    assert psnr(left, engine_frames(prompt, precision="full", cache="off")) >= 50
    assert found["psnr_db"] == pytest.approx(psnr(left, right), abs=0.2)  # SaveImage cuts, the node rounds
    assert all(seconds > 0 for seconds in found["seconds"]) and found["composition_held"]


def test_a_draft_stands_beside_its_final_clip(server: Server) -> None:
    """Left fewer steps with the preset fast, right the clip of the reference workflow: the engine's both."""
    pytest.importorskip("diffusers")
    from sixbit_diffusion.sixbit_core.config import PRESETS
    from sixbit_diffusion.sixbit_core.metrics import psnr

    prompt, taken_for = of_length(json.loads(DRAFT.read_text(encoding="utf-8")), 9), {20: 2, 50: STEPS}
    texts = {}
    for key, node in list(prompt.items()):
        if node["class_type"] == "KSampler":
            node["inputs"].update(steps=taken_for[node["inputs"]["steps"]], seed=1)  # of no other test
        if node["class_type"] == "SixBitRunReport":
            texts[node["_meta"]["title"].split()[-1]] = key
            prompt[f"text{key}"] = {"class_type": "PreviewAny", "inputs": {"source": [key, 2]}}
    both, found, outputs = compared(server, prompt)
    runs = {
        name: json.loads(outputs[f"text{key}"]["text"][0].split("\n", 1)[1]) for name, key in texts.items()
    }
    for name, preset, taken in (("draft", "fast", 2), ("final", "balanced", STEPS)):
        expected = PRESETS[preset].cache
        assert runs[name]["evaluations"] == taken
        assert runs[name]["cache"]["threshold"] == expected.threshold
        assert runs[name]["cache"]["max_skips"] == expected.max_skips
    alone = of_length(shortened(REFERENCE), 9)
    sampler_of(alone)["seed"] = 1
    for node in alone.values():
        if node["class_type"] == "SixBitLoadReference":
            node["inputs"]["weights"] = "6-bit"  # said: else the host takes the latent that it has
    final = read_frames(server, server.execute(with_frames(alone)))
    left, right = halves(both, final)
    assert torch.equal(right, final) and not torch.equal(left, final)
    for clip, preset, steps in ((left, "fast", 2), (right, "balanced", STEPS)):
        sampler = {**sampler_of(prompt), "steps": steps}
        assert psnr(clip, engine_frames(prompt, sampler=sampler, preset=preset)) >= 50
    held = "composition held" if found["composition_held"] else "composition changed"
    assert found["labels"] == ["draft, 20 steps", "final, 50 steps"]
    assert f"{held} ({found['composition']:.2f})" in found["words"]


def test_text_and_previews_reach_the_sampler_while_it_samples(host, server: Server) -> None:
    prompt = shortened(REFERENCE, 3)
    sampler = next(key for key, node in prompt.items() if node["class_type"] == "KSampler")
    sampler_of(prompt)["cfg"] = 1.0
    saved = {"class_type": "SaveLatent", "inputs": {"samples": [sampler, 0], "filename_prefix": "latent"}}
    after = ("SixBitRunReport", "VAEDecode", "CreateVideo", "SaveVideo", "SaveImage")
    prompt = {key: node for key, node in prompt.items() if node["class_type"] not in after} | {"saved": saved}
    seen = host.run("listen", port=server.port, prompt=prompt)
    assert seen["ended"] == "success" and {node for node, _ in seen["texts"]} == {sampler}
    first, last = seen["texts"][0][1], seen["texts"][-1][1]
    assert first.startswith("step 1 of 3 | 0 % of blocks skipped | 16.0 bits | ") and first.endswith(" left")
    assert " s | " in last and last.endswith("16.0 bits")
    assert len(seen["previews"]) == 3 and min(seen["previews"][-1]) > 200  # on a white background


def client(server: Server, *arguments: str) -> subprocess.CompletedProcess:
    """The example client, as a user runs it."""
    command = [sys.executable, CLIENT, "--server", f"http://127.0.0.1:{server.port}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_client_queues_quantizing_and_waits_for_the_copy(server: Server) -> None:
    done = client(server, "cogvideox_quantize", "1.model_name=bundled reference", "1.method=rtn")
    assert done.returncode == 0 and "reference-6bit.safetensors" in done.stdout.split(), done.stderr
    assert (server.base / "models" / "diffusion_models" / "reference-6bit.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cogvideox_quantize"], "the server refused it: node 1: "),
        (["cogvideox_quantize", "1.rate=2"], "there is no input 1.rate"),
        (["reference", "7.seed=abc"], "7.seed is like"),
        (["nothing"], "there is no workflow "),
        (["reference", "--server", "http://127.0.0.1:9"], "no ComfyUI at http://127.0.0.1:9"),
    ],
)
def test_client_says_what_is_wrong_in_one_line(server: Server, arguments: list[str], said: str) -> None:
    done = client(server, *arguments)
    assert done.returncode == 1 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_int8_gives_a_clip_as_near_as_rounding_lets_the_engine_be_to_itself(server: Server) -> None:
    pytest.importorskip("diffusers")
    from sixbit_diffusion.sixbit_core.metrics import psnr

    prompt = with_int8(shortened(REFERENCE))
    frames, expected = read_frames(server, server.execute(with_frames(prompt))), engine_frames(prompt)
    spread = psnr(engine_frames(prompt, nudge=1e-7), expected)
    assert psnr(frames, expected) >= min(50, spread - 3), f"the engine is {spread} dB from itself"


def routes(report: dict) -> list[list[tuple[int, str]]]:
    """Evaluations that each linear ran in, and the formats it ran in: without those that were skipped."""
    rows = (row for rows in report["choices"].values() for row in rows)
    return [[(number, letter) for number, letter in enumerate(row) if letter in "48b"] for row in rows]


def other_routes(a: dict, b: dict) -> int:
    """How often a linear that ran in both of two runs at the same evaluation did so in another format."""
    pairs = zip(routes(a), routes(b), strict=True)
    return sum(
        dict(one)[number] != letter for one, two in pairs for number, letter in two if number in dict(one)
    )


def test_another_seed_still_skips_and_is_routed_anew(server: Server) -> None:
    prompt = of_length(shortened(REFERENCE, 8), 9)
    cache = next(node for node in prompt.values() if node["class_type"] == "SixBitTemporalDeltaCache")
    routed = {
        "model": cache["inputs"]["model"],
        "preset": "balanced",
        "router": "gamma",
        "compute": "emulate",
    }
    prompt["dmpq"] = {"class_type": "SixBitApplyDMPQ", "inputs": routed}
    cache["inputs"] |= {"model": ["dmpq", 0], "threshold": 0.9, "start": 0.1}
    report = next(key for key, node in prompt.items() if node["class_type"] == "SixBitRunReport")
    shown = {"class_type": "PreviewAny", "inputs": {"source": [report, 2]}}
    seen = []
    for seed in (0, 1, 0):
        sampler_of(prompt)["seed"] = seed
        outputs = server.execute({**with_frames(prompt), "text": shown})
        seen.append((outputs["text"]["text"][0], read_frames(server, outputs)))
    reports = [json.loads(words.split("\n", 1)[1]) for words, _ in seen]
    skipped = [report["skipped_fraction"] for report in reports]
    assert min(skipped) > 0 and skipped[0] == skipped[2]
    assert other_routes(reports[0], reports[1]) > 0 == other_routes(reports[0], reports[2])
    assert torch.equal(seen[0][1], seen[2][1]) and not torch.equal(seen[0][1], seen[1][1])

    # The host has this latent already, of a node with another id: the report is of the run that made it.
    old = next(key for key, node in prompt.items() if node["class_type"] == "KSampler")
    again = renamed(renamed({**prompt, "text": shown}, old, "another sampler"), report, "another report")
    outputs = server.execute(again)
    assert outputs["text"]["text"][0] == seen[2][0]


FOUND_WIDTH = "width must be a multiple of 16 from 16 to 4096, got 100; nearest are 96 and 112"
FOUND_FRAMES = "frames must be 8N+1 from 1 to 1025, got 10; nearest are 9 and 17"


def latent_prompt(kind: str, fields: dict) -> dict:
    """A loader, a node that is given a clip's size and length, and what saves its latent."""
    model = {"1": {"class_type": "SixBitLoadReference", "inputs": {}}}
    inputs, output = {"model": ["1", 0], "batch_size": 1, **fields}, 0
    if kind == "SixBitImageToVideo":
        model["2"] = {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": ""}}
        image = {"width": 128, "height": 128, "batch_size": 1, "color": 0}
        model["3"] = {"class_type": "EmptyImage", "inputs": image}
        del inputs["batch_size"]
        inputs |= {"positive": ["2", 0], "negative": ["2", 0], "vae": ["1", 2], "image": ["3", 0]}
        output = 2
    saved = {"samples": ["latent", output], "filename_prefix": "x"}
    made = {"class_type": kind, "inputs": inputs}
    return {**model, "latent": made, "saved": {"class_type": "SaveLatent", "inputs": saved}}


@pytest.mark.parametrize("kind", ["SixBitEmptyLatent", "SixBitImageToVideo"])
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"width": 100, "height": 128, "frames": 9}, FOUND_WIDTH),
        ({"width": 128, "height": 128, "frames": 10}, FOUND_FRAMES),
        ({"width": 128, "height": ["int", 0], "frames": 10}, FOUND_FRAMES),  # a link is not known yet
        ({"width": 128, "height": 8192, "frames": 9}, "got 8192; the nearest is 4096"),
    ],
)
def test_a_clip_that_none_makes_is_refused_before_a_model_is_loaded(
    server: Server, kind: str, fields: dict, said: str
) -> None:
    prompt = latent_prompt(kind, fields)
    prompt["int"] = {"class_type": "PrimitiveInt", "inputs": {"value": 128}}
    with pytest.raises(urllib.error.HTTPError) as error:
        server.ask("prompt", {"prompt": prompt})
    assert error.value.code == 400
    found = json.load(error.value)["node_errors"]
    assert set(found) == {"latent"} and all(said in entry["details"] for entry in found["latent"]["errors"])
    assert server.ask("queue") == {"queue_running": [], "queue_pending": []}


def test_a_clip_of_linked_numbers_is_made(server: Server) -> None:
    prompt = latent_prompt("SixBitEmptyLatent", {"width": ["int", 0], "height": 128, "frames": 9})
    prompt["int"] = {"class_type": "PrimitiveInt", "inputs": {"value": 128}}
    assert server.execute(prompt)["saved"]["latents"]


def test_wrong_use_is_said_on_the_node_before_sampling(server: Server) -> None:
    prompt = {
        "1": {
            "class_type": "SixBitTemporalDeltaCache",
            "inputs": {"model": ["2", 0], "preset": "balanced", "start": 0.9, "end": 0.2},
        },
        "2": {"class_type": "SixBitLoadReference", "inputs": {}},
        "3": {"class_type": "SixBitEmptyLatent", "inputs": {"model": ["1", 0]}},
        "4": {"class_type": "SaveLatent", "inputs": {"samples": ["3", 0], "filename_prefix": "x"}},
    }
    with pytest.raises(urllib.error.HTTPError) as error:
        server.ask("prompt", {"prompt": prompt})
    assert error.value.code == 400
    answer = json.load(error.value)
    assert "start and end need" in json.dumps(answer["node_errors"]["1"])
