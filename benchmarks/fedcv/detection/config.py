"""The config of federated object detection. See `benchmarks.core.config`.

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

    dataset: str = "street"
    taxonomy: str = "objects"
    scored: Literal["val", "test"] = "val"
    """Split that is scored over the rounds; test: no model is chosen by it, and val is not needed."""
    image_size: int = 192
    """Side to which images are resized when read, in pixels; boxes follow."""


@dataclass(frozen=True, config=STRICT)
class ScoringConfig(EvaluationConfig):
    """The schedule of scoring, and the score of val that chooses the best model."""

    best_by: Literal["loss", "mAP", "mAP50", "last"] = "mAP50"
    """Score on val that chooses the best model, the earliest of equal ones; last: the last model."""
    per_user: bool = field(default=True, metadata=REPETITION)
    """Score each test user alone at the end, in per_user.json; val users if test belongs to one user."""


@dataclass(frozen=True, config=STRICT)
class Config(TrainingConfig):
    """The config of a run: all that decides its numbers."""

    privacy_rules: ClassVar[Mapping[str, Rule]] = {
        **each(OF_THE_DATA, "data", "dataset partition taxonomy test_users"),
        **each(NOT_OF_TRAINING_USERS, "data", "scored"),
        "evaluation.per_user": Rule(NOT_OF_TRAINING_USERS),
        "data.val_share": only("val would be training users' images, and its scores are exact", 0.0),
    }
    setting: str = "street-fl"
    """Name of the setting, under which reports list the run."""
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: ScoringConfig = field(default_factory=ScoringConfig)


Run = benchmark.Run[Config]

PROTOCOL: Tree = {
    "model": {
        "arch": "fcos_efficientnet_lite0",
        "input_size": 192,
        "normalisation": "efficientnet_lite",
        "pretrained": True,
    },
    "augment": {"crop": "padded", "flip": "horizontal"},
    "local": {
        "learning_rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "num_epochs": 1,
        "batch_size": 8,
        "max_grad_norm": 10.0,
    },
    "server": {"optimizer": "sgd", "learning_rate": 1.0},
    "federated": {"num_rounds": 100, "cohort_size": 20},
    "centralised": {
        "optimizer": "sgd",
        "learning_rate": 0.01,
        "momentum": 0.9,
        "weight_decay": 5e-4,
        "num_epochs": 50,
        "batch_size": 8,
        "max_grad_norm": 10.0,
    },
    "privacy": {"epsilon": 8.0, "mechanism": "gaussian", "clipping_bound": 0.5},
    "local_privacy": {"clipping_bound": 0.5},
    "evaluation": {"every_rounds": 5, "every_epochs": 5, "best_by": "mAP50"},
}
"""FedCV's best learning rate (its figure 9), its weight decay, and all users in each round. The other values
are ours, and this folder's README lists FedCV's. Gradients are clipped, as losses are large at first."""
STREET: Tree = {"data": {"dataset": "street", "val_share": 0.1}}
RECIPES: Mapping[str, Tree] = {
    "street": STREET,
    "tracked": {"data": {"val_share": 0.0, "scored": "test"}, "evaluation": {"best_by": "last"}},
    "centralised": {"mode": "centralised"},
    "frozen": {"model": {"trained": "head"}},
    "scratch": {"model": {"pretrained": False}},
    "ssdlite": {
        "model": {"arch": "ssdlite_efficientnet_lite0"},
        "local": {"learning_rate": 0.001},
        "centralised": {"learning_rate": 0.001},
    },
    "faster-rcnn": {"model": {"arch": "fasterrcnn_efficientnet_lite0"}},
    "fedprox": {"federated": {"algorithm": "fedprox"}},
    "fednova": {"federated": {"algorithm": "fednova"}},
    "scaffold": {"federated": {"algorithm": "scaffold"}},
    "private": {"federated": {"weighting": "users"}, "privacy": {"epsilon": 8.0}},
}


def check(config: Config) -> None:
    """Refuse combinations that no run could mean."""
    check_clients(config)
    if config.augment.padding == "reflect":
        raise ValueError(
            "augment.padding is reflect, but boxes cannot be mirrored at the border of an image: set "
            "it to zero"
        )
    if config.model.init == "keras":
        raise ValueError(
            "model.init is keras, which would give each class a chance of 1/2 at every place of an image: "
            "choose torchvision, he or xavier"
        )


DETECTION = Benchmark(Config, Path(__file__).parent / "configs", "street-fl", RECIPES, PROTOCOL, check)

parse = DETECTION.parse
"""The run that a command line asks for."""
