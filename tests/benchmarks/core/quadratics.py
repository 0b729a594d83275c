"""Heterogeneous quadratics, trained by the production classes and, in float64, by the papers' equations.

A user's loss is the squared error of a linear map of its images, ``1/2 |W x + b - t|^2``, t the image's class
as a one-hot vector: a quadratic whose curvature and optimum differ between users, in a form that pfl's loop
and the engine both take. `trajectory` is the production's model after each round, `Direct` the equations'.

Letters: D numbers of an image, K classes, n images of a batch, P = K (D + 1) parameters.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.core.code_version import commit
from benchmarks.core.config.benchmark import AnyRun, Run
from benchmarks.core.config.effects import check_training
from benchmarks.core.config.sections import Runtime, TrainingConfig
from benchmarks.core.config.trees import Tree, build, merge
from benchmarks.core.facts import hardware
from benchmarks.core.federated import train_federated, training_data
from benchmarks.core.recorder import Recorder
from benchmarks.core.run_directory import RunDirectory
from dataset.arrays import FloatArray
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.user_images import UserImages
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.single_label import SingleLabel
from pfl_ext.tasks.task import Task

Array = FloatArray
SIDE, CLASSES = 2, 3
SIZES = (2, 7, 5, 11, 1)
ROUNDS, TABLE_ROUNDS = 4, 40
"""Rounds of the tests, and of the table that `main` prints."""
BASE: Tree = {
    "data": {"image_size": SIDE},
    "model": {"input_size": SIDE},
    "augment": {"flip": "horizontal"},
    "local": {"learning_rate": 0.1, "num_epochs": 2, "batch_size": 4, "straddle": True},
    "server": {"optimizer": "sgd", "learning_rate": 1.0},
    "federated": {"num_rounds": ROUNDS, "cohort_size": len(SIZES)},
    "evaluation": {"every_rounds": 1000, "best_by": "last"},
}


class SquaredError(SingleLabel):
    """``1/2 |z - t|^2`` of an image's outputs, with FedIR's weights where the targets have them."""

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 0.5 * (outputs.float() - (targets > 0).float()).square().sum(1)


class Users:
    """Five users: each has images of its own brightness and classes of its own preference."""

    def __init__(self) -> None:
        self.user_ids = [f"user-{u}" for u in range(len(SIZES))]
        self.user_offsets = np.concatenate([[0], np.cumsum(SIZES)]).astype(np.int64)
        rng = np.random.default_rng(5)
        images, targets = [], []
        for user, size in enumerate(SIZES):
            images.append(rng.integers(0, 100 + 30 * user, (size, SIDE, SIDE, 3)))
            classes = rng.choice(CLASSES, size, p=rng.dirichlet([0.5] * CLASSES))
            targets.append(np.eye(CLASSES)[classes])
        self._images = np.concatenate(images).astype(np.uint8)
        self._targets = np.concatenate(targets).astype(np.uint8)

    def read(self, rows: Any) -> tuple[Any, Any]:
        return self._images[rows], self._targets[rows]

    def targets(self, rows: Any) -> Any:
        return self._targets[rows]


def classifier(backbone: nn.Module, task: Task | None = None) -> ImageClassifier:
    """The network on images as they are, with `SquaredError` or another task."""
    return ImageClassifier(
        backbone,
        task=task or SquaredError(),
        input_size=SIDE,
        mean=(0, 0, 0),
        std=(1, 1, 1),
        exact_crops=True,
    )


def module() -> ImageClassifier:
    """The linear map, from weights that are no optimum of anybody's."""
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE * SIDE, CLASSES))
    with torch.no_grad():
        for parameter in backbone.parameters():
            values = torch.linspace(-1.5, 2.0, parameter.numel())
            parameter.copy_(values.view_as(parameter))
    return classifier(backbone)


def run_of(tree: Tree, engine: str = "stock") -> AnyRun:
    """A run of `BASE` with these keys."""
    config = build(TrainingConfig, merge(BASE, tree), "test")
    check_training(config)
    return Run(config, build(Runtime, {"engine": engine, "lanes": 2, "progress": False}, "test"))


def vector(model: nn.Module) -> Array:
    """Its parameters, ``[P]``."""
    return np.concatenate([p.detach().double().numpy().ravel() for p in model.parameters()])


T = TypeVar("T", bound=Recorder)


class Trace(Recorder):
    """Keeps the model after each round instead of writing lines."""

    def step_done(self, step: int, values: Mapping[str, Any], state: Any) -> None:
        model = self.checkpoints.algorithm.model(state)  # type: ignore[union-attr]
        self.seen = [*getattr(self, "seen", []), vector(model.pytorch_model)]


def traced(run: AnyRun, directory: Path, trace: type[T], network: ImageClassifier | None = None) -> T:
    """What a recorder has seen of a run that production trains, of `module` or of another network."""
    files = RunDirectory(run, directory)
    files.begin()
    recorder = trace(files)
    train_federated(run, Users(), Users(), network or module(), recorder)
    return recorder


def trajectory(run: AnyRun, directory: Path, network: ImageClassifier | None = None) -> Array:
    """``[rounds, P]`` by what production calls."""
    return np.stack(traced(run, directory, Trace, network).seen)


@dataclass
class Batch:
    """Features ``[n, D + 1]`` with a 1 at the end, one-hot targets ``[n, K]``, weights ``[n]`` of sum 1."""

    x: Array
    t: Array
    v: Array

    @staticmethod
    def of(images: Tensor, targets: Tensor, crops: Tensor) -> Batch:
        """As production hands them out: the crops flip, as crops are of the whole image."""
        pixels = images.double().numpy()
        assert (crops.numpy()[:, :4] == [0, 0, SIDE, SIDE]).all()
        flipped = np.where(crops.numpy()[:, 4, None, None, None] > 0, pixels[:, :, ::-1], pixels)
        x = flipped.transpose(0, 3, 1, 2).reshape(len(pixels), -1) / 255
        weights = targets.double().numpy()
        v = weights.max(1)
        return Batch(np.hstack([x, np.ones((len(x), 1))]), (weights > 0).astype(float), v / v.sum())

    def gradient(self, w: Array) -> Array:
        """At ``w`` ``[P]``: K x D weights, then K biases."""
        matrix = np.hstack([w[:-CLASSES].reshape(CLASSES, -1), w[-CLASSES:, None]])
        g = (self.v[:, None] * (self.x @ matrix.T - self.t)).T @ self.x
        return np.concatenate([g[:, :-1].ravel(), g[:, -1]])


ServerStep = Callable[[Array, Array], Any]


def server(config: TrainingConfig) -> ServerStep:
    """FedOpt's servers (Reddi et al. 2021, Algorithm 2; Kingma and Ba 2015): x and the mean update to x."""
    s = config.server
    state: dict[str, Any] = {"t": 0, "m": 0.0, "v": 0.0 if s.optimizer == "adam" else s.epsilon**2}

    def step(x: Array, update: Array) -> Any:
        state["t"] += 1
        t = state["t"]
        if s.optimizer == "sgd":
            state["m"] = s.momentum * state["m"] + update
            return x + s.learning_rate * state["m"]
        m = state["m"] = s.beta1 * state["m"] + (1 - s.beta1) * update
        if s.optimizer == "adam":
            v = state["v"] = s.beta2 * state["v"] + (1 - s.beta2) * update**2
            if s.adam_form == "torch":
                corrected = m / (1 - s.beta1**t)
                return x + s.learning_rate * corrected / (np.sqrt(v / (1 - s.beta2**t)) + s.epsilon)
            rate = s.learning_rate * math.sqrt(1 - s.beta2**t) / (1 - s.beta1**t)
            return x + rate * m / (np.sqrt(v) + s.epsilon)
        if s.optimizer == "yogi":
            state["v"] = state["v"] - (1 - s.beta2) * update**2 * np.sign(state["v"] - update**2)
        else:
            state["v"] = state["v"] + update**2
        return x + s.learning_rate * m / (np.sqrt(state["v"]) + s.epsilon)

    return step


@dataclass
class Direct:
    """Every algorithm by its paper's equations, in float64.

    ``c`` and ``own`` are SCAFFOLD's c and c_i, and FedDyn's h and h_i. ``defect`` makes one of their
    equations wrong, to see that a comparison notices: "sign" corrects in the other direction, as pfl's does;
    "selected" moves c by the cohort's whole mean, as NIID-Bench's did.
    """

    run: AnyRun
    defect: str = ""
    own: dict[int, Array] = field(default_factory=dict)

    def trajectory(self) -> Array:
        """``[rounds, P]``."""
        config, store = self.run.config, Users()
        data = training_data(self.run, store, SquaredError())
        x, step = vector(module()), server(config)
        self.c = np.zeros_like(x)
        self.own = {user: np.zeros_like(x) for user in range(len(SIZES))}
        seen = []
        for number in range(config.federated.num_rounds):
            data.set_round(number)
            x = step(x, self.mean_update(x, data))
            seen.append(x)
        return np.stack(seen)

    def mean_update(self, x: Array, data: FederatedImageDataset) -> Array:
        """What a cohort's users send, averaged."""
        config = self.run.config
        by_images = config.federated.weighting == "images"
        cohort = data.cohort(config.federated.cohort_size)
        turns: dict[int, int] = {}
        sent, weights, counts, changes = [], [], [], []
        for user in cohort.tolist():
            turn = turns[user] = turns.get(user, -1) + 1
            images = data.user_dataset(user, turn)
            weights.append(float(len(images)) if by_images else 1.0)
            update, count, change = self.user(x, user, images)
            sent.append(update)
            counts.append(count)
            changes.append(change)
        p = np.array(weights) / sum(weights)
        mean = np.sum([q * update for q, update in zip(p, sent)], axis=0)
        if config.federated.algorithm in ("scaffold", "feddyn"):
            total = (
                float(sum(min(n, config.local.max_images or n) for n in SIZES)) if by_images else len(SIZES)
            )
            share = 1.0 if self.defect == "selected" else sum(weights) / total
            self.c = self.c + share * np.sum([q * change for q, change in zip(p, changes)], axis=0)
            for user, change in zip(cohort.tolist(), changes):
                self.own[user] = self.own[user] + change
        if config.federated.algorithm == "feddyn":
            mean = mean - self.c / config.federated.chosen_options.alpha
        if config.federated.algorithm == "fednova":  # w <- w + tau_eff sum p_i d_i, d_i = update_i / |a_i|
            normalised = [q * update / a for q, update, (a, _) in zip(p, sent, counts)]
            steps = [count if config.federated.mu else a for a, count in counts]
            mean = float(np.dot(p, steps)) * np.sum(normalised, axis=0)
        return np.asarray(mean)

    def user(self, x: Array, user: int, images: UserImages) -> tuple[Array, tuple[float, int], Array]:
        """``y - x``; ``|a|_1`` and the number of steps; ``c_i+ - c_i``, or FedDyn's ``h_i+ - h_i``."""
        config = self.run.config
        local, federated = config.local, config.federated
        scaffold = federated.algorithm == "scaffold"
        at_gradient = federated.scaffold_correction != "step"
        own, rate = self.own[user], local.learning_rate
        mu = federated.mu or 0.0
        if federated.algorithm == "fedprox" and federated.mu is None:
            mu = 0.01
        correction = self.c - own if scaffold else np.zeros_like(x)
        if federated.algorithm == "feddyn":
            mu, correction = federated.chosen_options.alpha, -own
        if self.defect == "sign":
            correction = -correction
        start = np.zeros_like(x)
        for images_once in (Batch.of(*batch) for batch in images.once()):
            start += images_once.gradient(x) * len(images_once.x) / len(images)
        y, v, steps = x, np.zeros_like(x), 0
        counted, velocity, a = [], 0.0, 0.0
        for _ in range(local.num_epochs):
            for batch in (Batch.of(*batch) for batch in images.iter(local.batch_size)):
                g = batch.gradient(y) + mu * (y - x)
                if at_gradient:
                    g = g + correction
                v = local.momentum * v + g + local.weight_decay * y
                y = y - rate * v
                if not at_gradient:
                    y = y - rate * correction
                steps += 1
                velocity = local.momentum * velocity + 1
                a += velocity
                counted.append(a)
        if mu and federated.algorithm == "fednova":
            a = proximal_sum(steps, local.momentum, rate * mu)
        if federated.algorithm == "feddyn":
            change = -mu * (y - x)
        elif federated.scaffold_option == "I":
            change = start - own
        else:
            divisor = a if at_gradient else steps
            change = -self.c + (x - y) / (divisor * rate)
        return y - x, (a, steps), change


def proximal_sum(steps: int, momentum: float, pull: float) -> float:
    """``|a|_1`` by running a step's gradient of 1 through momentum and proximal pull to the end."""
    total = 0.0
    for first in range(steps):
        position = velocity = 0.0
        for step in range(steps):
            velocity = momentum * velocity + pull * position + (1.0 if step == first else 0.0)
            position -= velocity
        total += abs(position)
    return total


USERS: Tree = {"federated": {"weighting": "users"}}
MOMENTUM: Tree = {"local": {"momentum": 0.6, "weight_decay": 0.02, "learning_rate": 0.05}}


def scaffold(option: str, correction: str = "gradient", weighting: str = "users") -> Tree:
    keys = {"algorithm": "scaffold", "scaffold_option": option, "scaffold_correction": correction}
    return {"federated": {**keys, "weighting": weighting}}


def feddyn(alpha: float = 0.5, weighting: str = "users") -> Tree:
    return {"federated": {"algorithm": "feddyn", "options": {"alpha": alpha}, "weighting": weighting}}


def adaptive(name: str, **more: Any) -> Tree:
    return {"server": {"optimizer": name, "learning_rate": 0.05, "epsilon": 0.05, **more}}


ALGORITHMS: dict[str, Tree] = {
    "fedavg, images": {},
    "fedavg, users": USERS,
    "fedavg, momentum and decay": MOMENTUM,
    "fedprox, mu 0.01": {"federated": {"algorithm": "fedprox"}},
    "fedprox, mu 2": {"federated": {"algorithm": "fedprox", "mu": 2.0}},
    "fednova": {"federated": {"algorithm": "fednova"}},
    "fednova, momentum": merge(MOMENTUM, {"federated": {"algorithm": "fednova"}}),
    "fednova, mu 2": {"federated": {"algorithm": "fednova", "mu": 2.0}},
    "fedavgm": {"server": {"momentum": 0.7, "learning_rate": 0.3}},
    "fedopt, adam as keras": adaptive("adam"),
    "fedopt, adam as torch": adaptive("adam", adam_form="torch"),
    "fedopt, yogi": adaptive("yogi", beta2=0.99),
    "fedopt, adagrad": adaptive("adagrad"),
    "fedvc": merge(USERS, {"local": {"virtual_size": 6}, "federated": {"sampling": "proportional"}}),
    "fedir": {"federated": {"reweight": "fedir"}},
    "fedir, at most 1.5": {"federated": {"reweight": "fedir", "max_importance": 1.5}},
    "scaffold I": scaffold("I"),
    "scaffold II": scaffold("II"),
    "scaffold I, images": scaffold("I", weighting="images"),
    "scaffold II, images": scaffold("II", weighting="images"),
    "scaffold I, after the step": scaffold("I", "step"),
    "scaffold II, momentum": merge(MOMENTUM, scaffold("II")),
    "scaffold II, after the step, momentum": merge(MOMENTUM, scaffold("II", "step")),
    "feddyn": feddyn(),
    "feddyn, alpha 2, images": feddyn(2.0, "images"),
    "feddyn, momentum": merge(MOMENTUM, feddyn()),
    "feddyn, server momentum": merge({"server": {"momentum": 0.5, "learning_rate": 0.3}}, feddyn()),
}
PARTICIPATION: dict[str, Tree] = {"full": {}, "partial": {"federated": {"cohort_size": 3}}}
STEPS = -(-2 * max(SIZES) // 4)
TOLERANCE = 2**-24 * 8 * ROUNDS * STEPS
"""Relative error of the whole vector after `ROUNDS` rounds in float32, at most: no step is expansive here, so
that each adds its own roundings (of the product, the gradient, the update, the sums: fewer than eight) and
none grows."""


def distances(ours: Array, theirs: Array) -> Array:
    """Distance of each round's two vectors, relative to the second's norm."""
    return np.asarray(np.linalg.norm(ours - theirs, axis=1) / np.linalg.norm(theirs, axis=1))


def main() -> None:
    """Print the table."""
    print(f"{hardware()}; torch {torch.__version__}; commit {commit()}; one thread, n = 1")
    tolerance = TOLERANCE * TABLE_ROUNDS / ROUNDS
    print(f"largest relative distance over {TABLE_ROUNDS} rounds; the tolerance is {tolerance:.1e}")
    engines = ("stock", "fast")
    columns = [f"{part}, {engine}" for part in PARTICIPATION for engine in engines]
    print("| algorithm | " + " | ".join(columns) + " |")
    print("|---" * (1 + len(columns)) + "|")
    torch.set_num_threads(1)
    for name, tree in ALGORITHMS.items():
        found = []
        for part in PARTICIPATION.values():
            long = merge(merge(tree, part), {"federated": {"num_rounds": TABLE_ROUNDS}})
            expected = Direct(run_of(long)).trajectory()
            for engine in engines:
                with tempfile.TemporaryDirectory() as directory:
                    ours = trajectory(run_of(long, engine), Path(directory))
                found.append(f"{distances(ours, expected).max():.1e}")
        print(f"| {name} | " + " | ".join(found) + " |", flush=True)


if __name__ == "__main__":
    main()
