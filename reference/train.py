"""Command line of the trainer: `python reference/launch.py STAGE --work DIR`, stages in this order:

tokenizer     write reference/pipeline/tokenizer (committed; only after a change of the captions)
vae           train the autoencoder                       -> DIR/vae
encode        turn training clips into latents            -> DIR/latents.safetensors
transformer   train the denoiser and the text encoder     -> DIR/state.safetensors; resumes
export        write the pipeline                          -> FOLDER
preview       fit the colours of live previews            -> reference/preview.json
sample        score held-out prompts on the pipeline      -> OUT/sample.json, OUT/sample.png
evaluator     score the evaluator itself on rendered clips

A pipeline is trained on by `encode --vae FOLDER/vae` and `transformer --from FOLDER`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

BEGIN = time.monotonic()
Stage = Callable[[argparse.Namespace, torch.device], None]


def _tokenizer(args: argparse.Namespace, device: torch.device) -> None:
    from .build_tokenizer import build_tokenizer
    from .tokenizer import FOLDER

    build_tokenizer(FOLDER)


def _vae(args: argparse.Namespace, device: torch.device) -> None:
    from .train_vae import train_vae

    train_vae(args.work, args.seconds, device, args.seed, args.tiny)


def _encode(args: argparse.Namespace, device: torch.device) -> None:
    from .train_vae import EncodeSettings, encode_clips
    from .world import PAIR_SHARE

    pairs = PAIR_SHARE if args.pair_share is None else args.pair_share
    clips = 50000 if args.clips is None else args.clips
    settings = EncodeSettings(clips, args.seconds, args.vae, pairs, args.seed + 1, args.tiny)
    encode_clips(args.work, settings, device)


def _transformer(args: argparse.Namespace, device: torch.device) -> None:
    from .train_transformer import TransformerSettings, train_transformer

    settings = TransformerSettings(
        args.total_seconds,
        args.stop_after,
        batch=args.batch,
        rate=args.rate,
        seed=args.seed,
        tiny=args.tiny,
        graph=not args.no_graph,
        start=args.start,
        pair_share=args.pair_share,
        spin_share=args.spin_share,
        deep=args.deep,
    )
    train_transformer(args.work, settings, device, BEGIN)


def _export(args: argparse.Namespace, device: torch.device) -> None:
    from .export import export_pipeline

    size = export_pipeline(args.work, args.folder, args.tiny, args.deep)
    print(f"export: {size / 1e6:.1f} MB in {args.folder}")


def _preview(args: argparse.Namespace, device: torch.device) -> None:
    from .preview import write_preview

    explained = write_preview(args.folder, 32 if args.clips is None else args.clips, args.seed)
    print(f"preview: {100 * explained:.1f} % of the colours' variance on held-out clips")


def _sample(args: argparse.Namespace, device: torch.device) -> None:
    from .sample import evaluate_pipeline

    evaluate_pipeline(args.folder, args.prompts, device, args.out, args.steps)


def _evaluator(args: argparse.Namespace, device: torch.device) -> None:
    from .check_evaluator import print_check

    print_check(500 if args.clips is None else args.clips)


STAGES: dict[str, Stage] = {
    "tokenizer": _tokenizer,
    "vae": _vae,
    "encode": _encode,
    "transformer": _transformer,
    "export": _export,
    "preview": _preview,
    "sample": _sample,
    "evaluator": _evaluator,
}


def main(argv: list[str] | None = None) -> int:
    """Run one stage; returns the exit code, 2 for arguments or files that do not fit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=list(STAGES))
    parser.add_argument("--work", type=Path, default=Path("out/reference"), help="state between the stages")
    parser.add_argument(
        "--folder", type=Path, default=Path(__file__).parent / "pipeline", help="the pipeline"
    )
    parser.add_argument("--out", type=Path, default=Path("out/reference"), help="results of `sample`")
    parser.add_argument("--seconds", type=float, default=200.0, help="time of `vae`, limit of `encode`")
    parser.add_argument("--total-seconds", type=float, default=900.0, help="time of `transformer` in all")
    parser.add_argument("--stop-after", type=float, help="seconds after which `transformer` saves and ends")
    parser.add_argument("--clips", type=int, help="of `encode` (50000), `preview` (32), `evaluator` (500)")
    parser.add_argument("--vae", type=Path, help="autoencoder for `encode`, instead of DIR/vae")
    parser.add_argument(
        "--from", dest="start", type=Path, help="pipeline whose weights `transformer` starts from"
    )
    parser.add_argument(
        "--pair-share",
        type=float,
        help="share of clips with two objects: in the data (`encode`), or as drawn from it (`transformer`)",
    )
    parser.add_argument("--spin-share", type=float, help="share of spinning clips that `transformer` draws")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--no-graph", action="store_true", help="launch kernel by kernel, without a CUDA graph"
    )
    parser.add_argument(
        "--deep", action="store_true", help="`transformer`, `export`: 42 narrow blocks with sincos positions"
    )
    parser.add_argument("--tiny", action="store_true", help="small networks and batches, for tests")
    args = parser.parse_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    try:
        STAGES[args.stage](args, torch.device(args.device))
    except (ValueError, FileNotFoundError) as error:
        print(f"{args.stage}: {error}", file=sys.stderr)
        return 2
    print(f"{args.stage}: {time.monotonic() - BEGIN:.0f} s in all", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
