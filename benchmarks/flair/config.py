"""FLAIR's config: every constant that affects a result is a field. See `benchmarks.core.config`.

The defaults are the paper's protocol as ml-flair implements it; the recipe ``pfl`` is pfl-research's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from benchmarks.core.config import benchmark
from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.checks import check_training
from benchmarks.core.config.effects import Idle, idle_in_training
from benchmarks.core.config.sections import REPETITION, STRICT, EvaluationConfig, ImageConfig, TrainingConfig
from benchmarks.core.config.trees import Tree


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
class ScoringConfig(EvaluationConfig):
    """What FLAIR scores at the end besides."""

    per_user: bool = field(default=False, metadata=REPETITION)
    """At the end, score each test user by itself as well (FLAIR paper, Figure 5): per_user.json."""
    few_shot_below: PositiveInt = field(default=20, metadata=REPETITION)
    """Classes with fewer training images than this are reported apart as few-shot (FLAIR paper, 6.1)."""


@dataclass(frozen=True, config=STRICT)
class PersonalConfig:
    """Local fine-tuning of the final model on part of each test user's images, scored on the others."""

    num_epochs: NonNegativeInt = 0
    """0: none."""
    learning_rate: PositiveFloat = 0.01
    batch_size: PositiveInt = 16
    max_grad_norm: PositiveFloat | None = 10.0
    train_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    min_images: Annotated[int, Field(ge=2)] = 4
    """Users with fewer are left out."""
    split_seed: NonNegativeInt = 0
    """Not the run's seed: every run is to be scored on the same images."""


@dataclass(frozen=True, config=STRICT)
class Config(TrainingConfig):
    """All that decides a run's numbers."""

    setting: str = "FL-R-17"
    """Row of the paper's Table 1 that this run is compared with."""
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: ScoringConfig = field(default_factory=ScoringConfig)
    personal: PersonalConfig = field(default_factory=PersonalConfig, metadata=REPETITION)


Run = benchmark.Run[Config]

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


def idle(config: Config) -> Iterator[Idle]:
    """The keys without effect, FLAIR's own among them."""
    yield from idle_in_training(config)
    if config.mode == "centralised":
        yield Idle("data.partition", "mode is centralised", "set mode to federated")
    if config.data.binary_label is not None:
        yield Idle("data.taxonomy", "data.binary_label is given", "set data.binary_label to none")
    if not config.personal.num_epochs:
        keys = "learning_rate batch_size max_grad_norm train_share min_images split_seed"
        names = " ".join(f"personal.{key}" for key in keys.split())
        yield Idle(names, "personal.num_epochs is 0", "set personal.num_epochs")


def check(config: Config) -> None:
    """Refuse combinations that no run could mean.

    Raises:
        ValueError: one line that names the key and what to do.
    """
    check_training(config)
    if config.evaluation.best_by == "accuracy" and config.data.binary_label is None:
        raise ValueError(
            "evaluation.best_by is accuracy, which is scored where data.binary_label is given: "
            "choose one of loss, C-AP, last"
        )


FLAIR = Benchmark(Config, Path(__file__).parent / "configs", "fl-r-17", RECIPES, check=check, idle=idle)


def parse(argv: Sequence[str]) -> Run:
    """The run that a command line asks for.

    Raises:
        ValueError: for an unknown key, a wrong type or a combination without meaning.
    """
    return FLAIR.parse(argv)
