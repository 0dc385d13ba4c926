"""The shipped workflows: both forms are one graph, set as recommended, with notes that name every file."""

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "workflows"
NAMES = sorted(path.stem for path in (FOLDER / "api").glob("*.json"))
FILES = {
    "SixBitLoadCogVideoX": ("model_name", "diffusion_models/"),
    "CLIPLoader": ("clip_name", "text_encoders/"),
    "VAELoader": ("vae_name", "vae/"),
}
EDITORS_OWN = {"seed": 1, "image": 1}  # fields after these: what becomes of the seed, the upload button


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def prompt_of(graph: dict) -> dict:
    """What the editor sends of its form: {id: {class_type, inputs}}."""
    links = {link[0]: link for link in graph["links"]}
    prompt = {}
    for node in graph["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        inputs, values = {}, iter(node["widgets_values"])
        for slot, entry in enumerate(node["inputs"]):
            if "widget" in entry:
                inputs[entry["name"]] = next(values)
                for _ in range(EDITORS_OWN.get(entry["name"], 0)):
                    next(values)
            elif entry["link"] is not None:
                _, source, output, target, target_slot, kind = links[entry["link"]]
                sender = next(n for n in graph["nodes"] if n["id"] == source)["outputs"][output]
                assert (target, target_slot) == (node["id"], slot) and entry["link"] in sender["links"]
                assert sender["type"] == kind and entry["type"] in (kind, "*")
                inputs[entry["name"]] = [str(source), output]
        assert next(values, None) is None, node
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt


def nodes_of(prompt: dict, kind: str) -> list[dict]:
    return [node["inputs"] for node in prompt.values() if node["class_type"] == kind]


def test_every_workflow_has_both_forms() -> None:
    assert len(NAMES) >= 9 and [path.stem for path in sorted(FOLDER.glob("*.json"))] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_are_one_graph(name: str) -> None:
    api, graph = read(FOLDER / "api" / f"{name}.json"), read(FOLDER / f"{name}.json")
    sent = prompt_of(graph)
    assert set(sent) == set(api)
    for key, node in api.items():
        assert sent[key]["class_type"] == node["class_type"]
        assert {k: v for k, v in sent[key]["inputs"].items() if k in node["inputs"]} == node["inputs"], key
        extra = {k: v for k, v in sent[key]["inputs"].items() if k not in node["inputs"]}
        assert not any(isinstance(value, list) for value in extra.values()), key
    assert max(node["id"] for node in graph["nodes"]) == graph["last_node_id"]
    assert len(graph["links"]) == graph["last_link_id"]


@pytest.mark.parametrize("name", NAMES)
def test_notes_name_every_file_and_its_folder(name: str) -> None:
    text = (FOLDER / "api" / f"{name}.md").read_text(encoding="utf-8")
    notes = [
        n["widgets_values"] for n in read(FOLDER / f"{name}.json")["nodes"] if n["type"] == "MarkdownNote"
    ]
    assert notes == [[text]]
    for kind, (field, folder) in FILES.items():
        for inputs in nodes_of(read(FOLDER / "api" / f"{name}.json"), kind):
            row = next(line for line in text.splitlines() if f"`{inputs[field]}`" in line)
            assert f"`{folder}`" in row


@pytest.mark.parametrize("name", NAMES)
def test_settings_are_the_recommended_ones(name: str) -> None:
    prompt = read(FOLDER / "api" / f"{name}.json")
    for inputs in nodes_of(prompt, "KSampler"):
        set_to = [inputs[key] for key in ("sampler_name", "scheduler", "cfg", "denoise")]
        assert set_to == ["euler", "simple", 6.0, 1.0]
    steps = sorted(inputs["steps"] for inputs in nodes_of(prompt, "KSampler"))
    assert steps == ([20, 50] if name.endswith("draft_to_final") else [50] * len(steps))
    assert all(inputs["type"] == "cogvideox" for inputs in nodes_of(prompt, "CLIPLoader"))
    later = "1_5" in name
    fps = [inputs["fps"] for inputs in nodes_of(prompt, "CreateVideo")]
    assert set(fps) == ({16.0 if later else 8.0} if nodes_of(prompt, "KSampler") else set())
    for inputs in nodes_of(prompt, "SixBitEmptyLatent") + nodes_of(prompt, "SixBitImageToVideo"):
        if not name.startswith("reference"):
            size = (1360, 768, 81) if later else (720, 480, 49)
            assert (inputs["width"], inputs["height"], inputs["frames"]) == size
    samplers = nodes_of(prompt, "KSampler")
    assert len({inputs["seed"] for inputs in samplers}) <= 1  # before and after at one seed


def source(prompt: dict, inputs: dict, name: str) -> dict:
    """The node that an input comes from."""
    return prompt[inputs[name][0]]


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("text_to_video")])
def test_the_usual_graph_is_in_its_order(name: str) -> None:
    """Loader, delta cache, sampler, tiled decode, video, file: one of each."""
    prompt = read(FOLDER / "api" / f"{name}.json")
    (saved,) = nodes_of(prompt, "SaveVideo")
    video = source(prompt, saved, "video")
    decoded = source(prompt, video["inputs"], "images")
    sampled = source(prompt, decoded["inputs"], "samples")
    cached = source(prompt, sampled["inputs"], "model")
    loaded = source(prompt, cached["inputs"], "model")
    assert [node["class_type"] for node in (loaded, cached, sampled, decoded, video)] == [
        "SixBitLoadCogVideoX",
        "SixBitTemporalDeltaCache",
        "KSampler",
        "VAEDecodeTiled",
        "CreateVideo",
    ]
    assert len(nodes_of(prompt, "KSampler")) == len(nodes_of(prompt, "SixBitTemporalDeltaCache")) == 1
    assert cached["inputs"]["preset"] == "balanced" and loaded["inputs"]["weights"] == "6-bit"


def test_the_usual_graph_is_there_for_three_models() -> None:
    shipped = {name for name in NAMES if name.endswith("text_to_video")}
    assert shipped == {f"cogvideox_{model}_text_to_video" for model in ("2b", "5b", "1_5")}


def test_one_workflow_takes_the_preset_quality_throughout() -> None:
    """Loader, Apply DMPQ, delta cache, sampler, and the report of that run."""
    prompt = read(FOLDER / "api" / "cogvideox_5b_quality.json")
    (sampler,), (report,) = nodes_of(prompt, "KSampler"), nodes_of(prompt, "SixBitRunReport")
    cached = source(prompt, sampler, "model")
    routed = source(prompt, cached["inputs"], "model")
    assert source(prompt, routed["inputs"], "model")["class_type"] == "SixBitLoadCogVideoX"
    assert [cached["class_type"], routed["class_type"]] == ["SixBitTemporalDeltaCache", "SixBitApplyDMPQ"]
    assert [node["inputs"]["preset"] for node in (cached, routed)] == ["quality"] * 2
    assert source(prompt, report, "latent")["inputs"] is sampler and report["model"] == sampler["model"]


def table(text: str, first: str) -> dict[str, list[str]]:
    """Rows of the Markdown table whose first heading is this, by their first cell."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    start = next(n for n, cells in enumerate(rows) if cells[0] == first and len(cells) > 3)
    end = next(n for n in range(start, len(rows)) if len(rows[n]) == 1)
    return {cells[0]: cells[1:] for cells in rows[start + 2 : end]}


MODELS = {
    "2B": "cogvideox_2b_text_to_video",
    "5B": "cogvideox_5b_text_to_video",
    "5B-I2V": "cogvideox_5b_image_to_video",
    "1.5": "cogvideox_1_5_text_to_video",
    "1.5-I2V": "cogvideox_5b_image_to_video",
}


@pytest.mark.parametrize("model", MODELS)
def test_docs_and_a_note_name_the_files_of_every_model(model: str) -> None:
    """Transformer and VAE in the table of models, with the folders that they go to in the one above it."""
    text = (FOLDER.parent / "docs" / "comfyui.md").read_text(encoding="utf-8")
    repository, transformer, vae = table(text, "model")[model]
    note = (FOLDER / "api" / f"{MODELS[model]}.md").read_text(encoding="utf-8").splitlines()
    for file, folder in ((transformer, "diffusion_models"), (vae, "vae")):
        assert file.strip("`") and file.startswith("`") and repository.startswith("`zai-org/CogVideoX")
        (line,) = [line for line in note if line.startswith(f"- {file} ")]
        assert f"into `{folder}/`" in line
        assert any(f"`models/{folder}`" in row and "CogVideoX" in row for row in text.splitlines())
    (line,) = [line for line in note if line.startswith(f"- {transformer} ")]
    assert f"from {repository}" in line
    kinds = next(row for row in text.splitlines() if row.startswith("| CogVideoX transformer ("))
    assert model in kinds.partition("(")[2].partition(")")[0].split(", ")


def test_docs_list_every_workflow() -> None:
    text = (FOLDER.parent / "docs" / "comfyui.md").read_text(encoding="utf-8")
    short = {"cogvideox_5b_text_to_video": "cogvideox_5b_…", "cogvideox_1_5_text_to_video": "cogvideox_1_5_…"}
    assert not [name for name in NAMES if f"`{short.get(name, name)}`" not in text]
