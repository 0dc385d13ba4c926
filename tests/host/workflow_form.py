"""Write the editor's form of the workflows from their API form, so that the two cannot part.

workflows/api/NAME.json is the source (node ids, inputs, links) and NAME.md the note shown beside the graph;
workflows/NAME.json is what the template browser opens. With a ComfyUI that has this pack running:

    python tests/host/workflow_form.py http://127.0.0.1:8188
"""

import json
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
API = ROOT / "workflows" / "api"
_SLOT, _FIELD, _TEXT, _MARGIN = 20, 24, 110, 30  # pixels down: a socket, a field, one of several lines
_TITLE, _GAP, _CHOSEN = 30, 20, 160  # the last is the picture that Load Image shows
_SHOWN = 100  # height, beyond its width, of a node that ends the graph: a square clip or picture fits in
_COLUMNS = (("Models", 380), ("Settings", 320), ("Sampling", 280), ("Result", 440))  # and their widths
_TALLEST, _NARROW = 1230, 270  # a taller column is broken into narrow ones, side by side in its frame
_FRAME = {"color": "#3f789e", "font_size": 24, "flags": {}}


def specs(schema: dict[str, Any]) -> Iterator[tuple[str, list, bool]]:
    """(name, specification, whether optional) of the inputs of a node of /object_info, in order."""
    for part in ("required", "optional"):
        for name, spec in schema["input"].get(part, {}).items():
            yield name, spec, part == "optional"


def kind_of(spec: list) -> str:
    return "COMBO" if isinstance(spec[0], list) else spec[0]


def is_widget(spec: list) -> bool:
    """Whether the editor shows a field for it, not only a socket."""
    if len(spec) > 1 and spec[1].get("forceInput"):
        return False
    return kind_of(spec) in ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", "COMFY_DYNAMICCOMBO_V3")


def default_of(spec: list) -> Any:
    options = spec[1] if len(spec) > 1 else {}
    if kind_of(spec) == "COMFY_DYNAMICCOMBO_V3":
        return options["options"][0]["key"]
    if kind_of(spec) == "COMBO":
        choices = spec[0] if isinstance(spec[0], list) else options["options"]
        return options.get("default", choices[0] if choices else "")
    return options.get("default", {"INT": 0, "FLOAT": 0.0, "STRING": "", "BOOLEAN": False}[kind_of(spec)])


def fields(name: str, spec: list, value: Any) -> Iterator[tuple[str | None, str, Any]]:
    """(name, type, value) of the fields an input has in the editor; without a name where only the editor
    knows it: what becomes of a seed after a run, the button beside an image."""
    yield name, kind_of(spec), value
    options = spec[1] if len(spec) > 1 else {}
    if options.get("control_after_generate", name in ("seed", "noise_seed") and kind_of(spec) == "INT"):
        yield None, "", "fixed"
    if options.get("image_upload"):
        yield None, "", "image"
    if kind_of(spec) == "COMFY_DYNAMICCOMBO_V3":
        chosen = next(option for option in options["options"] if option["key"] == value)
        for inner, inner_spec in chosen["inputs"].get("required", {}).items():
            yield from fields(f"{name}.{inner}", inner_spec, default_of(inner_spec))


def all_fields(schema: dict[str, Any], given: dict[str, Any]) -> list[tuple[str | None, str, Any]]:
    """`fields` of all inputs of a node, in order; a new choice of choices not given is left to the editor."""
    found: list[tuple[str | None, str, Any]] = []
    for name, spec, optional in specs(schema):
        left = optional and kind_of(spec) == "COMFY_DYNAMICCOMBO_V3" and name not in given
        if is_widget(spec) and not isinstance(given.get(name), list) and not left:
            found += fields(name, spec, given.get(name, default_of(spec)))
    return found


def render(name: str, prompt: dict[str, Any], note: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """The editor's form.

    Args:
        name: of the workflow.
        prompt: its API form.
        note: Markdown shown at its left.
        schemas: /object_info of a host.
    """
    links: list[list] = []
    nodes = [
        _node(int(key), entry, prompt, schemas, links)
        for key, entry in sorted(prompt.items(), key=lambda item: int(item[0]))
    ]
    for node in nodes:
        for slot, output in enumerate(node["outputs"]):
            output["links"] = [link[0] for link in links if link[1:3] == [node["id"], slot]] or None
    groups, bottom = _place(nodes, list(prompt))
    last = max(node["id"] for node in nodes) + 1
    nodes.append(_note(last, note, bottom))
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"sixbit-diffusion/{name}")),
        "revision": 0,
        "last_node_id": last,
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": groups,
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def _node(key: int, entry: dict, prompt: dict, schemas: dict, links: list[list]) -> dict[str, Any]:
    schema = schemas[entry["class_type"]]
    inputs, values = [], []
    for name, spec, _ in specs(schema):
        given = entry["inputs"].get(name)
        if isinstance(given, list):
            source = schemas[prompt[given[0]]["class_type"]]
            links.append(
                [len(links) + 1, int(given[0]), given[1], key, len(inputs), source["output"][given[1]]]
            )
            inputs.append({"name": name, "type": kind_of(spec), "link": len(links)})
        elif not is_widget(spec):
            inputs.append({"name": name, "type": kind_of(spec), "link": None})
    for name, kind, value in all_fields(schema, entry["inputs"]):
        values.append(value)
        if name:
            inputs.append({"name": name, "type": kind, "widget": {"name": name}, "link": None})
    outputs = [
        {"name": label, "type": kind, "links": None}
        for label, kind in zip(schema["output_name"], schema["output"], strict=True)
    ]
    sockets = sum("widget" not in entry for entry in inputs)
    options = [spec[1] for _, spec, _ in specs(schema) if len(spec) > 1]
    height = _MARGIN + _SLOT * max(sockets, len(outputs)) + _FIELD * len(values)
    height += _TEXT * sum(bool(option.get("multiline")) for option in options)
    height += _CHOSEN * sum(bool(option.get("image_upload")) for option in options)
    return {
        "id": key,
        "type": entry["class_type"],
        **entry.get("_meta", {}),
        "pos": [0, 0],
        "size": [0, height],
        "flags": {},
        "order": 0,
        "mode": 0,
        "inputs": inputs,
        "outputs": outputs,
        "properties": {"Node name for S&R": entry["class_type"]},
        "widgets_values": values,
    }


def _place(nodes: list[dict], order: list[str]) -> tuple[list[dict], int]:
    """Put nodes into `_COLUMNS`, one under the other as the API form lists them; tall ones side by side.

    Args:
        order: of the keys, which is one that they can run in.

    Returns:
        A frame for each column, and where the first one ends.
    """
    left, bottoms, frames = 0, [], []
    for (title, width), column in zip(_COLUMNS, _columns(nodes, order), strict=True):
        parts = [column]
        if _height(column) > _TALLEST:
            for node in column:
                if node["size"][1] == _SHOWN + width:
                    node["size"][1] = _SHOWN + _NARROW
            parts, width = _broken(column), _NARROW
        for number, part in enumerate(parts):
            top = 0
            for node in part:
                node["pos"], node["size"][0] = [left + number * (width + _GAP), top], width
                top += node["size"][1] + _GAP + _TITLE
        bottoms.append(max(map(_height, parts)))
        if column:
            across = len(parts) * (width + _GAP) - _GAP
            bounding = [left - _GAP, -3 * _TITLE, across + 2 * _GAP, bottoms[-1] + 2 * _TITLE]
            frames.append({"title": title, "bounding": bounding, **_FRAME})
            left += across + 3 * _GAP
    return frames, bottoms[0]


def _height(column: list[dict]) -> int:
    return sum(node["size"][1] + _GAP + _TITLE for node in column)


def _broken(column: list[dict]) -> list[list[dict]]:
    """A column in two, in its order, as even as they get."""
    cuts = range(1, len(column))
    cut = min(cuts, key=lambda n: max(_height(column[:n]), _height(column[n:])), default=len(column))
    return [column[:cut], column[cut:]]


def _columns(nodes: list[dict], order: list[str]) -> list[list[dict]]:
    """Nodes by column: without a source, before a sampler, up to the decoder, after it."""
    by_key = {str(node["id"]): node for node in nodes}
    senders = {link: node for node in nodes for entry in node["outputs"] for link in entry["links"] or ()}
    columns: list[list[dict]] = [[] for _ in _COLUMNS]
    found: dict[int, int] = {}
    for position, key in enumerate(order):
        node = by_key[key]
        node["order"] = position
        sources = [senders[entry["link"]] for entry in node["inputs"] if entry["link"] is not None]
        before = max((found[source["id"]] for source in sources), default=-1)
        decoded = any(source["type"].startswith("VAEDecode") for source in sources)
        ends = sources and not any(entry["links"] for entry in node["outputs"])
        if not sources:
            column = 0
        elif decoded or node["type"].startswith("VAEDecode") or (ends and before < 2):
            column = 3
        else:
            column = max(before, 2 if node["type"] == "KSampler" else 1)
        if ends:
            node["size"][1] = _SHOWN + _COLUMNS[column][1]
        found[node["id"]] = column
        columns[column].append(node)
    return columns


def _note(key: int, text: str, top: int) -> dict[str, Any]:
    lines = sum(1 + len(line) // 75 for line in text.splitlines())
    return {
        "id": key,
        "type": "MarkdownNote",
        "pos": [0, top + _TITLE],
        "size": [_COLUMNS[0][1], 60 + 15 * lines],
        "flags": {},
        "order": key,
        "mode": 0,
        "inputs": [],
        "outputs": [],
        "properties": {},
        "widgets_values": [text],
    }


def render_file(path: Path, schemas: dict[str, Any]) -> dict[str, Any]:
    """The editor's form of workflows/api/NAME.json."""
    prompt = json.loads(path.read_text(encoding="utf-8"))
    note = path.with_suffix(".md").read_text(encoding="utf-8")
    return render(path.stem, prompt, note, schemas)


def main(url: str) -> None:
    with urllib.request.urlopen(f"{url}/object_info", timeout=60) as answer:
        schemas = json.load(answer)
    for path in sorted(API.glob("*.json")):
        document = render_file(path, schemas)
        target = ROOT / "workflows" / path.name
        target.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
