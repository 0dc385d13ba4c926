"""Quality at equal bits and equal skips: `python benchmarks/quality.py --part NAME [--twin 1] [--workers N]`.

Each part leaves bars, rows and a summary in benchmarks/results/quality.json, and can be run alone, stopped,
and run again. Prompts are held out, CFG is 6, the noise seed is the number of the prompt; docs/quality.md
says what is measured. In this order, the first three once for a model:

    calibrate      predictor, sample inputs and GPTQ weights, TeaCache's polynomial, in WORK
    solve-routers  thresholds with which routers have just the asked-for bits (--bits)
    solve-skips    thresholds with which caches skip just the asked-for share (--share)
    weights        roundings of the weights
    routers        routers at --bits
    skips          skipping alone, at --share: the pack's policies, step caches of other papers, fewer steps
    cached         skipping on top of W4A8 at --share, with and without PDR
    rivals         W4A8 and W4A4 of other papers
    whole          the balanced preset and what it is made of
    accuracy       256 prompts read by the reference's evaluator
    picture        quality against cost, a curve for each method, from what stands in the results
"""

import argparse
import runpy
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "benchmarks" / "results" / "quality.json"
FOLLOWED, MODEL = 16, "reference"
PROMPTS = {
    "calibrate": 4,
    "solve-routers": 4,
    "solve-skips": 4,
    "weights": 64,
    "routers": 64,
    "skips": 64,
    "cached": 64,
    "rivals": 64,
    "whole": 64,
    "accuracy": 256,
    "picture": 0,
}


def main() -> int:
    """Run one part; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", required=True, choices=list(PROMPTS))
    parser.add_argument(
        "--twin", type=int, default=1, help="factor of the outliers put into the model: 1, 8, 32"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bits", type=float, default=6.0, help="asked-for average activation bits")
    parser.add_argument("--share", type=float, default=0.3, help="share of block evaluations to skip")
    parser.add_argument("--prompts", type=int, help="fewer than the bars ask for, to try it out")
    parser.add_argument(
        "--followed", type=int, default=FOLLOWED, help="prompts that have a trajectory error too"
    )
    parser.add_argument("--model", default=MODEL, help="reference, or a pipeline folder like it")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "out" / "quality", help="what parts make for parts"
    )
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the work, and the GPUs")
    parser.add_argument("--out", type=Path, default=PUBLISHED)
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.prompts = given.prompts or PROMPTS[given.part]
    asked, usual = (given.prompts, given.followed, given.model), (PROMPTS[given.part], FOLLOWED, MODEL)
    given.trial = asked != usual  # here, since a twin takes the model's place later
    if given.trial and given.part != "calibrate" and given.out.resolve() == PUBLISHED.resolve():
        parser.error(
            "--prompts, --followed and --model as given would put a trial in place of published rows; "
            "give it an --out of its own"
        )
    runpy.run_path(str(ROOT / "reference" / "launch.py"))["register_root"](ROOT)
    from quality_parts import run  # beside this file; it needs the checkout to be importable

    command = shlex.join(["python", "benchmarks/quality.py", *sys.argv[1:]])
    return run(given, [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]], command)


if __name__ == "__main__":
    sys.exit(main())
