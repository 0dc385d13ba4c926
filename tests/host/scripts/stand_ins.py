"""Import before anything of the host where not all of its requirements are installed: what is missing is
stood in for, so that modules which import it for other models and formats can be imported. Calling it does
nothing; a CogVideoX run calls none of it."""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types

NAMES = (
    "alembic",
    "av",
    "blake3",
    "comfyui_embedded_docs",
    "comfyui_frontend_package",
    "comfyui_workflow_templates",
    "kornia",
    "pydantic",
    "pydantic_settings",
    "simpleeval",
    "spandrel",
    "sqlalchemy",
    "torchaudio",
    "torchsde",
)


class _Kind(type):
    """Of classes whose every attribute is such a class."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing

    def __getitem__(cls, _: object) -> type:
        return cls


class _Thing(metaclass=_Kind):
    """A base class, a decorator, or a call whose result nobody reads."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *given: object, **_: object) -> object:
        return given[0] if given else self

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Thing


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Thing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name.partition(".")[0] not in self.names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in() -> tuple[str, ...]:
    """Stand in for what is missing, and return its names."""
    missing = tuple(name for name in NAMES if not _there(name))
    sys.meta_path.insert(0, _Finder(missing))
    return missing


def _there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
