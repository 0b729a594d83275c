"""Parts of algorithms with several models of the server: the state, first models, choices, lines of a round.

Letters: U users of a run, n users of a cohort, k models.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn

from dataset.arrays import FloatArray, IntArray
from pfl_ext.algorithms.algorithm import Setup
from pfl_ext.algorithms.clients import Weights
from pfl_ext.algorithms.personal_parts import BACKBONE, trained_names
from pfl_ext.configs import STRICT
from pfl_ext.models.probing import two_images
from pfl_ext.models.trained import new_part
from pfl_ext.randomness import torch_stream


@checked_dataclass(frozen=True, config=STRICT)
class ClusterOptions:
    """The number of clusters, what they share, and their first models."""

    num_clusters: Annotated[int, Field(ge=2)] = 2
    """k, the number of models; a user trains the one with the least loss on its images."""
    shared: Literal["none", "encoder"] = "none"
    """none: clusters share no variables; encoder: all but those of the head, which each cluster has."""
    distance: Annotated[float, Field(gt=0, le=1)] | None = None
    """How far first models differ, 1: drawn independently; none: 1, or 0.1 if model.pretrained."""
    balance: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Part of an equal share of round 0's users, at least one, to choose each first model; 0: of nobody."""
    max_draws: PositiveInt = 20
    """Most draws of first models; the most even one is kept if none is even enough."""


@dataclass
class Clusters:
    """The k models, the server's optimiser of each, and the users' choices."""

    model: PyTorchModel
    """The run's model, with the weights of any cluster."""
    shared: Weights
    """Variables that all models have."""
    separate: list[Weights]
    """Variables that differ, for each model."""
    optimizers: list[Any]
    """States of the server's optimiser: of each cluster's variables, and last of the shared ones."""
    chosen: Tensor
    """``[U]`` int64: the model that each user chose when it last took part; -1 if it never did."""

    @property
    def counts(self) -> list[int]:
        """Number of users who last chose each model, ``[k]``."""
        return torch.bincount(self.chosen[self.chosen >= 0], minlength=len(self.separate)).tolist()

    @property
    def largest(self) -> int:
        """The model that most users last chose, the first of several."""
        return int(np.argmax(self.counts))

    def weights(self, cluster: int) -> Weights:
        """The trained variables of a model."""
        return {**self.shared, **self.separate[cluster]}


def own_names(module: nn.Module, shared: str) -> list[str]:
    """The trained variables of a classifier that differ between models, in their order.

    Args:
        module: an `ImageClassifier`.
        shared: ``encoder`` for those of the head (last layer, bottleneck, decoder), else all.
    """
    head = f"{BACKBONE}{new_part(module.get_submodule(BACKBONE[:-1]))}.".replace("..", ".")
    return [name for name in trained_names(module) if shared != "encoder" or name.startswith(head)]


def first_models(
    weights: Mapping[str, Tensor], k: int, distance: float, seed: int, draw: int
) -> list[dict[str, Tensor]]:
    """k models around some weights, which differ from each other.

    Args:
        weights: by variable.
        k: the number of models.
        distance: a, above 0 and at most 1. A variable w with mean m and standard deviation s becomes
            ``m + sqrt(1 - a^2) (w - m) + a s z`` with standard normal z.
        seed: the run's seed, which draws z with ``draw`` and the model's number.
        draw: the number of the draw.
    """
    kept, models = math.sqrt(1 - distance**2), []
    for number in range(k):
        generator, model = torch_stream(seed, "first models", draw, number), {}
        for name, w in weights.items():
            mean, noise = w.mean(), torch.randn(w.shape, generator=generator).to(w)
            model[name] = mean + kept * (w - mean) + distance * w.std(correction=0) * noise
        models.append(model)
    return models


def distance_of(setup: Setup) -> float:
    """How far the first models of a run differ, see `first_models`."""
    return float(setup.options.distance or (0.1 if setup.pretrained else 1.0))


@torch.no_grad()
def check_differ(setup: Setup, names: Sequence[str]) -> None:
    """Refuse first models with the same outputs, of which each user would choose the first, and no other one
    would ever be trained. The last layer of torchvision's vision transformers begins with zeros.

    Args:
        setup: has the network before its first step.
        names: the variables that differ between models.

    Raises:
        ValueError: one line with the remedy.
    """
    module = setup.module
    weights = {name: module.get_parameter(name) for name in names}
    images = (two_images(module.input_size).to(module.mean.device),)
    models = first_models(weights, 2, distance_of(setup), setup.seed, 0)
    first, second = (torch.func.functional_call(module, model, images) for model in models)
    if torch.equal(first, second):
        drawn = any(w.ndim > 1 for w in weights.values())
        remedy = "model.init to xavier" if drawn else "model.trained to another value"
        why = "the last layer is" if drawn else "all that it trains is"
        raise ValueError(f"ifca would start from equal models, since {why} constant at first: set {remedy}")


def least(losses: FloatArray, images: FloatArray) -> IntArray:
    """The model with the least loss for each user, the first of several; -1 for a user without images.

    Args:
        losses: ``[n, k]``, of each model.
        images: ``[n]``, the number of each user's images.

    Returns:
        ``[n]`` int64.
    """
    return np.where(images > 0, losses.argmin(1), -1).astype(np.int64)


def numbered(counts: Iterable[int]) -> dict[str, int]:
    """A count of each model by its number, as files and trackers have it."""
    return {str(number): int(count) for number, count in enumerate(counts)}


def together(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One line of ``metrics.jsonl`` for groups of users who trained apart, from that of each group."""
    line: dict[str, Any] = {key: sum(each[key] for each in lines) for key in ("users", "images")}
    if "left_out" in (lines[0] if lines else ()):
        line["left_out"] = sum(each["left_out"] for each in lines)
    for key, by in (("train_loss", "images"), ("bounded", "users")):
        known = [each for each in lines if key in each]
        if known:
            values, weights = ([each[name] for each in known] for name in (key, by))
            line[key] = round(float(np.average(values, weights=weights)), 6)
    return line
