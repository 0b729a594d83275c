"""A compression, an attack or a rule of one's own that keeps something between calls is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pfl_ext.aggregation.rule import RULES, AggregationRule, Mean
from pfl_ext.algorithms.optimizers import SERVER_OPTIMIZERS, OptimizerConfig, ServerOptimizer
from pfl_ext.attacks.attack import ATTACKS, Attack
from pfl_ext.compression.compressor import COMPRESSORS, Float32
from pfl_ext.configs import NoOptions
from tests.benchmarks.conftest import Refused, Train
from tests.benchmarks.core.test_private import PRIVATE


class Feedback(Float32):
    """Error feedback of whoever came last."""

    error: Any = 0.0

    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """Half of all, and what was left out before."""
        sent = [0.5 * (tensor + self.error) for tensor in update[:1]]
        self.error = 0.5 * update[0]
        return [*sent, *update[1:]]


class Replayed(Attack):
    """Sends what it was given before."""

    before: Any = None

    def update(self, update: Sequence[Tensor], rng: np.random.Generator, cohort_size: int) -> list[Tensor]:
        """The last update."""
        self.before, sent = list(update), self.before or list(update)
        return sent


class Centred(AggregationRule):
    """Clips around the last aggregate."""

    centre: Any = 0.0

    def aggregate(self, spool: Any, rows: Any) -> Any:
        """The mean of the updates, held near the last one."""
        self.centre = self.centre + np.clip(spool.read(0).astype(float) - self.centre, -0.1, 0.1)
        return self.centre


class Counting(torch.optim.SGD):
    """Its rate falls with its own count of steps."""

    def __init__(self, params: Any, config: OptimizerConfig, _: Any) -> None:
        super().__init__(params, lr=config.learning_rate)
        self.steps = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        self.steps += 1
        for group in self.param_groups:
            for x in group["params"]:
                x.data -= group["lr"] / self.steps * x.grad


class Grouped(Counting):
    """The count is in the group, which a checkpoint does not have."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        self.steps = self.param_groups[0].setdefault("steps", 0)
        super().step()
        self.param_groups[0]["steps"] = self.steps


class Wide(Counting):
    """The sum of gradients is in float64, as which it is not loaded."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """A step."""
        for x in self.param_groups[0]["params"]:
            total = self.state[x].setdefault("sum", torch.zeros_like(x, dtype=torch.float64))
            total += x.grad / 3
            x.data -= self.param_groups[0]["lr"] * total.float()


@pytest.mark.parametrize("kind", [Counting, Grouped, Wide])
def test_an_optimiser_that_a_checkpoint_does_not_hold_is_refused(
    kind: type[Counting], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    SERVER_OPTIMIZERS.names()  # complete
    monkeypatch.setitem(SERVER_OPTIMIZERS._things, "own", ServerOptimizer(kind, (), NoOptions))
    assert not refused("own steps in another way after", "--server.optimizer=own").exists()


@pytest.mark.parametrize("name", ["sgd", "adam", "yogi", "adagrad"])
def test_the_shipped_optimisers_go_on(name: str, train: Train) -> None:
    train(f"--server.optimizer={name}", "--federated.num_rounds=1")


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, kind in ((COMPRESSORS, Feedback), (ATTACKS, Replayed), (RULES, Centred), (RULES, Plain)):
        registry.names()  # complete
        monkeypatch.setitem(registry._things, "own" if kind is not Plain else "plain", kind)


class Plain(AggregationRule):
    """The mean, by a class of its own without options."""

    def aggregate(self, spool: Any, rows: Any) -> Any:
        """The mean."""
        return Mean(self.chosen).aggregate(spool, rows)


@pytest.mark.parametrize(
    "words",
    [
        ("--compression.kind=own",),
        ("--compression.kind=own", *PRIVATE),
        ("--attack.kind=own",),
        ("--aggregation.kind=own",),
    ],
    ids=" ".join,
)
def test_what_keeps_something_is_refused(words: tuple[str, ...], refused: Refused) -> None:
    assert not refused(" own gives another result after it had another update", *words).exists()


@pytest.mark.parametrize(
    "words",
    [
        *((f"--compression.kind={kind}",) for kind in ("top_k", "random_k", "sign", "uniform", "low_rank")),
        *((f"--attack.kind={kind}",) for kind in ("sign_flip", "boost", "gaussian", "alie", "label_flip")),
        *(
            (f"--aggregation.kind={kind}", "--federated.cohort_size=12")
            for kind in ("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "norm_bound")
        ),
        ("--aggregation.kind=plain",),
    ],
    ids=" ".join,
)
def test_all_others_are_not(words: tuple[str, ...], train: Train) -> None:
    train(*words, "--federated.num_rounds=1")


def test_a_rule_of_ones_own_has_one_update_of_each_user(refused: Refused) -> None:
    """A user that comes twice would count by its second update alone."""
    refused(
        "needs exactly one update of each user", "--aggregation.kind=plain", "--federated.replacement=true"
    )
