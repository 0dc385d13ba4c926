"""The host's own loop over the nodes, in a host that has lost one thing; then the fields of every node."""

from boot import ARGUMENTS, answer  # isort: split

import asyncio
import importlib
import os

import nodes


def lose(module: str, name: str) -> None:
    """Take away an attribute of a module, or of a class in it."""
    owner = importlib.import_module(module)
    *path, leaf = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    delattr(owner, leaf)


def fields(schema: object) -> dict[str, list]:
    return {field.id: list(getattr(field, "options", None) or []) for field in schema.inputs}


lose(*ARGUMENTS["lost"])
before = set(nodes.NODE_CLASS_MAPPINGS)
loaded = asyncio.run(nodes.load_custom_node(os.environ["SIXBIT_ROOT"]))
ours = {name: node for name, node in nodes.NODE_CLASS_MAPPINGS.items() if name not in before}
asked = {name: fields(node.GET_SCHEMA()) for name, node in ours.items()}
shown = [node.GET_NODE_INFO_V1()["name"] for node in ours.values()]
answer(loaded=loaded, fields=asked, shown=shown)
