"""FLAIR's config: every constant that affects a result is a field. See `benchmarks.core.config`.

`PROTOCOL` is the paper's, as ml-flair implements it; the recipe ``pfl`` is pfl-research's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from benchmarks.core.config import benchmark
from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.effects import Idle, check_training, idle_in_training
from benchmarks.core.config.privacy_rules import NOT_OF_TRAINING_USERS, OF_THE_DATA, Rule, each
from benchmarks.core.config.sections import REPETITION, EvaluationConfig, ImageConfig, TrainingConfig
from benchmarks.core.config.trees import Tree
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class DataConfig(ImageConfig):
    """Which task is learnt from which images."""

    taxonomy: Literal["labels", "fine_grained_labels"] = "labels"
    """Labels to learn: 17 coarse ones, or 1,628 fine-grained ones."""
    binary_label: str | None = None
    """Name of the one label, of either taxonomy, to learn as a binary task; none: all labels."""
    partition: str = "user"
    """Owners of images. user: the real ones; iid: as many random ones of the mean size; or a name."""


@dataclass(frozen=True, config=STRICT)
class ScoringConfig(EvaluationConfig):
    """The schedule of scoring on val, the score that chooses the best model, and the scores at the end."""

    best_by: Literal["loss", "C-AP", "accuracy", "last"] = "loss"
    """Score on val that chooses the best model, the earliest of equal ones; last: the last model."""
    per_user: bool = field(default=False, metadata=REPETITION)
    """Score each test user alone at the end (FLAIR paper, Figure 5), in per_user.json."""
    few_shot_below: PositiveInt = field(default=20, metadata=REPETITION)
    """Classes with fewer training images are few-shot, reported separately (FLAIR paper, 6.1)."""


@dataclass(frozen=True, config=STRICT)
class PersonalConfig:
    """Local fine-tuning of the final model on part of each test user's images, scored on the others."""

    num_epochs: NonNegativeInt = 0
    """Passes over a test user's images; 0: no fine-tuning."""
    learning_rate: PositiveFloat = 0.01
    """Learning rate of all layers that are trained, without unit."""
    batch_size: PositiveInt = 16
    """Number of images in a step."""
    max_grad_norm: PositiveFloat | None = 10.0
    """Maximum L2 norm of each variable's gradient; none: no limit."""
    train_share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of a user's images to fine-tune on; the others are scored."""
    min_images: Annotated[int, Field(ge=2)] = 4
    """Users with fewer images are left out."""
    split_seed: NonNegativeInt = 0
    """Seed of the split, independent of the run's seed, so that all runs are scored on the same images."""


PRIVACY_RULES: Mapping[str, Rule] = {
    **each(OF_THE_DATA, "data", "taxonomy binary_label partition"),
    "evaluation.per_user": Rule(NOT_OF_TRAINING_USERS),
    "evaluation.few_shot_below": Rule(
        "groups test scores by how many training images a class has; not covered, and privacy.json says so"
    ),
    **each(NOT_OF_TRAINING_USERS, "personal", "num_epochs learning_rate batch_size max_grad_norm"),
    **each(NOT_OF_TRAINING_USERS, "personal", "train_share min_images split_seed"),
}


@dataclass(frozen=True, config=STRICT)
class Config(TrainingConfig):
    """The config of a run: all that decides its numbers."""

    privacy_rules: ClassVar[Mapping[str, Rule]] = PRIVACY_RULES
    setting: str = "FL-R-17"
    """Row of the paper's Table 1 that this run is compared with."""
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: ScoringConfig = field(default_factory=ScoringConfig)
    personal: PersonalConfig = field(default_factory=PersonalConfig, metadata=REPETITION)


Run = benchmark.Run[Config]

PROTOCOL: Tree = {
    "data": {"image_size": 256},
    "model": {"arch": "resnet18", "input_size": 224, "init": "keras"},
    "augment": {"flip": "both"},
    "local": {
        "learning_rate": 0.1,
        "num_epochs": 2,
        "batch_size": 16,
        "max_images": 512,
        "straddle": True,
        "max_grad_norm": 10.0,
        "clip_by": "variable",
    },
    "server": {
        "optimizer": "adam",
        "learning_rate": 0.1,
        "epsilon": 0.01,
        "adam_form": "keras",
        "warmup_rounds": 30,
        "final_learning_rate": 0.02,
    },
    "federated": {"num_rounds": 5000, "cohort_size": 200},
    "privacy": {"epsilon": 2.0, "mechanism": "adaptive", "clipping_bound": 0.1, "quantile": 0.1},
    "local_privacy": {"clipping_bound": 0.1},
    "centralised": {
        "optimizer": "adam",
        "learning_rate": 5e-4,
        "epsilon": 1e-7,
        "num_epochs": 100,
        "batch_size": 512,
        "max_grad_norm": 10.0,
    },
}
"""The paper's runs (5.1, A) as ml-flair implements them; warm-up and its end are pfl-research's."""

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
"""Not offered, as these are defects: one crop for a whole batch, and a population of 10,000,000."""


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
    """Refuse combinations that no run could mean."""
    check_training(config)
    if config.evaluation.best_by == "accuracy" and config.data.binary_label is None:
        raise ValueError(
            "evaluation.best_by is accuracy, which needs data.binary_label: choose loss, C-AP or last"
        )


FLAIR = Benchmark(Config, Path(__file__).parent / "configs", "fl-r-17", RECIPES, PROTOCOL, check, idle)


parse = FLAIR.parse
"""The run that a command line asks for."""
