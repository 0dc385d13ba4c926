"""What was asked of a MODEL by the loader and the nodes of this pack, and the report of its last run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..sixbit_core.config import DeltaCacheConfig, DMPQConfig
from ..sixbit_core.predictor import Predictor
from ..sixbit_core.report import RunMemory, RunReport

KEY = "sixbit"
_KEPT = 16  # runs of a journal
_MARKED = 16  # values of a latent
Mark = tuple[float, ...]


@dataclass(frozen=True)
class Entry:
    """A run that went to its end: what it decided, what it took, and by what its latent is known."""

    report: RunReport
    memory: RunMemory
    mark: Mark | None = None


@dataclass
class Journal:
    """The last run by each node that sampled a MODEL, as the last node of this pack made it.

    Attributes:
        runs: id of the node, "" where none executed -> its last run, the latest at the end.
    """

    runs: dict[str, Entry] = field(default_factory=dict)

    def keep(self, node: str, entry: Entry) -> None:
        """Take a run in place of an earlier one of that node."""
        self.runs.pop(node, None)
        self.runs[node] = entry
        while len(self.runs) > _KEPT:
            del self.runs[next(iter(self.runs))]

    @property
    def last(self) -> Entry | None:
        """The latest run."""
        return next(reversed(self.runs.values()), None)


@dataclass(frozen=True)
class Settings:
    """What was asked for; None where a node was not used.

    Attributes:
        six_bit: the weights are NVFP4, so that activations follow the machine where `dmpq` is None.
    """

    dmpq: DMPQConfig | None = None
    cache: DeltaCacheConfig | None = None
    predictor: Predictor | None = None
    journal: Journal = field(default_factory=Journal)
    six_bit: bool = False


def settings_in(model_options: dict[str, Any]) -> Settings:
    """The settings in the options of a MODEL or of a sampling run; nothing asked for, if there are none."""
    return model_options.get("transformer_options", {}).get(KEY) or Settings()


def mark_of(latent: Any) -> Mark | None:
    """What a latent is known by: its shape and some of its values. None for what is no plain tensor."""
    if type(latent) is not torch.Tensor or not latent.numel():
        return None
    places = torch.linspace(0, latent.numel() - 1, _MARKED, dtype=torch.float64).long()
    return (*latent.shape, *latent.flatten()[places.to(latent.device)].float().tolist())


def run_of(
    runs: Mapping[str, Entry], prompt: Mapping[str, Any], own: str | None, latent: Any = None
) -> Entry:
    """The run that made a report's latent: known by its values, since the host may have it from another
    graph, whose nodes had other ids; else of the nearest node before it that sampled its model.

    Args:
        runs: by the node that sampled.
        prompt: node id -> its "inputs", of which links are [id, output].
        own: id of the report's node.
        latent: what came out of the sampler.

    Raises:
        ValueError: no node before it has sampled the model.
    """
    mark = mark_of(latent)
    known = [run for run in runs.values() if mark is not None and run.mark == mark]
    if known:
        return known[-1]
    seen, nodes = {own}, [own]
    for node in nodes:
        links = [v for v in prompt.get(node, {}).get("inputs", {}).values() if isinstance(v, list)]
        if node == own and prompt:
            links = [prompt[own]["inputs"]["latent"]]
        for source in (str(link[0]) for link in links if link):
            if source in runs:
                return runs[source]
            if source not in seen:
                seen.add(source)
                nodes.append(source)
    if not prompt and runs:  # called by a script, outside of a graph
        return next(reversed(runs.values()))
    raise ValueError(
        "there is no run of this model to report: connect the model that the sampler was given (of Load 6Bit "
        "CogVideoX or a node of this pack after it) and the latent that the sampler gave"
    )
