"""FLAIR's config: what a run is; every constant that affects a result is a field. See `benchmarks.settings`.

The defaults are the paper's protocol as ml-flair implements it; the recipe ``pfl`` is pfl-research's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic.dataclasses import dataclass

from benchmarks import settings
from benchmarks.sections import STRICT, ImageConfig, TrainingConfig
from benchmarks.settings import Benchmark, Tree


@dataclass(frozen=True, config=STRICT)
class DataConfig(ImageConfig):
    """Which task is learnt from which images."""

    taxonomy: Literal["labels", "fine_grained_labels"] = "labels"
    """17 coarse labels, or 1,628 fine-grained ones."""
    binary_label: str | None = None
    """Learn this one label, of either taxonomy, as a binary task."""
    partition: Literal["user", "iid"] = "user"
    """Real users, or the same images dealt at random to as many users of the mean size."""


@dataclass(frozen=True, config=STRICT)
class Config(TrainingConfig):
    """All that decides a run's numbers."""

    setting: str = "FL-R-17"
    """Row of the paper's Table 1 that this run is compared with."""
    data: DataConfig = field(default_factory=DataConfig)


Run = settings.Run[Config]

RECIPES: Mapping[str, Tree] = {
    "paper": {},
    "pfl": {
        "server": {"beta2": 0.99, "adam_form": "torch", "schedule": "warmup_linear"},
        "augment": {"crop": "resized", "flip": "horizontal"},
        "local": {"clip_by": "global", "cap": "first", "reshuffle": False, "straddle": False},
        "federated": {"weighting": "users", "replacement": True},
        "model": {"init": "torchvision"},
        "evaluation": {"every_rounds": 20, "best_by": "C-AP"},
    },
}
"""flair.md A8. Not offered, being defects: one crop for a whole batch, and a population of 10,000,000."""

FLAIR = Benchmark(Config, Path(__file__).parent / "configs", "fl-r-17", RECIPES)


def parse(argv: Sequence[str]) -> Run:
    """The run that a command line asks for.

    :raises ValueError: for an unknown key, a wrong type or a combination without meaning.
    """
    return FLAIR.parse(argv)
