"""Predictions and whole runs of checkpoints, against what stands in their case files."""

from boot import ARGUMENTS, answer, pack  # isort: split

import comfy.model_management
import torch
from safetensors.torch import load_file

import nodes


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def main() -> None:
    checkpoint = pack("sixbit_core.checkpoint")
    contract, scales = pack("nodes.host_contract"), pack("nodes.scales")
    results = {}
    for name, jobs in ARGUMENTS["variants"].items():
        opened = checkpoint.open_checkpoint(jobs["folder"])
        model = contract.load_or_plain(opened, scales.scales_of(opened), quantize=False)
        comfy.model_management.load_models_gpu([model])
        results[name] = {"prediction": [], "latents": []}
        for job in jobs["jobs"]:
            case = load_file(job["path"])
            step = torch.full((2,), 501.0)
            ofs = torch.full((2,), 2.0) if model.model.diffusion_model.ofs_proj_dim else None
            found = model.model.diffusion_model(case["x"], step, case["texts"], ofs=ofs)
            results[name]["prediction"].append(relative(found, case["prediction"]))
            if not job["steps"]:
                continue
            extra = {"concat_latent_image": case["image"]} if "image" in case else {}
            negative, positive = ([[case["texts"][row : row + 1], dict(extra)]] for row in (0, 1))
            latent = {"samples": torch.zeros_like(case["latents"])}
            out = nodes.common_ksampler(
                model, job["seed"], job["steps"], 6.0, "euler", "simple", positive, negative, latent
            )[0]["samples"]
            results[name]["latents"].append(relative(out, case["latents"]))
    answer(results=results)


main()
