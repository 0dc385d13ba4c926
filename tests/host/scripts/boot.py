"""Imported first by every script inside the host: a CPU host, if not asked for otherwise, and the pack loaded
as a custom node is."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import comfy.cli_args

ARGUMENTS = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
comfy.cli_args.args.cpu = ARGUMENTS.get("cpu", True)
_ROOT = Path(os.environ.get("SIXBIT_ROOT") or Path(__file__).resolve().parents[3])
_NAME = str(_ROOT).replace(".", "_x_")  # the host names a pack by its path


class _Blocker:
    """Makes libraries as if not installed."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def block(*names: str) -> object:
    """Make libraries as if not installed, until the result is taken out of sys.meta_path."""
    for loaded in [name for name in sys.modules if name.partition(".")[0] in names]:
        del sys.modules[loaded]
    sys.meta_path.insert(0, _Blocker(names))
    return sys.meta_path[0]


block(*ARGUMENTS.get("absent", ()))


def load_pack() -> str:
    """Load the pack the way the host does and return its module name."""
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            _NAME, _ROOT / "__init__.py", submodule_search_locations=[str(_ROOT)]
        )
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_NAME])
    return _NAME


def pack(module: str) -> object:
    """A module of the pack, e.g. "nodes.load"."""
    return importlib.import_module(f"{load_pack()}.{module}")


def answer(**values: object) -> None:
    """Print the result as the last line."""
    print(json.dumps(values), flush=True)
