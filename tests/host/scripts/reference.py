"""The reference through the nodes: text encoder, VAE, a run, against diffusers' tensors in a case file."""

from boot import ARGUMENTS, answer, pack  # isort: split

import torch
from safetensors.torch import load_file

import nodes

LOAD, FILES = pack("nodes.load"), pack("nodes.files")
NAME = "bundled reference"


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def main() -> None:
    case = load_file(ARGUMENTS["case"])
    results = {}
    for weights in ("as stored", "6-bit"):
        model, clip, vae = pack("nodes.reference").SixBitLoadReference.execute(weights).args
        tokens = [clip.tokenize(text) for text in (ARGUMENTS["prompt"], "")]
        positive, negative = (clip.encode_from_tokens_scheduled(found) for found in tokens)
        empty = pack("nodes.latent").SixBitEmptyLatent.execute(model, 128, 128, 33).args[0]

        def sampled(model, conds=(positive, negative), empty=empty) -> torch.Tensor:
            return nodes.common_ksampler(model, 0, ARGUMENTS["steps"], 6.0, "euler", "simple", *conds, empty)[
                0
            ]["samples"]

        latents = sampled(model)
        by_name = LOAD.SixBitLoadCogVideoX.execute(NAME, weights).args[0]
        results[weights] = {
            "text": relative(positive[0][0], case["positive"]),
            "negative": relative(negative[0][0], case["negative"]),
            "latents": relative(latents, case[f"latents {weights}"]),
            "frames": float((vae.decode(case["decoded latents"])[0] - case["frames"]).abs().max()),
            "offered": NAME in LOAD.list_models(LOAD.model_roots())
            and LOAD.SixBitLoadCogVideoX.validate_inputs(NAME, weights),
            "by name": relative(sampled(by_name), latents),
            "bytes": by_name.model_size(),
            "copied": FILES.quantized_copy(FILES.find_reference()).exists(),
        }
    answer(**results)


main()
