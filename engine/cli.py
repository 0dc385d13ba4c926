"""The `sixbit` command: arguments in, one function of the engine called, an exit code out.

0 done, 2 bad input, 1 anything else, 128 + N stopped by signal N (130 for Ctrl-C, 141 where the reader of a
pipe went away); what went wrong is one line on stderr. Only light modules are imported here, so that
`--help` answers at once.
"""

import argparse
import difflib
import io
import itertools
import math
import os
import re
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from ..sixbit_core import VERSION
from ..sixbit_core.config import CACHE_LOCATIONS, PRESETS
from ..sixbit_core.errors import CheckpointError, one_line
from . import commands
from .errors import InputError
from .stopping import BY_SIGNAL, stoppable, stopped_line

DONE, FAILED, BAD_INPUT = 0, 1, 2
NO_READER = BY_SIGNAL + 13  # SIGPIPE, which Windows has no name for
BAD = (InputError, CheckpointError)
CHOSEN_BY_PRESET = "default: the preset's"


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are ours to print, and misspelt options named before missing ones."""

    def parse_known_args(self, args=None, namespace=None):
        if self._subparsers is None:  # else the options after the command are that parser's
            given = itertools.takewhile(lambda one: one != "--", args or ())
            for name in (one.partition("=")[0] for one in given if one.startswith("--")):
                if name not in self._option_string_actions:
                    near = difflib.get_close_matches(name, self._option_string_actions, 1)
                    self.error(f"unknown option {name}" + (f"; did you mean {near[0]}?" if near else ""))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        if found := re.fullmatch(r"argument (--\S+): expected one argument", message):  # or one like -128x128
            message = (
                f"{found[1]} needs a value, got none; one that begins with - is given as {found[1]}=VALUE"
            )
        raise InputError(f"{message} (see {self.prog} --help)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line, without the program's name; the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names in no encoding, and a file on Windows
            stream.reconfigure(errors="backslashreplace")
    came: list[int] = []
    try:
        parsed = build_parser().parse_args(given)
        parsed.command_line = shlex.join(["sixbit", *given])
        with stoppable(came):
            parsed.run(parsed)
            sys.stdout.flush()  # not at the end of Python, where nobody would see it fail
        return DONE
    except KeyboardInterrupt as stop:
        number = getattr(stop, "number", signal.SIGINT)
        return _fail(stopped_line(number), BY_SIGNAL + number, debug)
    except BrokenPipeError:  # of stdout: what else is piped here is read by processes of our own
        _write_nowhere()
        return NO_READER
    except Exception as error:
        if came:  # a library took the signal for an error of its own
            return _fail(stopped_line(came[-1]), BY_SIGNAL + came[-1], debug)
        return _fail(_line(error), BAD_INPUT if isinstance(error, BAD) else FAILED, debug)


def _write_nowhere() -> None:
    """Let stdout be flushed when Python ends, though nobody reads it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def build_parser() -> Parser:
    """The whole command line."""
    parser = Parser(prog="sixbit", description="CogVideoX in six bits.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"sixbit {VERSION}")
    known = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, run, fill, summary, example in COMMANDS:
        command = known.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        fill(command)
        command.add_argument("--debug", action="store_true", help="show the trace when something goes wrong")
        command.set_defaults(run=run)
    return parser


def _generate(parser: Parser) -> None:
    _add_model(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the clip shows")
    parser.add_argument("--negative", default="", metavar="TEXT", help="what it must not show")
    parser.add_argument("--image", metavar="FILE", help="first frame, for an image-to-video model")
    _add_sampling(parser)
    parser.add_argument("--seed", type=_whole, default=0, help="of the noise (default 0)")
    _add_run(parser)
    parser.add_argument("--compare", action="store_true", help="sample in full precision too, and compare")
    _add_device(parser)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder of clip, pictures and report")
    parser.add_argument("--report", metavar="FILE", help="write the report there too")


def _quantize(parser: Parser) -> None:
    parser.add_argument("source", metavar="SRC", help="reference, a diffusers folder or a safetensors file")
    parser.add_argument("target", metavar="DST", help="the safetensors file to write")
    parser.add_argument("--method", default="search", metavar="NAME", help="rtn, search (default) or gptq")
    parser.add_argument("--rotation", default="auto", metavar="NAME", help="auto, on or off (default auto)")
    parser.add_argument(
        "--calibration",
        metavar="DIR",
        help="of `sixbit calibrate --inputs`, for method gptq and rotation auto",
    )
    parser.add_argument("--compatible", action="store_true", help="plain NVFP4 that any ComfyUI reads")
    parser.add_argument("--force", action="store_true", help="replace an existing target")


def _calibrate(parser: Parser) -> None:
    _add_model(parser)
    parser.add_argument("--prompts", metavar="FILE|N", help="captions, one a line; or how many (default 4)")
    _add_sampling(parser)
    parser.add_argument("--seed", type=_whole, default=0, help="of the first clip's noise (default 0)")
    parser.add_argument(
        "--bits", type=_numbers, default=(5.0, 6.0, 7.0), metavar="LIST", help="default 5,6,7"
    )
    parser.add_argument("--inputs", metavar="DIR", help="keep sample inputs there, for `sixbit quantize`")
    _add_device(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="the predictor file to write")


def _inspect(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="reference, or a checkpoint file or folder")
    parser.add_argument("--json", action="store_true", help="for programs")


def _evaluate(parser: Parser) -> None:
    _add_model(parser)
    parser.add_argument("--prompts", metavar="FILE|N", help="captions, one a line; or how many (default 16)")
    parser.add_argument("--seeds", type=_whole_numbers, default=(0,), metavar="LIST", help="default 0")
    _add_sampling(parser)
    _add_run(parser)
    parser.add_argument("--against-full", action="store_true", help="PSNR and SSIM against full precision")
    parser.add_argument(
        "--workers", type=_whole, default=1, metavar="N", help="processes that share the work"
    )
    _add_device(parser)
    parser.add_argument("--out", required=True, metavar="FILE", help="the JSON file to write")
    parser.add_argument("--shard", type=_shard, help=argparse.SUPPRESS)


def _verify(parser: Parser) -> None:
    _add_model(parser)
    told = "captions, one a line, which the JSON repeats; or how many (default 4)"
    parser.add_argument("--prompts", metavar="FILE|N", help=told)
    _add_sampling(parser)
    parser.add_argument("--seed", type=_whole, default=0, help="of the first prompt's noise (default 0)")
    _add_device(parser)
    parser.add_argument(
        "--out", required=True, metavar="DIR", help="folder of verify.json, verify.png and clips"
    )
    parser.add_argument(
        "--force", action="store_true", help="start anew: clips that are kept there are removed"
    )


def _check(parser: Parser) -> None:
    _add_model(parser, default="reference")
    _add_sampling(parser)
    _add_run(parser)
    _add_device(parser)


def _add_model(parser: Parser, default: str | None = None) -> None:
    told = "reference, a diffusers pipeline folder, or a transformer file"
    parser.add_argument("--model", required=default is None, default=default, metavar="NAME", help=told)
    parser.add_argument("--pipeline", metavar="FOLDER", help="VAE, text encoder and scheduler for a file")


def _add_sampling(parser: Parser) -> None:
    parser.add_argument("--steps", type=_whole, default=50, help="default 50")
    parser.add_argument("--cfg", type=_number, default=6.0, help="guidance scale (default 6.0)")
    parser.add_argument("--frames", type=_whole, metavar="N", help="default: what the model was trained for")
    parser.add_argument("--size", type=_size, metavar="HxW", help="default: what the model was trained for")


def _add_run(parser: Parser) -> None:
    group = parser.add_argument_group("precision and cache (what is given wins over the preset)")
    group.add_argument("--preset", metavar="NAME", help=f"{', '.join(PRESETS)} (default balanced)")
    precisions = "full, w4a16, w4a8, w4a4, dmpq (default: dmpq where the GPU has FP4 units, else w4a8)"
    group.add_argument("--precision", metavar="NAME", help=precisions)
    group.add_argument("--bits", type=_number, help=f"average activation bits of dmpq ({CHOSEN_BY_PRESET})")
    group.add_argument(
        "--router", metavar="NAME", help=f"of dmpq: auto, gamma, static, … ({CHOSEN_BY_PRESET})"
    )
    group.add_argument("--predictor", metavar="FILE", help="written by `sixbit calibrate` for this model")
    group.add_argument("--no-pdr", action="store_true", help="no purified refresh after a skip")
    told = "take the tiles of kernels from the table, on a GPU where they would be timed first"
    group.add_argument("--no-tuning", action="store_true", help=told)
    group.add_argument("--cache", default="tdc", metavar="NAME", help="off or tdc (default tdc)")
    group.add_argument("--threshold", type=_number, help=f"of the cache ({CHOSEN_BY_PRESET})")
    group.add_argument("--max-skips", type=_whole, metavar="N", help=f"in a row ({CHOSEN_BY_PRESET})")
    group.add_argument(
        "--start", type=_number, help=f"share of sampling before any skip ({CHOSEN_BY_PRESET})"
    )
    group.add_argument(
        "--end", type=_number, help=f"share of sampling after the last skip ({CHOSEN_BY_PRESET})"
    )
    where = ", ".join(CACHE_LOCATIONS)
    group.add_argument("--cache-location", metavar="NAME", help=f"{where} (default auto)")


def _add_device(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", metavar="NAME", help="auto, cpu or cuda (default auto)")


def _size(text: str) -> tuple[int, int]:
    height, cross, width = text.lower().partition("x")
    if not (cross and all(side.isdecimal() and len(side) < 10 for side in (height, width))):
        raise argparse.ArgumentTypeError(f"needs HEIGHTxWIDTH, 480x720 for one, got {text!r}")
    return int(height), int(width)


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs a whole number, got {text!r}") from None


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"needs a finite number, got {text!r}")
    return value


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(_number(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"needs numbers and commas, got {text!r}") from None


def _whole_numbers(text: str) -> tuple[int, ...]:
    if not all(part.strip().isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"needs whole numbers and commas, got {text!r}")
    return tuple(int(part) for part in text.split(","))


def _shard(text: str) -> tuple[int, int]:
    index, count = text.split("/")
    return int(index), int(count)


def _line(error: Exception) -> str:
    """An exception as one line."""
    text = one_line(" ".join(str(error).split())) or "no message"
    if isinstance(error, BAD) or type(error) is RuntimeError:
        return text
    return f"{type(error).__name__}: {text}"


def _fail(line: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"sixbit: {line}", file=sys.stderr)
    return code


# name, what runs, what fills its parser, summary, example
COMMANDS = (
    (
        "generate",
        commands.run_generate,
        _generate,
        "make a clip",
        'sixbit generate --model reference --prompt "a red star is moving right on a white background" '
        "--compare --out out/demo",
    ),
    (
        "quantize",
        commands.run_quantize,
        _quantize,
        "write a quantized copy of a checkpoint",
        "sixbit quantize CogVideoX-5b cogvideox-5b-nvfp4.safetensors",
    ),
    (
        "calibrate",
        commands.run_calibrate,
        _calibrate,
        "measure a model and write its predictor",
        "sixbit calibrate --model CogVideoX-2b --prompts captions.txt --out cogvideox-2b.json",
    ),
    (
        "inspect",
        commands.run_inspect,
        _inspect,
        "say what a checkpoint holds",
        "sixbit inspect cogvideox-5b-nvfp4.safetensors",
    ),
    (
        "evaluate",
        commands.run_evaluate,
        _evaluate,
        "make many clips and score them",
        "sixbit evaluate --model reference --prompts 64 --precision w4a8 --against-full --out out/w4a8.json",
    ),
    (
        "verify",
        commands.run_verify,
        _verify,
        "measure quality and speed on your own weights, for a report",
        "sixbit verify --model CogVideoX-5b --out verify-5b",
    ),
    (
        "check",
        commands.run_check,
        _check,
        "say what is there, what is missing, and what this machine will do",
        "sixbit check --model reference",
    ),
)
