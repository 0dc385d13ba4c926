"""What the sources of the nodes reach of the host, by its modules and by names that its objects have."""

from boot import ARGUMENTS, answer, pack  # isort: split

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path

import torch

NODES = Path(ARGUMENTS["nodes"])
ROOTS = ("comfy", "comfy_api", "comfy_execution", "comfy_extras", "folder_paths", "node_helpers", "nodes")
ROOTS += ("server", "execution", "latent_preview", "comfy_config", "app", "utils", "main", "protocol")
PUBLIC = ("comfy_api.latest.",)  # the host's promise to nodes; `extension` leaves a node out without it
OURS = {  # names that happen to be the host's as well
    "parent": "of a path",
    "scheduler": "of `Clips`",
    "start": "of `DeltaCacheConfig`",
    "steps": "of `Clips`",
}
KEEPERS = (  # whose dicts we read and write
    "comfy.model_base",
    "comfy.model_patcher",
    "comfy.patcher_extension",
    "comfy.sampler_helpers",
    "comfy.samplers",
    "comfy.ldm.cogvideo.model",
)
OUR_KEYS = {
    "in_channels": "of diffusers' configuration",
    "out_channels": "of diffusers' configuration",
    "latent": "of our node in a prompt",
    "latent_shapes": "listed as a parameter",
}
CLASSES = (  # whose objects are handed to us, or that we derive from
    "comfy.model_patcher.ModelPatcher",
    "comfy.model_base.CogVideoX",
    "comfy.model_management.LoadedModel",
    "comfy.samplers.CFGGuider",
    "comfy.samplers.KSAMPLER",
    "comfy.samplers.KSampler",
    "comfy.model_sampling.ModelSamplingDiscrete",
    "comfy.latent_formats.LatentFormat",
    "comfy.patcher_extension.WrapperExecutor",
    "comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel",
    "comfy.ldm.cogvideo.model.CogVideoXBlock",
    "comfy.ldm.cogvideo.model.CogVideoXPatchEmbed",
    "comfy.ldm.cogvideo.vae.AutoencoderKLCogVideoX",
    "comfy.ops.CastWeightBiasOp",
    "comfy.supported_models.CogVideoX_T2V",
    "comfy.sd.CLIP",
    "comfy.sd.VAE",
    "comfy.utils.ProgressBar",
    "server.PromptServer",
    "comfy_execution.utils.ExecutionContext",
)


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(NODES.glob("*.py")):
        yield path.name, ast.parse(path.read_text(encoding="utf-8"))


def dotted(node: ast.AST, known: dict[str, str]) -> str | None:
    """The path of a chain of attributes that begins at a name which stands for something of the host."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute) and (before := dotted(node.value, known)) is not None:
        return f"{before}.{node.attr}"
    return None


def names_of_the_host(tree: ast.Module) -> dict[str, str]:
    """Local names that stand for something of the host, by import or by assignment."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                if root in ROOTS:
                    known[alias.asname or root] = alias.name if alias.asname else root
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] in ROOTS:
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        path = dotted(node.value, known) if isinstance(node, ast.Assign) else None
        if path is not None and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = path
    return known


def reached(tree: ast.Module) -> set[str]:
    """Longest paths into the host's modules, imports included."""
    known, found = names_of_the_host(tree), set()
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            if (path := dotted(node, known)) is not None and "." in path:
                found.add(path)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module.partition(".")[0] in ROOTS:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def split(path: str) -> tuple[str, str]:
    """A path as module and name in it, "" for the module itself."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        return ".".join(parts[:count]), ".".join(parts[count:])
    return "", path


def own_names(kind: type) -> set[str]:
    """Names that objects of a class have of the host: of its classes, and what their methods set."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ROOTS:
            continue
        found |= set(vars(base)) | set(getattr(base, "__annotations__", {}))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return {name for name in found if not name.startswith("__")}


def used() -> dict[str, set[str]]:
    """Attribute names in the sources -> files; those that getattr and hasattr ask for included."""
    found: dict[str, set[str]] = {}
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found.setdefault(node.attr, set()).add(file)
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("getattr", "hasattr", "setattr", "delattr")
                and isinstance(node.args[1], ast.Constant)
            ):
                found.setdefault(node.args[1].value, set()).add(file)
    return found


def keys(tree: ast.Module) -> set[str]:
    """Constant keys that dicts are read, written or searched with."""
    found: set[str] = set()
    for node in ast.walk(tree):
        asked = []
        if isinstance(node, ast.Subscript):
            asked = [node.slice]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            asked = [node.left]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            asked = [node.args[0]] if node.func.attr in ("get", "pop", "setdefault") else []
        found |= {key.value for key in asked if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return found


def unlisted_paths(listed: set[tuple[str, str]]) -> list[str]:
    """What is reached of the host's modules, beside what is listed and what is public."""
    paths: dict[str, set[str]] = {}
    for file, tree in sources():
        for path in reached(tree):
            paths.setdefault(path, set()).add(file)
    found = []
    for path, files in sorted(paths.items()):
        module, name = split(path)
        known = [other for where, other in listed if where == module]
        covered = any(f"{name}.".startswith(f"{k}.") or f"{k}.".startswith(f"{name}.") for k in known)
        if name and not covered and not f"{path}.".startswith(PUBLIC):
            found.append(f"{path} ({', '.join(sorted(files))})")
    return found


def unlisted_names(listed: set[tuple[str, str]]) -> list[str]:
    """Names in the sources that objects of the host have. Those that tensors and modules of torch have, too,
    cannot be told from them, and are not looked for."""
    leaves = {part for _, name in listed for part in name.split(".")}
    of_the_host: dict[str, list[str]] = {}
    for path in CLASSES:
        module, _, name = path.rpartition(".")
        for attribute in own_names(getattr(importlib.import_module(module), name)):
            of_the_host.setdefault(attribute, []).append(name)
    known = leaves | set(dir(torch.Tensor)) | set(dir(torch.nn.Module)) | set(OURS)
    return [
        f"{name} of {', '.join(of_the_host[name])} ({', '.join(sorted(files))})"
        for name, files in sorted(used().items())
        if name in of_the_host and name not in known
    ]


def unlisted_keys(listed: set[tuple[str, str]]) -> list[str]:
    theirs: set[str] = set()
    for module in KEEPERS:
        theirs |= keys(ast.parse(inspect.getsource(importlib.import_module(module))))
    known = {name.strip('"') for _, name in listed} | set(OUR_KEYS)
    ours = {key for _, tree in sources() for key in keys(tree)}
    return sorted((ours & theirs) - known)


def main() -> None:
    contract = pack("nodes.host_contract")
    listed = {(seam.module, seam.name) for seam in contract.EVERY_SEAM}
    answer(paths=unlisted_paths(listed), names=unlisted_names(listed), keys=unlisted_keys(listed))


main()
