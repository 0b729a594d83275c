"""FedNAS' rounds against a plain loop in float64 on the same batches, and which images its steps take."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.core.config.benchmark import AnyRun, Run
from benchmarks.core.config.effects import check_training
from benchmarks.core.config.sections import Runtime, TrainingConfig
from benchmarks.core.config.trees import Tree, build, merge
from benchmarks.core.experiment import build_model
from benchmarks.core.federated import train_federated, training_data
from benchmarks.core.recorder import Recorder
from benchmarks.core.run_directory import RunDirectory
from pfl_ext.algorithms import fednas
from pfl_ext.models import darts, genotype
from pfl_ext.models.genotype import strongest
from pfl_ext.tasks.single_label import SingleLabel
from tests.pfl_ext.stores import NumberedStore, rows_of

LABELS, SIDE = 3, 8
BASE: Tree = {
    "data": {"image_size": SIDE},
    "model": {"arch": "darts_search", "cells": 3, "cell_channels": 2, "groups": 1, "input_size": SIDE},
    "augment": {"flip": "horizontal"},
    "local": {
        "learning_rate": 0.025,
        "schedule": "cosine",
        "final_learning_rate": 0.001,
        "momentum": 0.9,
        "weight_decay": 3e-4,
        "max_grad_norm": 0.5,  # which cuts in each step
        "batch_size": 2,
    },
    "federated": {"algorithm": "fednas", "num_rounds": 2},
    "evaluation": {"every_rounds": 1000, "best_by": "last"},
}
OPTIONS = {"alpha_learning_rate": 0.02, "alpha_weight_decay": 0.1, "train_loss_weight": 0.25}
FAST: Tree = {"federated": {"options": OPTIONS}}
"""Steps of alpha that are large enough to matter for w."""
State = dict[str, Tensor]


@contextlib.contextmanager
def small_cells() -> Iterator[None]:
    """Within, cells have two nodes and 5 edges, not four and 14, of which the search does not know."""
    with contextlib.ExitStack() as stack:
        for module in (darts, genotype):
            stack.enter_context(mock.patch.multiple(module, NODES=2, EDGES=5))
        yield


@pytest.fixture(autouse=True)
def few_edges() -> Iterator[None]:
    with small_cells():
        yield


class Photographs(NumberedStore):
    """Images of noise."""

    def __init__(self, sizes: Sequence[int], seed: int = 3) -> None:
        super().__init__(sizes, LABELS, SIDE)
        shape = (sum(sizes), SIDE, SIDE, 3)
        self._images = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)

    def read(self, rows: Any) -> Any:
        return self._images[rows], self.targets(rows)


def run_of(sizes: Sequence[int], *trees: Tree) -> AnyRun:
    tree = merge(BASE, {"federated": {"cohort_size": len(sizes)}})
    for more in trees:
        tree = merge(tree, more)
    config = build(TrainingConfig, tree, "test")
    check_training(config)
    return Run(config, build(Runtime, {"progress": False}, "test"))


class Trained(NamedTuple):
    states: list[State]
    """After each round, in float64."""
    lines: list[Mapping[str, Any]]
    findings: Tree


class Trace(Recorder):
    """Keeps the model after each round."""

    def step_done(self, step: int, values: Mapping[str, Any], state: Any) -> None:
        held = {name.removeprefix("backbone."): w.double() for name, w in state.items()}
        self.seen = [*getattr(self, "seen", []), held]
        self.said = [*getattr(self, "said", []), values]


def trained(run: AnyRun, store: Any, directory: Path, val: Any = None) -> Trained:
    """By what production calls."""
    files = RunDirectory(run, directory)
    files.begin()
    trace = Trace(files)
    module = build_model(run.config, LABELS, None, SingleLabel())
    train_federated(run, store, val or Photographs([2]), module, trace)
    return Trained(trace.seen, trace.said, trace.findings)


def gradients(net: nn.Module, state: State, batch: Any, names: Sequence[str]) -> State:
    """Gradients of the mean cross-entropy of a batch, in float64."""
    leaves = {name: state[name].clone().requires_grad_(name in names) for name in state}
    x, labels = batch
    loss = F.cross_entropy(torch.func.functional_call(net, leaves, (x,)), labels)
    found = torch.autograd.grad(loss, [leaves[name] for name in names])
    return dict(zip(names, found))


def search(net: nn.Module, state: State, epochs: Sequence[Any], rate: float, config: TrainingConfig) -> State:
    """Search in one process: each of an epoch's batches for w with one for alpha."""
    state, local = dict(state), config.local
    options = fednas.FedNASOptions(**config.federated.options or {})
    of_alpha = [name for name in state if name.startswith("alpha")]
    of_w = [name for name in state if name not in of_alpha]
    m = {name: torch.zeros_like(state[name]) for name in of_alpha}
    v, velocity, t = dict(m), State(), 0
    beta1, beta2 = options.alpha_beta1, options.alpha_beta2
    for first, second in epochs:
        for place, train in enumerate(first):
            if second:
                t += 1
                ours = gradients(net, state, train, of_alpha)
                theirs = gradients(net, state, second[place % len(second)], of_alpha)
                for name in of_alpha:
                    g = options.train_loss_weight * ours[name] + theirs[name]
                    g = g + options.alpha_weight_decay * state[name]
                    m[name] = beta1 * m[name] + (1 - beta1) * g
                    v[name] = beta2 * v[name] + (1 - beta2) * g**2
                    mean, square = m[name] / (1 - beta1**t), v[name] / (1 - beta2**t)
                    state[name] = state[name] - options.alpha_learning_rate * mean / (square.sqrt() + 1e-8)
            found = gradients(net, state, train, of_w)
            norm = float(torch.cat([g.flatten() for g in found.values()]).norm())
            factor = min(1.0, (local.max_grad_norm or norm) / norm)
            for name, g in found.items():
                g = g * factor + local.weight_decay * state[name]
                velocity[name] = local.momentum * velocity[name] + g if name in velocity else g
                state[name] = state[name] - rate * velocity[name]
    return state


def ready(module: Any, batch: Any) -> Any:
    images, targets, crops = batch
    return module.prepare(images, targets, crops)[0].double(), targets.argmax(1)


def each_user(run: AnyRun, store: Any, start: State, number: int) -> list[State]:
    """Where `search` takes each user of a round from ``start``."""
    config = run.config
    data = training_data(run, store, SingleLabel())
    module = build_model(config, LABELS, None, SingleLabel())
    net = copy.deepcopy(module.backbone).double()
    data.set_round(number)
    ends = []
    for user in range(len(store.user_ids)):
        both = fednas.halves(data.user_dataset(user), config.seed)
        size = config.local.batch_size
        epochs = [
            [[ready(module, batch) for batch in half.iter(size)] for half in both]
            for _ in range(config.local.num_epochs)
        ]
        ends.append(search(net, start, epochs, config.local_rate(number), config))
    return ends


def first_state(run: AnyRun) -> State:
    module = build_model(run.config, LABELS, None, SingleLabel())
    return {name: p.detach().double() for name, p in module.backbone.named_parameters()}


def moved(one: State, other: State, start: str) -> float:
    """The distance of two states' tensors of which the names begin so."""
    parts = [float((one[n] - other[n]).norm()) for n in one if n.startswith("alpha") == (start == "alpha")]
    return float(np.linalg.norm(parts))


def close(found: State, expected: State, start: State) -> None:
    """Each kind of variable is where it should be, by a part of the way that it went."""
    for kind in ("alpha", "w"):
        way = moved(expected, start, kind)
        assert way > 0
        assert moved(found, expected, kind) < 1e-3 * way, kind


def test_a_search_of_one_client_is_one_of_one_process(tmp_path: Path) -> None:
    run, store = run_of([5], FAST), Photographs([5])  # 2 batches for w, 1 for alpha, which is taken twice
    found = trained(run, store, tmp_path)
    state = start = first_state(run)
    for number, seen in enumerate(found.states):
        (state,) = each_user(run, store, state, number)
        close(seen, state, start)
        state = seen
    assert found.lines[0]["images"] == 5


def test_w_and_alpha_are_averaged_by_the_users_images(tmp_path: Path) -> None:
    sizes = [2, 7, 1]  # the last has no image for alpha
    run, store = run_of(sizes, FAST, {"federated": {"num_rounds": 1}}), Photographs(sizes)
    found, start = trained(run, store, tmp_path), first_state(run)
    ends = each_user(run, store, start, 0)
    shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    mean = {n: torch.tensordot(shares, torch.stack([end[n] for end in ends]), 1) for n in start}
    close(found.states[-1], mean, start)
    assert moved(found.states[-1], ends[0], "alpha") > 0.1 * moved(mean, start, "alpha")
    assert moved(ends[2], start, "alpha") == 0
    assert moved(ends[2], start, "w") > 0
    for kind, part in zip(("normal", "reduce"), found.lines[0]["genotype"].split()):
        edges = strongest(mean[f"alpha_{kind}"].tolist())
        assert part == f"{kind}=" + ",".join(f"{edge.operation}@{edge.input}" for edge in edges)
    assert found.findings["genotype"] == found.lines[0]["genotype"]


def seen_rows(monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """The images of all steps of w, and those by which alpha is chosen; the steps themselves are left out."""
    for_w, for_alpha = list[int](), list[int]()

    def alpha(model: Any, optimizer: Any, train: Any, val: Any, weight: float) -> None:
        for_w.extend(rows_of(train[0].numpy()))
        for_alpha.extend(rows_of(val[0].numpy()))

    def weights(model: Any, optimizer: Any, train: Any, max_norm: float | None) -> None:
        for_w.extend(rows_of(train[0].numpy()))

    monkeypatch.setattr(fednas, "alpha_step", alpha)
    monkeypatch.setattr(fednas, "weight_step", weights)
    return for_w, for_alpha


def test_a_search_reads_training_images_alone_and_its_halves_never_mix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [6, 5]
    for_w, for_alpha = seen_rows(monkeypatch)
    run = run_of(sizes, {"local": {"batch_size": 8}})
    store, val = NumberedStore(sizes, LABELS, SIDE), NumberedStore([20], LABELS, SIDE)
    trained(run, store, tmp_path / "a", val)
    assert set(for_w) | set(for_alpha) == set(range(sum(sizes)))
    assert not set(for_w) & set(for_alpha), "the same halves in every round"
    assert len(set(for_w)) == 3 + 3
    assert [len(set(for_alpha) & set(rows)) for rows in (range(6), range(6, 11))] == [3, 2]
