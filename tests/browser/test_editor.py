"""What a user meets in ComfyUI's editor, in a headless browser. Pictures of it are left in out/browser."""

import json
from pathlib import Path

import pytest
from comfy_server import ROOT, Server

pytestmark = pytest.mark.slow
WORKFLOWS = sorted((ROOT / "workflows").glob("*.json"))
PAGES = sorted((ROOT / "web" / "docs").glob("*.md"))
OURS = {
    "6bit": "Load 6Bit CogVideoX",
    "nvfp4": "Apply DMPQ",
    "cogvideo": "Load 6Bit CogVideoX",
    "cache": "Temporal Delta Cache",
    "faster video": "Temporal Delta Cache",
}
PROMPT = "a red star is moving right on a white background"


def test_template_browser_lists_every_workflow(editor) -> None:
    listed = editor.browse_templates()
    editor.shot("templates")
    editor.page.keyboard.press("Escape")
    assert listed == [path.stem for path in WORKFLOWS]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_opens_whole(editor, path: Path) -> None:
    editor.open_template(path.stem)
    editor.shot(path.stem)
    graph = json.loads(path.read_text(encoding="utf-8"))
    assert editor.types() == sorted(node["type"] for node in graph["nodes"])
    assert editor.page.evaluate("app.graph.nodes.every(node => node.type in LiteGraph.registered_node_types)")
    assert editor.page.evaluate("app.canvas.ds.scale") > 0.6  # below, the editor draws no text


def test_a_changed_prompt_gives_a_clip_and_the_picture_of_its_run(editor, server: Server) -> None:
    editor.open_template("reference")
    editor.set_field("KSampler", "steps", 4)
    editor.set_field("SixBitEmptyLatent", "frames", 9)
    editor.text_field(PROMPT).fill("a blue circle is moving up on a white background")
    editor.queue.click()
    editor.page.wait_for_function("document.querySelector('video')?.readyState >= 2", timeout=300_000)
    clip = editor.page.locator("video").evaluate("clip => [clip.videoWidth, clip.videoHeight, clip.duration]")
    assert clip[:2] == [128, 128] and abs(clip[2] - 9 / 8) < 0.2
    report = "app.graph.nodes.find(node => node.type === 'SaveImage').imgs[0]"
    assert editor.page.evaluate(f"{report}.complete && {report}.naturalWidth") > 500
    editor.shot("run")
    (done,) = server.ask("history").values()
    assert done["prompt"][2]["4"]["inputs"]["text"].startswith("a blue circle")


def test_fields_that_clash_are_named_with_a_sentence(editor) -> None:
    editor.open_template("reference")
    editor.set_field("SixBitTemporalDeltaCache", "start", 0.9)
    editor.set_field("SixBitTemporalDeltaCache", "end", 0.2)
    editor.queue.click()
    errors = editor.errors()
    editor.shot("clashing_fields")
    assert sorted(errors) == [f"Temporal Delta Cache - {name}" for name in ("end", "preset", "start")]
    assert all(
        "start and end need 0 <= start < end <= 1, got 0.9 and 0.2" in line for line in errors.values()
    )


def test_a_model_that_is_not_there_is_named(editor) -> None:
    editor.open_template("cogvideox_quantize")
    editor.queue.click()
    errors = editor.errors()
    editor.shot("missing_model")
    assert all(
        "there is no model CogVideoX-5b/ in the diffusion_models folders" in e for e in errors.values()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_help_page_shows(editor, page: Path) -> None:
    editor.add(page.stem)
    editor.page.get_by_test_id("info-button").click()
    panel = editor.page.get_by_test_id("properties-panel")
    title = page.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    panel.locator("h1", has_text=title).wait_for()
    editor.shot(f"help_{page.stem}")
    assert panel.locator("img").evaluate_all("all => all.every(i => i.complete && i.naturalWidth > 0)")
    edge = "e => e.getBoundingClientRect().right"
    assert panel.locator("table, code").evaluate_all(f"all => Math.max(0, ...all.map({edge}))") <= 1600


@pytest.mark.parametrize("words", OURS)
def test_search_finds_a_node_by_plain_words(editor, words: str) -> None:
    editor.search(words).get_by_text(OURS[words]).first.wait_for()
    editor.shot(f"search_{words.replace(' ', '_')}")
    editor.page.keyboard.press("Escape")


def test_nodes_2_hides_what_is_advanced(editor) -> None:
    editor.change_setting("Comfy.VueNodes.Enabled", True)
    try:
        editor.open_template("reference")
        cache = editor.page.locator("[data-node-id]", has_text="Temporal Delta Cache")
        cache.get_by_text("preset", exact=True).wait_for()
        editor.shot("nodes_2")
        assert not cache.get_by_text("threshold", exact=True).is_visible()
    finally:
        editor.change_setting("Comfy.VueNodes.Enabled", False)
