"""Find the weights: a diffusers folder of a pipeline or a transformer, a shard index, or one file."""

import json
import re
from pathlib import Path

from .safetensors_file import CheckpointError, TensorInfo, check_regular, read_header

_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_PICKLE_LINE = "holds pickled weights, which can run code and are not read; get its .safetensors version"
_INDEX = "*.safetensors.index.json"

Collected = tuple[dict[str, TensorInfo], dict[str, str], dict[str, object] | None]


def collect(path: Path) -> Collected:
    """Tensors under their stored names, metadata and configuration of whatever `path` is.

    Raises:
        CheckpointError: nothing readable there; one line that says what to do.
    """
    try:
        return _collected(path)
    except OSError as error:  # a name too long, a folder that may not be read
        raise CheckpointError(
            f"cannot read {path}: {error.strerror or error}; give a path that can be read"
        ) from error


def _collected(path: Path) -> Collected:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a checkpoint file or folder")
    if path.is_dir():
        return _from_folder(path)
    if path.suffix.lower() in _PICKLES:
        raise CheckpointError(f"{path} {_PICKLE_LINE}")
    if path.name.endswith(_INDEX[1:]):
        return (*_from_index(path), _config(path.parent))
    shard = re.fullmatch(r"(.+)-\d{5}-of-(\d{5})\.safetensors", path.name)
    if shard and int(shard[2]) > 1:
        raise CheckpointError(f"{path} is one shard of {int(shard[2])}; give the folder it is in")
    infos, metadata = read_header(path)
    beside = path.name.startswith("diffusion_pytorch_model")
    return infos, metadata, _config(path.parent) if beside else None


def _from_folder(folder: Path) -> Collected:
    if (folder / "transformer").is_dir():
        folder = folder / "transformer"
    if indices := sorted(folder.glob(_INDEX)):
        return (*_from_index(indices[0]), _config(folder))
    files = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("."))
    if not files:
        pickled = next((p for p in sorted(folder.iterdir()) if p.suffix.lower() in _PICKLES), None)
        if pickled:
            raise CheckpointError(f"{pickled} {_PICKLE_LINE}")
        raise CheckpointError(
            f"{folder} holds no .safetensors file; give a folder with a CogVideoX transformer"
        )
    named = [p for p in files if p.name == "diffusion_pytorch_model.safetensors"]  # beside an .fp16. variant
    files = named or files
    if len(files) > 1:
        raise CheckpointError(
            f"{folder} holds {len(files)} .safetensors files and no index; "
            "give one of the files, or download the missing …safetensors.index.json"
        )
    return (*read_header(files[0]), _config(folder))


def _from_index(index: Path) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} is no shard index: it has no weight_map; download it again")
    infos: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        file = index.parent / Path(shard).name
        if not file.exists():
            raise CheckpointError(f"shard {file} is missing; download it")
        tensors, found = read_header(file)
        metadata = metadata or found
        for name in (n for n, s in weight_map.items() if s == shard):
            if name not in tensors:
                raise CheckpointError(f"{file}: {name} is missing, which {index.name} puts there")
            infos[name] = tensors[name]
    return infos, metadata


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file. Raises CheckpointError where it holds none."""
    try:
        check_regular(path)
        content = json.loads(path.read_text(encoding="utf-8"))
    except CheckpointError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no readable JSON; download it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object; download it again")
    return content


def _config(folder: Path) -> dict[str, object] | None:
    file = folder / "config.json"
    if not file.exists():
        return None
    return {key: value for key, value in read_json(file).items() if not key.startswith("_")}
