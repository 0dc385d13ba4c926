"""Queue a workflow on a running ComfyUI, wait for it, and print what it made. Needs nothing but Python.

    python workflows/api/queue_workflow.py reference 4.text="a blue ring is moving left" 7.seed=3

What follows the name are inputs to change, NODE.INPUT=VALUE: node numbers and names as in the JSON file.
"""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def ask(server: str, path: str, body: dict | None = None) -> Any:
    """The JSON that the server answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"the server refused it: {refusal(json.loads(error.read()))}")
    except urllib.error.URLError as error:
        sys.exit(f"no ComfyUI at {server} ({error.reason}); start it, or give its address with --server")


def refusal(answer: dict) -> str:
    """What is wrong on which node, in one line."""
    found = [
        f"node {key}: {error['details'] or error['message']}"
        for key, node in (answer.get("node_errors") or {}).items()
        for error in node["errors"]
    ]
    return "; ".join(found) or answer["error"]["message"]


def changed(prompt: dict, changes: list[str]) -> dict:
    """The prompt with NODE.INPUT=VALUE set, each value in the type of the one it replaces."""
    for change in changes:
        place, _, text = change.partition("=")
        node, _, name = place.partition(".")
        if node not in prompt or name not in prompt[node]["inputs"]:
            sys.exit(f"there is no input {place}; look into the workflow's file")
        before = prompt[node]["inputs"][name]
        try:
            prompt[node]["inputs"][name] = text if isinstance(before, str) else json.loads(text)
        except ValueError:
            sys.exit(f"{place} is like {before!r}, got {text!r}")
    return prompt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workflow", help="name of a file of this folder, or a path")
    parser.add_argument("changes", nargs="*", metavar="NODE.INPUT=VALUE")
    parser.add_argument("--server", default="http://127.0.0.1:8188")
    given = parser.parse_args()
    path = Path(given.workflow)
    path = path if path.suffix == ".json" else Path(__file__).resolve().parent / f"{path.name}.json"
    if not path.is_file():
        sys.exit(f"there is no workflow {path}")
    prompt = changed(json.loads(path.read_text(encoding="utf-8")), given.changes)
    key = ask(given.server, "prompt", {"prompt": prompt})["prompt_id"]
    while not (done := ask(given.server, f"history/{key}")):
        time.sleep(1)
    status, outputs = done[key]["status"], done[key]["outputs"]
    if status["status_str"] != "success":
        failed = [said for event, said in status["messages"] if event == "execution_error"]
        sys.exit(f"it failed: {failed[0]['exception_message'].strip() if failed else 'interrupted'}")
    for output in outputs.values():
        for item in (item for items in output.values() if isinstance(items, list) for item in items):
            if isinstance(item, dict) and "filename" in item:
                print(
                    Path(item.get("type", "output"), item.get("subfolder", ""), item["filename"]).as_posix()
                )
            elif isinstance(item, str):
                print(item)


if __name__ == "__main__":
    main()
