"""What fits on which card: `python benchmarks/memory_cards.py`; results in results/memory-cards.json.

Sampling loops of models of true size with random weights (`memory.py`), residuals in host memory, and the
text encoder and the tiled decode beside them, each in a process whose allocator is capped at a card's memory
less what the CUDA context and a desktop take. A case starts on the smallest card and goes on to the next
until it completes. Cases run side by side, so that their times mean nothing and are not kept.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from measure import RESULTS, device_of, register, write_result

CARDS, TAKEN = (6, 8, 12, 16, 24), 1.0  # GB of a card; GiB of it that are not for us
PROGRAM = Path(__file__).with_name("memory.py")


@dataclass(frozen=True)
class Case:
    """A clip of a model, or what is beside it.

    Attributes:
        latents: frames, height and width.
        clip: as people say it.
        part: of `memory.py`.
    """

    config: str
    latents: str
    clip: str
    part: str = "sampling"

    @property
    def name(self) -> str:
        return f"{self.config}, {self.clip}" if self.part != "text" else "T5-XXL, fp8"


CASES = (
    Case("2b", "13,60,90", "480x720, 49 frames"),
    Case("5b", "7,60,90", "480x720, 25 frames"),
    Case("5b", "13,60,90", "480x720, 49 frames"),
    Case("1.5-5b", "12,60,90", "480x720, 41 frames"),
    Case("1.5-5b", "22,96,170", "768x1360, 81 frames"),
    Case("5b", "13,60,90", "", "text"),
    Case("5b", "13,60,90", "480x720, 49 frames", "decode"),
    Case("1.5-5b", "21,96,170", "768x1360, 81 frames", "decode"),
)
TINY = (Case("tiny", "3,4,4", "tiny"), Case("tiny", "3,4,4", "", "text"))


def main() -> None:
    """Try every case, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4, help="cases at a time")
    parser.add_argument("--device", default="cuda", help="cpu: only shows that it runs, with tiny models")
    parser.add_argument("--out", type=Path, default=RESULTS / "memory-cards.json")
    given = parser.parse_args()
    register()
    device = device_of(given.device)
    cases = TINY if device.type == "cpu" else CASES
    with ThreadPoolExecutor(given.workers) as pool:
        rows = list(pool.map(lambda case: smallest(case, given.device), cases))
    write_result(given.out, device, {}, rows)
    print(table(rows))


def smallest(case: Case, device: str) -> dict[str, object]:
    """The smallest card on which a case completes, and its peak there; card None where it does on none."""
    for card in CARDS:
        peak = run(case, card - TAKEN, device)
        if peak is not None:
            break
    return {
        "name": f"{case.part}: {case.name}",
        "latents": case.latents,
        "card_gb": None if peak is None else card,
        "peak_bytes": peak,
    }


def run(case: Case, cap: float, device: str) -> int | None:
    """Peak bytes of a case under a cap in GiB, None where it runs out of memory."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        given = ["--config", case.config, "--latents", case.latents, "--part", case.part, "--cap", f"{cap}"]
        loop = ["--location", "host", "--evaluations", "3", "--device", device, "--out", str(out)]
        done = subprocess.run(
            [sys.executable, str(PROGRAM), *given, *loop], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return json.loads(out.read_text(encoding="utf-8"))["rows"][0]["peak_bytes"]
    if "out of memory" not in done.stderr:
        told = done.stderr.strip().splitlines() or [f"ended with {done.returncode}, and said nothing"]
        raise RuntimeError(f"{case.name}: {told[-1]}")
    return None


def table(rows: Sequence[dict]) -> str:
    """The rows in Markdown."""
    lines = ["| | smallest card | peak there |", "|---|---|---|"]
    for row in rows:
        card = "more than 24 GB" if row["card_gb"] is None else f"{row['card_gb']} GB"
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f} GiB"
        lines.append(f"| {row['name']} | {card} | {peak} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
