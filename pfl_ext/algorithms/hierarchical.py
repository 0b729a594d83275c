"""Hierarchical FedAvg: each group of users runs some rounds of its own, then the groups are averaged
(Liu et al. 2020, "Client-Edge-Cloud Hierarchical Federated Learning", arXiv 1905.06641).

Each user belongs to one of G groups. Each group has an edge server between its users and the central server.
In round t the cohort S is drawn as in FedAvg, and divided by groups into S_g. Every group starts from the
server's model, ``y_g = x``, and makes K inner rounds of FedAvg with its part of the cohort,

    y_g <- y_g + sum_{i in S_g} w_i u_i / sum_{i in S_g} w_i,

with u_i the update of user i from y_g, and w_i its weight: 1 or its number of images. The server computes

    d = sum_g W_g (y_g - x) / sum_g W_g,   W_g = sum_{i in S_g} w_i,

and its optimiser steps on d as on FedAvg's mean update. With SGD at rate 1 the model is the weighted mean of
the groups' models. With K = 1 the algorithm is FedAvg. A group without a user in the cohort has the weight 0.

A user's batches and crops are drawn again in each inner round. Learning rates are those of round t.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import RunContext, Setup, Traffic, register, trained_bytes
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from pfl_ext.configs import STRICT
from pfl_ext.randomness import stream


@dataclass(frozen=True, config=STRICT)
class HierarchicalOptions:
    """Groups of users, and how often they average before the server does."""

    groups: PositiveInt = 2
    """Number of groups. Their sizes differ by at most one; the seed draws which users are in which group."""
    inner_rounds: PositiveInt = 2
    """K, the number of FedAvg rounds in each group in one round of the server."""


def groups_of(num_users: int, groups: int, seed: int) -> IntArray:
    """The group of each user, ``[num_users]`` from 0. Group sizes differ by at most one."""
    order, group = stream(seed, "groups of users").permutation(num_users), np.empty(num_users, np.int64)
    group[order] = np.arange(num_users) % groups
    return group


@register("hierarchical")
class Hierarchical(ServerModelAlgorithm):
    """FedAvg in groups. The state is the model with the server's optimiser."""

    options: ClassVar[type] = HierarchicalOptions

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients = Clients(context)
        self.group = groups_of(context.users.num_users, context.options.groups, context.seed)

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse groups without users.

        Raises:
            ValueError: one line with the numbers.
        """
        groups, users = setup.options.groups, setup.users.num_users
        if groups > users:
            raise ValueError(
                f"federated.options.groups is {groups}, but there are only {users} users: set it to at "
                f"most {users}"
            )

    def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
        """Run the inner rounds of each group, and make the server's step on the mean over groups."""
        x, cohort = self.clients.weights(), self.clients.cohort(number)
        parts = [cohort[self.group[cohort] == group] for group in range(self.context.options.groups)]
        parts = [part for part in parts if len(part)]
        weights = [self._weight(part) for part in parts]
        total = {n: torch.zeros_like(w, dtype=self.context.accumulate) for n, w in x.items()}
        lines = []
        for part, weight in zip(parts, weights):
            y, inner = self._inner_rounds(x, part, number)
            lines += inner
            if weight:
                for name, difference in total.items():
                    difference.add_(y[name] - x[name], alpha=weight / sum(weights))
        rate = self.clients.server_step(x, total, number)
        line = {"users": len(cohort), **_together(lines)}
        return state, {**line, "groups": len(parts), "learning_rate": rate}

    def _inner_rounds(self, x: Weights, users: IntArray, number: int) -> tuple[Weights, list[dict[str, Any]]]:
        """A group's model after its inner rounds from x, and the ``metrics.jsonl`` line of each."""
        lines, rounds = [], self.context.options.inner_rounds
        for inner in range(rounds):
            update, line = self.clients.mean_update(x, users, number, draws=number * rounds + inner)
            x = {name: w + update[name] for name, w in x.items()}
            lines.append(line)
        return x, lines

    def _weight(self, users: IntArray) -> float:
        """The total weight of some users of a cohort: their number, or the number of their images."""
        return float(self.context.users.images[users].sum() if self.context.by_images else len(users))

    def bytes(self, state: PyTorchModel) -> Traffic:
        """In each inner round a user of the cohort receives its group's model and sends an update back.

        Each group and the server also send each other one model in a round.
        """
        size = self.context.options.inner_rounds * trained_bytes(self.context.module)
        return Traffic(size, size)


def _together(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """One line for the inner rounds of all groups: sums over them, and the mean loss.

    A user counts in ``trainings`` once, and with all of its images, for each inner round.
    """
    line: dict[str, Any] = {
        "trainings": sum(inner["users"] for inner in lines),
        "images": sum(inner["images"] for inner in lines),
    }
    losses = [inner for inner in lines if "train_loss" in inner]
    if losses:
        total = sum(inner["images"] * inner["train_loss"] for inner in losses)
        line["train_loss"] = round(total / sum(inner["images"] for inner in losses), 6)
    return line
