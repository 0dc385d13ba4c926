"""What was asked of a MODEL by the loader and the nodes of this pack, and the report of its last run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..sixbit_core.config import DeltaCacheConfig, DMPQConfig
from ..sixbit_core.predictor import Predictor
from ..sixbit_core.report import RunMemory, RunReport

KEY = "sixbit"


_KEPT = 16  # runs of a journal


@dataclass(frozen=True)
class Entry:
    """A run that went to its end: what it decided, what it took."""

    report: RunReport
    memory: RunMemory


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


def run_of(runs: Mapping[str, Entry], prompt: Mapping[str, Any], own: str | None) -> Entry:
    """The run that made a report's latent: of the nearest node before it that sampled its model.

    Args:
        runs: by the node that sampled.
        prompt: node id -> its "inputs", of which links are [id, output].
        own: id of the report's node.

    Raises:
        ValueError: no node before it has sampled the model.
    """
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
