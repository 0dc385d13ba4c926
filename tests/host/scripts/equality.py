"""Predictions and whole runs through the nodes, against what stands in their case files."""

from boot import ARGUMENTS, answer, pack  # isort: split

import sys
from pathlib import Path

import comfy.model_management
import folder_paths
import torch
from safetensors.torch import load_file

import nodes

folder_paths.folder_names_and_paths["diffusion_models"] = ([ARGUMENTS["folder"]], {".safetensors"})


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape, f"{tuple(found.shape)}, not {tuple(expected.shape)}"
    return float((found - expected).norm() / expected.norm())


def predict(model: object, path: str) -> float:
    case = load_file(path)
    network = model.model.diffusion_model
    step = torch.full((2,), 501.0)
    ofs = torch.full((2,), 2.0) if network.ofs_proj_dim else None
    return relative(network(case["x"], step, case["texts"], ofs=ofs), case["prediction"])


def sample(model: object, vae: object, run: dict) -> float:
    case = load_file(run["path"])
    height, width = run["size"]
    negative, positive = ([[case["texts"][row : row + 1], {}]] for row in (0, 1))
    if "image" in case:
        node = pack("nodes.image_to_video").SixBitImageToVideo
        given = (positive, negative, vae, case["image"], width, height, run["frames"])
        positive, negative, latent = node.execute(*given).args
    else:
        latent = pack("nodes.latent").SixBitEmptyLatent.execute(model, width, height, run["frames"]).args[0]
    out = nodes.KSampler().sample(
        model, run["seed"], run["steps"], 6.0, "euler", "simple", positive, negative, latent
    )
    return relative(out[0]["samples"], case["latents"])


@torch.inference_mode()
def main() -> None:
    results = {}
    for name, jobs in ARGUMENTS["variants"].items():
        model = pack("nodes.load").SixBitLoadCogVideoX.execute(f"{name}/", "as stored").args[0]
        vae = pack("nodes.parts").load_vae(Path(ARGUMENTS["folder"]) / name)
        comfy.model_management.load_models_gpu([model])
        results[name] = {
            "predictions": [predict(model, path) for path in jobs["predictions"]],
            "runs": [sample(model, vae, run) for run in jobs["runs"]],
        }
        print(name, results[name], file=sys.stderr)
    answer(results=results)


main()
