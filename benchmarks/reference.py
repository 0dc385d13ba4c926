"""The published figures of the bundled reference: `python benchmarks/reference.py --part NAME [--workers N]`.

Each part leaves its bars and rows in benchmarks/results/reference.json and can be run alone, stopped, and run
again. Everything is at 50 DDIM steps, CFG 6, the model's own size, held-out prompts, noise seed = number of
the prompt. "DMPQ" is the balanced preset, PSNR is against full precision, same seed, and intervals are 95 %.

    accuracy    256 prompts read by the evaluator, in full precision and in DMPQ + TDC + PDR
    vae         rendered held-out clips through the VAE
    weights     bytes of the transformer in 16 bits over those that it keeps loaded
    dmpq        DMPQ without the cache, and every router at equal bits
    skip        DMPQ + TDC with and without PDR, and TDC alone, beside the same prompts unskipped
    cache       residuals that wait in INT8 and in NVFP4 beside the same as they come, W4A8 and full precision
    trajectory  trajectory errors of weights and routers (docs/method.md)
    repeat      the same run twice, bit for bit
"""

import argparse
import runpy
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PART_NAMES = ("accuracy", "vae", "weights", "dmpq", "skip", "cache", "trajectory", "repeat")


def main() -> int:
    """Run one part; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", required=True, choices=PART_NAMES)
    parser.add_argument("--prompts", type=int, help="fewer than the bar asks for, to try it out")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", default="reference", help="reference, or a pipeline folder like it")
    parser.add_argument("--predictor", type=Path, help="default: the bundled one")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the prompts")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "reference.json")
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    given = parser.parse_args()
    runpy.run_path(str(ROOT / "reference" / "launch.py"))["register_root"](ROOT)
    from reference_parts import run  # beside this file; it needs the checkout to be importable

    command = shlex.join(["python", "benchmarks/reference.py", *sys.argv[1:]])
    run(given, [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]], command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
