"""What was asked of a MODEL by the loader and the nodes of this pack, and the report of its last run."""

from dataclasses import dataclass, field
from typing import Any

from ..sixbit_core.config import DeltaCacheConfig, DMPQConfig
from ..sixbit_core.predictor import Predictor
from ..sixbit_core.report import RunMemory, RunReport

KEY = "sixbit"


@dataclass
class Journal:
    """The last run of a MODEL, as the last node of this pack made it: what it decided, what it took."""

    last: RunReport | None = None
    memory: RunMemory | None = None


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
