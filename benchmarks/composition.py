"""How alike a fast draft and the full run are laid out: `python benchmarks/composition.py`.

For every caption and seed of the reference a draft (preset fast, 20 steps) and a final clip (preset balanced,
50 steps), 6-bit weights, 16-bit activations. Each draft is held against the final clip of its own seed and
against those of the others, by `sixbit_core.metrics.composition`. `COMPOSITION_HELD` ought to lie between the
two kinds. Captions are the first of the world's held-out ones; results/composition.json has the rows.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, register, write_result


def main() -> None:
    """Sample, compare and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--captions", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=2, help="at least two: 0, 1, ...")
    parser.add_argument("--draft-steps", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--model", default="reference", help="reference, or a pipeline folder like it")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "composition.json")
    given = parser.parse_args()
    if given.captions < 1 or given.seeds < 2:
        parser.error("it takes a caption and two seeds at least")
    register()
    device, rows = measure(given)
    same, other = ([row["composition"] for row in rows if row["same_seed"] is kind] for kind in (True, False))
    of = f"composition.{given.draft_steps}of{given.steps}"
    write_result(
        given.out, device, {f"{of}.same_seed_low": min(same), f"{of}.other_seed_high": max(other)}, rows
    )


def measure(given: argparse.Namespace) -> tuple[torch.device, list[dict[str, Any]]]:
    """The device, and a row for every caption, seed of a draft and seed of a final clip."""
    from sixbit_diffusion.engine.commands import quiet_libraries
    from sixbit_diffusion.engine.facts import read_facts
    from sixbit_diffusion.engine.machine import find_machine
    from sixbit_diffusion.engine.pipeline import load_model
    from sixbit_diffusion.engine.prompts import HELD_OUT_SEED
    from sixbit_diffusion.engine.sample import ClipSpec, sample_frames
    from sixbit_diffusion.engine.settings import Choice, settle
    from sixbit_diffusion.reference.world import sample_prompts
    from sixbit_diffusion.sixbit_core.metrics import composition

    quiet_libraries()
    facts, machine = read_facts(given.model), find_machine(given.device)
    model = load_model(given.model, None, "search", machine, facts=facts)

    def clips(caption: str, preset: str, steps: int) -> list[torch.Tensor]:
        settings = settle(Choice(precision="w4a16", preset=preset), facts, machine)
        specs = (
            ClipSpec(caption, facts.size, facts.frames, steps=steps, seed=seed) for seed in range(given.seeds)
        )
        return [torch.from_numpy(sample_frames(model, settings, spec)[0]) for spec in specs]

    rows = []
    for number, scene in enumerate(sample_prompts(given.captions, HELD_OUT_SEED)):
        drafts = clips(scene.caption, "fast", given.draft_steps)
        finals = clips(scene.caption, "balanced", given.steps)
        rows += [
            {
                "name": f"{given.draft_steps}of{given.steps}.caption{number}.draft{d}.final{f}",
                "caption": scene.caption,
                "same_seed": d == f,
                "composition": composition(draft, final),
            }
            for d, draft in enumerate(drafts)
            for f, final in enumerate(finals)
        ]
    return machine.device, rows


if __name__ == "__main__":
    main()
