"""The config of federated segmentation. See `benchmarks.core.config`.

The defaults are FedCV's (He et al. 2021, arXiv 2111.11066) where its paper or its code states them; what
differs is listed in this folder's README.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import ClassVar, Literal

from pydantic.dataclasses import dataclass

from benchmarks.core.config import benchmark
from benchmarks.core.config.benchmark import Benchmark
from benchmarks.core.config.effects import check_training
from benchmarks.core.config.privacy_rules import NOT_OF_TRAINING_USERS, OF_THE_DATA, Rule, each, only
from benchmarks.core.config.sections import REPETITION, EvaluationConfig, ImageConfig, TrainingConfig
from benchmarks.core.config.trees import Tree
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class DataConfig(ImageConfig):
    """The images, and the users who own them."""

    dataset: str = "camvid"
    """Name of the data set; without --data_path, its file is data/NAME.hdf5."""
    partition: str | None = None
    """Partition of the file, or a drawn one: windows-clients-12-seed-0; none: the file's users."""
    taxonomy: str = "mask"
    """Name of the masks in the file."""
    val_share: float = 0.0
    """Share of each user's training images that becomes val, for a file without val; 0: the file's val."""
    image_size: int = 128
    """Side to which images and masks are resized when read, in pixels."""


@dataclass(frozen=True, config=STRICT)
class ScoringConfig(EvaluationConfig):
    """The schedule of scoring on val, and the score that chooses the best model."""

    best_by: Literal["loss", "mIoU", "Dice", "Dice per image", "last"] = "mIoU"
    """Score on val that chooses the best model, the earliest of equal ones; last: the last model."""
    per_user: bool = field(default=True, metadata=REPETITION)
    """Score each test user alone at the end, in per_user.json."""


@dataclass(frozen=True, config=STRICT)
class Config(TrainingConfig):
    """The config of a run: all that decides its numbers."""

    privacy_rules: ClassVar[Mapping[str, Rule]] = {
        **each(OF_THE_DATA, "data", "dataset partition taxonomy"),
        "evaluation.per_user": Rule(NOT_OF_TRAINING_USERS),
        "data.val_share": only("val would be training users' images, and its scores are exact", 0.0),
    }
    setting: str = "camvid-fl"
    """Name of the setting, under which reports list the run."""
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: ScoringConfig = field(default_factory=ScoringConfig)


Run = benchmark.Run[Config]

PROTOCOL: Tree = {
    "model": {
        "arch": "deeplabv3plus_efficientnet_lite0",
        "input_size": 128,
        "normalisation": "efficientnet_lite",
        "pretrained": True,
    },
    "augment": {"crop": "padded", "flip": "horizontal"},
    "local": {
        "learning_rate": 0.02,
        "schedule": "poly",
        "schedule_power": 0.9,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "num_epochs": 1,
        "batch_size": 10,
    },
    "server": {"optimizer": "sgd", "learning_rate": 1.0},
    "federated": {"num_rounds": 200, "cohort_size": 4},
    "centralised": {
        "optimizer": "sgd",
        "learning_rate": 0.02,
        "schedule": "poly",
        "schedule_power": 0.9,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "num_epochs": 200,
        "batch_size": 10,
    },
    "privacy": {"epsilon": 2.0, "mechanism": "gaussian", "clipping_bound": 0.5},
    "local_privacy": {"clipping_bound": 0.5},
    "evaluation": {"every_rounds": 5, "every_epochs": 5, "best_by": "mIoU"},
}
"""FedCV's batches, momentum, weight decay and rounds, and all users in each round. The learning rate is ours,
as FedCV's trainer divides a mean loss by the batch size once more; it falls over the rounds, where FedCV's
falls within each round and starts again in the next."""
CAMVID: Tree = {
    "data": {"dataset": "camvid"},
    "federated": {"num_rounds": 50},
    "centralised": {"num_epochs": 50},
}
RECIPES: Mapping[str, Tree] = {
    "camvid": CAMVID,
    "centralised": {"mode": "centralised"},
    "frozen": {"model": {"trained": "head"}},
    "scratch": {"model": {"pretrained": False}},
    "unet": {"model": {"arch": "unet_efficientnet_lite0"}},
    "fedprox": {"federated": {"algorithm": "fedprox"}},
    "fednova": {"federated": {"algorithm": "fednova"}},
    "scaffold": {"federated": {"algorithm": "scaffold"}},
    "private": {"federated": {"weighting": "users"}, "privacy": {"epsilon": 2.0}},
}


def check(config: Config) -> None:
    """Refuse combinations that no run could mean.

    Raises:
        ValueError: one line that names the key and what to do.
    """
    check_training(config)
    if not 0 <= config.data.val_share < 1:
        raise ValueError(
            f"data.val_share is {config.data.val_share:g}: give a number of at least 0 and below 1"
        )


SEGMENTATION = Benchmark(Config, Path(__file__).parent / "configs", "camvid-fl", RECIPES, PROTOCOL, check)

parse = SEGMENTATION.parse
"""The run that a command line asks for."""
