"""Quality at equal bits and equal skips: `python benchmarks/quality.py --part NAME [--twin 1] [--workers N]`.

Each part leaves bars, rows and a summary in benchmarks/results/quality.json, and can be run alone, stopped,
and run again. Several parts, or `--part all`, run in one go: what is there already is left, a part that fails
stops no other, and --until SECONDS later nothing more is begun. Prompts are held out, CFG is 6, the noise
seed is the number of the prompt; docs/quality.md says what is measured. In this order, the first three once
for a model:

    calibrate      predictor, sample inputs and GPTQ weights, TeaCache's polynomial, in WORK
    solve-skips    thresholds with which caches skip just the asked-for share (--share)
    solve-routers  thresholds with which routers have just the asked-for bits (--bits)
    weights        roundings of the weights
    skips          skipping alone, at --share: the pack's policies, step caches of other papers, fewer steps
    routers        routers at --bits
    cached         skipping on top of W4A8 at --share, with and without PDR
    accuracy       256 prompts read by the reference's evaluator
    whole          the balanced preset and what it is made of
    rivals         W4A8 and W4A4 of other papers
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
ALL = "all"
PROMPTS = {  # of every part, in the order of their worth
    "calibrate": 4,
    "solve-skips": 4,
    "solve-routers": 4,
    "weights": 64,
    "skips": 64,
    "routers": 64,
    "cached": 64,
    "accuracy": 256,
    "whole": 64,
    "rivals": 64,
    "picture": 0,
}


def main() -> int:
    """Run what was asked for; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", required=True, nargs="+", choices=[ALL, *PROMPTS], metavar="NAME")
    parser.add_argument(
        "--twin", type=int, default=1, help="factor of the outliers put into the model: 1, 8, 32"
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--bits", type=float, default=6.0, help="asked-for average activation bits")
    parser.add_argument("--share", type=float, default=0.46, help="share of block evaluations to skip")
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
    parser.add_argument(
        "--until", type=float, help="of several parts: seconds after which nothing more is begun"
    )
    parser.add_argument("--out", type=Path, default=PUBLISHED)
    parser.add_argument("--shard", help=argparse.SUPPRESS)
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = [name for name in PROMPTS if ALL in given.part or name in given.part]
    each = [of_part(given, name) for name in names]
    writing = [one for one in each if one.part not in ("calibrate", "picture")]
    if any(one.trial for one in writing) and given.out.resolve() == PUBLISHED.resolve():
        parser.error(
            "--prompts, --followed and --model as given would put a trial in place of published rows; "
            "give it an --out of its own"
        )
    runpy.run_path(str(ROOT / "reference" / "launch.py"))["register_root"](ROOT)
    command = shlex.join(["python", "benchmarks/quality.py", *sys.argv[1:]])
    program = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    # beside this file; they need the checkout to be importable
    if given.claims is not None:
        from quality_pool import take_work

        return take_work(each, command)
    if len(each) > 1:
        from quality_watch import run_parts

        return run_parts(each, program, command)
    from quality_parts import run

    return run(each[0], program, command)


def of_part(given: argparse.Namespace, name: str) -> argparse.Namespace:
    """The command line as one part has it, with at most as many prompts as its bars ask for."""
    most = PROMPTS[name]
    prompts = min(given.prompts or most, most)
    usual = (prompts, given.followed, given.model) == (most, FOLLOWED, MODEL)
    # `trial` is settled here, since a twin takes the model's place later
    return argparse.Namespace(**{**vars(given), "part": name, "prompts": prompts, "trial": not usual})


if __name__ == "__main__":
    sys.exit(main())
