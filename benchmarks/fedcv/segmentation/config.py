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
from benchmarks.core.config.client_data import ClientDataConfig, check_clients
from benchmarks.core.config.privacy_rules import NOT_OF_TRAINING_USERS, OF_THE_DATA, Rule, each, only
from benchmarks.core.config.sections import REPETITION, EvaluationConfig, TrainingConfig
from benchmarks.core.config.trees import Tree
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class DataConfig(ClientDataConfig):
    """The images, and the users who own them."""

    dataset: str = "camvid"
    taxonomy: str = "mask"
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
        **each(OF_THE_DATA, "data", "dataset partition taxonomy test_users"),
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


SEGMENTATION = Benchmark(
    Config, Path(__file__).parent / "configs", "camvid-fl", RECIPES, PROTOCOL, check_clients
)

parse = SEGMENTATION.parse
"""The run that a command line asks for."""
