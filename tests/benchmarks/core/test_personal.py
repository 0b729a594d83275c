"""Personalised algorithms beside their papers' equations in float64, and beside FedAvg where they are it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.core.config.trees import Tree, merge
from benchmarks.core.federated import training_data
from benchmarks.core.recorder import Recorder
from pfl_ext.algorithms.clients import line_of
from pfl_ext.tasks.ranking import Diverged
from tests.benchmarks.core import quadratics
from tests.benchmarks.core.quadratics import (
    CLASSES,
    MOMENTUM,
    SIZES,
    USERS,
    Array,
    Batch,
    Trace,
    run_of,
    server,
    traced,
    vector,
)

NAMES = ("fedper", "fedrep", "ditto", "pfedme")
U, P = len(SIZES), CLASSES * (3 * quadratics.SIDE**2 + 1)
BIAS = np.arange(P) >= P - CLASSES
"""The variables that stay with the user where ``personal`` is the bias."""


def tree_of(name: str, **options: Any) -> Tree:
    """Nobody is scored: all images are trained on, as FedAvg's are."""
    return {"federated": {"algorithm": name, "options": {"held_out": 0, **options}}}


def vectors(algorithm: Any, users: int) -> Tensor:
    """What the users keep, ``[users, p]``."""
    return torch.stack([algorithm.vector_of(user, algorithm.first) for user in range(users)])


class Kept(Trace):
    """Keeps what users have after each round, too."""

    def step_done(self, step: int, values: Mapping[str, Any], state: Any) -> None:
        super().step_done(step, values, state)
        algorithm: Any = self.checkpoints.algorithm
        if hasattr(algorithm, "parts"):
            self.kept = [*getattr(self, "kept", []), vectors(algorithm, U).double().numpy()]


def found_by(tree: Tree, directory: Path, engine: str = "fast") -> tuple[Array, Array]:
    """Production's models ``[rounds, P]``, and what all users have after each round, ``[rounds, U, p]``."""
    trace = traced(run_of(tree, engine), directory, Kept)
    return np.stack(trace.seen), np.stack(getattr(trace, "kept", [np.zeros((U, 0))]))


class Equations:
    """Local SGD of a run, in float64."""

    def __init__(self, tree: Tree) -> None:
        self.config = run_of(tree).config
        self.options = tree["federated"]["options"]
        self.data = training_data(run_of(tree), quadratics.Users(), quadratics.SquaredError())

    def epochs(
        self, y: Array, images: Any, epochs: int, moved: Any = None, pull: Any = None, rate: Any = None
    ) -> Array:
        """Where SGD from y ends; ``moved``: which of the P; ``pull``: lambda, and where to."""
        local, v = self.config.local, np.zeros_like(y)
        rate = local.learning_rate if rate is None else rate
        mask = np.ones(P) if moved is None else np.asarray(moved, float)
        for _ in range(epochs):
            for batch in images.iter(local.batch_size):
                g = Batch.of(*batch).gradient(y)
                g = g if pull is None else g + pull[0] * (y - pull[1])
                v = local.momentum * v + g + local.weight_decay * y
                y = y - rate * v * mask
        return y

    def user(self, name: str, x: Array, own: Array, images: Any) -> tuple[Array, Array]:
        """A user's update of what is shared, and what it has of its own (all P) afterwards."""
        local, options = self.config.local, self.options
        everything, number = np.arange(len(images)), local.num_epochs
        if name == "fedper":
            y = self.epochs(np.where(BIAS, own, x), images, number)
            return np.where(BIAS, 0, y - x), y
        if name == "fedrep":
            first = images.part(everything, 0, options["personal_epochs"])
            rate = options.get("personal_learning_rate")
            y = self.epochs(np.where(BIAS, own, x), first, options["personal_epochs"], BIAS, rate=rate)
            y = self.epochs(y, images, number, ~BIAS)
            return np.where(BIAS, 0, y - x), y
        if name == "ditto":
            again = images.part(everything, 0, options["personal_epochs"])
            rate = options.get("personal_learning_rate")
            v = self.epochs(
                own, again, options["personal_epochs"], None, (options["proximal_weight"], x), rate
            )
            return self.epochs(x, images, number) - x, v
        w, theta, weight = x, x, options["proximal_weight"]
        assert not local.momentum
        for _ in range(number):
            for batch in (Batch.of(*batch) for batch in images.iter(local.batch_size)):
                for _ in range(options["personal_steps"]):
                    g = batch.gradient(theta) + weight * (theta - w) + local.weight_decay * theta
                    theta = theta - options["personal_learning_rate"] * g
                w = w - local.learning_rate * weight * (w - theta)
        return w - x, theta

    def trajectory(self, name: str) -> tuple[Array, Array]:
        """As `found_by`; all P of each user, of those that it does not keep the model's."""
        federated, x = self.config.federated, vector(quadratics.module())
        own, step, models, kept = np.tile(x, (U, 1)), server(self.config), [], []
        for number in range(federated.num_rounds):
            self.data.set_round(number)
            cohort = self.data.cohort(federated.cohort_size).tolist()
            updates, weights = [], []
            for user in cohort:
                images = self.data.user_dataset(user)
                update, own[user] = self.user(name, x, own[user], images)
                updates.append(update)
                weights.append(len(images) if federated.weighting == "images" else 1)
            x = step(x, np.average(updates, axis=0, weights=weights))
            models.append(x)
            kept.append(own.copy())
        return np.stack(models), np.stack(kept)


OPTIONS: dict[str, Tree] = {
    "fedper": {"personal": "1.bias"},
    "fedrep": {"personal": "1.bias", "personal_epochs": 3},
    "ditto": {"proximal_weight": 0.5, "personal_epochs": 3},
    "pfedme": {"proximal_weight": 2.0, "personal_steps": 3, "personal_learning_rate": 0.05},
}
CASES: dict[str, Tree] = {
    **{f"{name}, all users": tree_of(name, **OPTIONS[name]) for name in NAMES},
    **{
        f"{name}, 3 of 5 users": merge(tree_of(name, **OPTIONS[name]), {"federated": {"cohort_size": 3}})
        for name in NAMES
    },
    "fedper, momentum": merge(merge(tree_of("fedper", **OPTIONS["fedper"]), MOMENTUM), USERS),
    "fedrep, momentum, a rate of its own": merge(
        tree_of("fedrep", **OPTIONS["fedrep"], personal_learning_rate=0.02), MOMENTUM
    ),
    "ditto, momentum, a rate of its own": merge(
        tree_of("ditto", **OPTIONS["ditto"], personal_learning_rate=0.02), MOMENTUM
    ),
    "pfedme, users, beta 0.5": merge(
        merge(tree_of("pfedme", **OPTIONS["pfedme"]), USERS), {"server": {"learning_rate": 0.5}}
    ),
    "fedper, adam": merge(
        tree_of("fedper", **OPTIONS["fedper"]),
        {"server": {"optimizer": "adam", "learning_rate": 0.05, "epsilon": 0.05}},
    ),
}
TOLERANCE = 5 * quadratics.TOLERANCE
"""Up to five times the steps that it is for: three epochs more, or three steps on each minibatch."""


@pytest.mark.parametrize("case", CASES)
def test_users_train_as_the_papers_equations_say(case: str, tmp_path: Path) -> None:
    name = case.split(",")[0]
    models, kept = found_by(CASES[case], tmp_path)
    expected, own = Equations(CASES[case]).trajectory(name)
    assert quadratics.distances(models, expected).max() < TOLERANCE
    own = own[:, :, BIAS] if name in ("fedper", "fedrep") else own
    assert kept.shape == own.shape
    for user in range(U):
        assert quadratics.distances(kept[:, user], own[:, user]).max() < TOLERANCE
    assert np.ptp(kept[-1], axis=0).max() > 0.05, "users differ"


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
@pytest.mark.parametrize("more", [{}, merge(MOMENTUM, {"federated": {"cohort_size": 3}})])
def test_without_a_personal_layer_it_is_fedavg(name: str, more: Tree, tmp_path: Path) -> None:
    engine = "fast" if name == "fedper" else "stock"
    ours, _ = found_by(merge(tree_of(name, personal=None), more), tmp_path / "ours", engine)
    fedavg, _ = found_by(more, tmp_path / "fedavg", engine)
    assert quadratics.distances(ours, fedavg).max() < quadratics.TOLERANCE
    other, _ = found_by(merge(tree_of(name, personal="1.bias"), more), tmp_path / "other", engine)
    assert quadratics.distances(other, fedavg).max() > 1000 * quadratics.TOLERANCE


@pytest.mark.parametrize("name", ["fedper", "fedrep"])
def test_the_training_loss_is_that_of_the_steps_of_what_is_shared(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[float] = []

    def noted(seen: Tensor) -> Any:
        counted.append(float(seen[:, 2].sum()))
        return line_of(seen)

    monkeypatch.setattr("pfl_ext.algorithms.personalised.line_of", noted)
    tree = tree_of(name, **OPTIONS[name])
    found_by(tree, tmp_path)
    assert set(counted) == {run_of(tree).config.local.num_epochs * sum(quadratics.SIZES)}


def test_dittos_server_has_fedavgs_model_and_with_lambda_0_users_train_alone(tmp_path: Path) -> None:
    some = {"federated": {"cohort_size": 3}}
    ditto, own = found_by(merge(tree_of("ditto", proximal_weight=0), some), tmp_path / "ditto")
    fedavg, _ = found_by(some, tmp_path / "fedavg")
    assert quadratics.distances(ditto, fedavg).max() < quadratics.TOLERANCE
    _, alone = found_by(merge(tree_of("fedper", personal="all"), some), tmp_path / "alone")
    pulled = found_by(merge(tree_of("ditto", proximal_weight=0.1), some), tmp_path / "pulled")[1]
    for user in range(U):
        assert quadratics.distances(own[:, user], alone[:, user]).max() < quadratics.TOLERANCE
    assert np.abs(pulled[-1] - alone[-1]).max() > 1e-3


@pytest.mark.parametrize("name", ["ditto", "pfedme"])
def test_a_users_own_model_that_diverges_ends_the_run_after_that_round(name: str, tmp_path: Path) -> None:
    options = {**OPTIONS[name], "personal_learning_rate": 1e30}
    with pytest.raises(Diverged, match="round 0 ended with numbers that are not finite"):
        traced(run_of(tree_of(name, **options)), tmp_path, Recorder)


def test_where_all_variables_are_personal_the_server_learns_nothing(tmp_path: Path) -> None:
    models, kept = found_by(tree_of("fedper", personal="all"), tmp_path)
    assert (models == vector(quadratics.module())).all()
    assert (kept[0] != vector(quadratics.module())).any()


def test_pfedmes_own_models_are_near_the_proximal_point(tmp_path: Path) -> None:
    """With one minibatch of all images and many steps, theta solves grad F(theta) = lambda (w - theta)."""
    options = {"proximal_weight": 2.0, "personal_steps": 100, "personal_learning_rate": 0.1}
    local = {"local": {"batch_size": 64, "num_epochs": 1, "straddle": False}, "federated": {"num_rounds": 1}}
    tree = merge(tree_of("pfedme", **options), local)
    _, theta = found_by(tree, tmp_path)
    data, x = (
        training_data(run_of(tree), quadratics.Users(), quadratics.SquaredError()),
        vector(quadratics.module()),
    )
    data.set_round(0)
    for user in range(U):
        batch = Batch.of(*next(iter(data.user_dataset(user).iter(64))))
        gradient = batch.gradient(theta[0, user]) + 2.0 * (theta[0, user] - x)
        assert np.linalg.norm(gradient) < 1e-4 * np.linalg.norm(batch.gradient(x))


@pytest.mark.parametrize("personal", [None, "1.bias"])
def test_a_user_is_tuned_before_it_is_scored_and_that_is_undone(personal: str | None, tmp_path: Path) -> None:
    """All variables where none is personal: fine-tuned FedAvg."""
    tree = merge(
        tree_of("fedper", personal=personal, tune_epochs=3), {"local": {"schedule": "poly", "momentum": 0.5}}
    )
    run = run_of(tree)
    trace = traced(run, tmp_path, Kept)
    algorithm: Any = trace.checkpoints.algorithm
    equations, x, number = Equations(tree), trace.seen[-1], quadratics.ROUNDS
    equations.data.set_round(number)
    rate = run.config.local_rate(number - 1)
    assert rate < run.config.local.learning_rate
    weights, kept = algorithm.clients.weights(), vectors(algorithm, U)
    for user in range(U):
        images = equations.data.user_dataset(user)
        start = x if personal is None else np.concatenate([x[:-CLASSES], trace.kept[-1][user]])
        part = images.part(np.arange(len(images)), 0, 3)
        expected = equations.epochs(start, part, 3, None if personal is None else BIAS, rate=rate)
        found = algorithm.own_model(weights, kept[user], user, number)
        found = np.concatenate([w.double().numpy().ravel() for w in found.values()])
        assert np.linalg.norm(found - expected) < TOLERANCE * np.linalg.norm(expected)
        assert np.linalg.norm(found - start) > 1e-3
    assert (vectors(algorithm, U) == kept).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_cohort_without_images_leaves_the_model_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quadratics, "SIZES", (4, 0))
    monkeypatch.setattr(f"{__name__}.U", 2)
    tree = merge(tree_of(name, **OPTIONS[name]), {"federated": {"cohort_size": 1}})
    models, _ = found_by(tree, tmp_path)
    steps = np.diff(np.concatenate([vector(quadratics.module())[None], models]), axis=0)
    assert np.isfinite(models).all()
    still = (steps == 0).all(1)
    assert set(still.tolist()) == {False, True}, "cohorts of the user without images, and of the other"
