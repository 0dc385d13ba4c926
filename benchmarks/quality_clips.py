"""What `quality.py` has sampled, in WORK/clips, so that no part samples again what another has.

A file is a clip's latents, and in its metadata what its run told and, where it was followed, its trajectory
error. Its name is a digest of all that decides them: model, calibration, machine, versions, code, caption,
steps, seed, and the method's settings without its name. Processes may share the folder: each file appears
whole.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import sixbit_diffusion
import torch
from methods import Method
from parts import Bench
from sixbit_diffusion.engine.machine import versions
from sixbit_diffusion.engine.pipeline import TextEmbeds
from sixbit_diffusion.engine.rows import Row, digest
from sixbit_diffusion.engine.sample import ClipSpec, sample
from sixbit_diffusion.engine.trajectory import Recording
from sixbit_diffusion.sixbit_core.errors import CheckpointError
from sixbit_diffusion.sixbit_core.safetensors_file import StreamWriter, read_header, read_tensor

FULL = "full precision"
PACKAGES = (
    "engine",
    "kernels",
    "sixbit_core",
)  # of the pack, and modules beside this one, that decide a clip
MODULES = (
    "methods",
    "parts",
    "quality_clips",
    "quality_measure",
    "quality_methods",
    "rivals",
    "step_caches",
)
Recorded = Callable[[], Recording]  # full precision's run, made where it is first asked for


def full_latents(
    bench: Bench, clip: ClipSpec, embeds: TextEmbeds, recorded: Recorded | None = None
) -> torch.Tensor:
    """Latents of a clip in full precision, sampled once; of `recorded` where there will be a recording."""
    path = _path(bench, clip, FULL)
    kept = _read(path, bench)
    if kept is not None:
        return kept[0]
    latents = sample(bench.model, None, clip, embeds).latents if recorded is None else recorded().latents
    _write(path, latents, {})
    return latents


def sampled(bench: Bench, method: Method, clip: ClipSpec, embeds: TextEmbeds) -> tuple[torch.Tensor, Row]:
    """Latents of a clip by a method and what its run told, sampled once."""
    path = _path(bench, clip, method.key(bench, clip.seed))
    kept = _read(path, bench)
    if kept is not None:
        return kept[0], {name: value for name, value in kept[1].items() if name != "error"}
    latents, row = method.sample(bench, clip, embeds)
    _write(path, latents, row)
    return latents, row


def followed(bench: Bench, method: Method, clip: ClipSpec, recorded: Recorded) -> float | None:
    """A method's trajectory error, followed once; kept beside its clip."""
    path = _path(bench, clip, method.key(bench, clip.seed))
    kept = _read(path, bench)
    if kept is not None and "error" in kept[1]:
        return kept[1]["error"]
    error = method.follow(bench, recorded())
    if kept is not None:
        _write(path, kept[0], {**kept[1], "error": error})
    return error


def _path(bench: Bench, clip: ClipSpec, key: str) -> Path:
    return bench.given.work / "clips" / f"{digest(_told(bench), repr(clip), key)}.safetensors"


def code_digest(pack: Path, benchmarks: Path) -> str:
    """Of the sources that decide a clip, by their names and texts."""
    files = {f"{name}.py": benchmarks / f"{name}.py" for name in MODULES}
    for package in PACKAGES:
        files |= {path.relative_to(pack).as_posix(): path for path in (pack / package).rglob("*.py")}
    return digest(*(f"{name}\n{files[name].read_text(encoding='utf-8')}" for name in sorted(files)))


_versions = cache(versions)
_CODE = code_digest(Path(sixbit_diffusion.__file__).parent, Path(__file__).resolve().parent)  # as it began


def _told(bench: Bench) -> str:
    """All that decides a clip, besides what it is asked to be and the method."""
    machine = f"{bench.machine.device.type}: {bench.machine.name}"
    return repr((bench.facts.checkpoint.fingerprint, bench.given.tied, machine, _versions(), _CODE))


def _read(path: Path, bench: Bench) -> tuple[torch.Tensor, Row] | None:
    if not path.is_file():
        return None
    try:
        infos, metadata = read_header(path)
        return read_tensor(infos["latents"]).to(bench.model.device), json.loads(metadata["row"])
    except (CheckpointError, KeyError, ValueError):
        return None  # damaged: it is made again


def _write(path: Path, latents: torch.Tensor, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    latents = latents.cpu().contiguous()
    entry = ("latents", latents.dtype, tuple(latents.shape))
    with StreamWriter(path, [entry], {"row": json.dumps(row, allow_nan=False)}) as writer:
        writer.write("latents", latents)
