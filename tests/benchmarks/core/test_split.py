"""Split learning against the whole network in one place, and what crosses between client and server.

test_split DATA DIRECTORY          trains it, as one of the workers of a launcher
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.core.config.benchmark import AnyRun
from benchmarks.core.config.trees import Tree, merge
from benchmarks.core.federated import run_context, setup, training_data
from pfl_ext.algorithms.split import Split, Wire
from pfl_ext.models.classifier import ImageClassifier, build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.parts import parts_of
from pfl_ext.randomness import stream
from pfl_ext.tasks.multi_label import MultiLabel
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.core.quadratics import (
    CLASSES,
    SIDE,
    SquaredError,
    Users,
    classifier,
    run_of,
    trajectory,
    vector,
)
from tests.benchmarks.run_files import last_checkpoint

SEQUENTIAL = ("relay", "u_shaped")
MOMENTUM: Tree = {"local": {"momentum": 0.5, "weight_decay": 0.01}}


def module() -> ImageClassifier:
    """Two blocks and a head, with a layer in place after the second block."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        backbone = nn.Sequential(
            nn.Flatten(),
            nn.Linear(3 * SIDE * SIDE, 8),
            nn.Tanh(),
            nn.Linear(8, 6),
            nn.ReLU(inplace=True),
            nn.Linear(6, CLASSES),
        )
    return classifier(backbone)


def run_with(tree: Tree, **options: Any) -> AnyRun:
    return run_of(merge({"federated": {"algorithm": "split", "options": options}}, tree))


def algorithm(run: AnyRun) -> Split:
    data = training_data(run, Users(), SquaredError())
    return Split(run_context(run, setup(run.config, module(), data), lambda _: None))


def in_one_place(run: AnyRun, restart: bool) -> Any:
    """The whole network, trained by one process on the users' batches in the order of their turns."""
    config, model = run.config, module()
    data, local = training_data(run, Users(), SquaredError()), config.local
    seen = []

    def new() -> torch.optim.SGD:
        rate, decay = local.learning_rate, local.weight_decay
        return torch.optim.SGD(model.parameters(), rate, momentum=local.momentum, weight_decay=decay)

    optimizer = new()
    for number in range(config.federated.num_rounds):
        data.set_round(number)
        members = data.members(config.federated.cohort_size)
        for place in stream(config.seed, "order of turns", number).permutation(len(members)):
            optimizer = new() if restart else optimizer
            images = data.read(members[place])
            for batch in (b for _ in range(local.num_epochs) for b in images.iter(local.batch_size)):
                optimizer.zero_grad()
                torch.autograd.backward(model.loss(*batch))
                optimizer.step()
        seen.append(vector(model))
    return np.stack(seen)


@pytest.mark.parametrize(
    ("variant", "handed", "cut"),
    [
        *(("relay", *pair) for pair in (("restart", 2), ("handover", 1), ("handover", 2))),
        *(("u_shaped", handed, 1) for handed in ("restart", "handover")),
    ],
)
def test_users_in_turns_are_the_whole_network_in_one_place_to_the_bit(
    variant: str, handed: str, cut: int, tmp_path: Path
) -> None:
    tree = merge(MOMENTUM, {"federated": {"cohort_size": 3}, "local": {"straddle": False}})
    run = run_with(tree, variant=variant, cut=cut, momentum=handed)
    found, expected = trajectory(run, tmp_path, module()), in_one_place(run, handed == "restart")
    assert (found == expected).all()
    other = in_one_place(run, handed != "restart")
    assert (found[-1] != other[-1]).any(), "the test sees what becomes of momentum"


@pytest.mark.parametrize("cut", [1, 2])
def test_splitfed_is_fedavg(cut: int, tmp_path: Path) -> None:
    tree = merge(MOMENTUM, {"federated": {"cohort_size": 3}})
    found = trajectory(run_with(tree, variant="splitfed", cut=cut), tmp_path / "split", module())
    averaged = trajectory(run_of(tree), tmp_path / "fedavg", module())
    gaps = np.linalg.norm(found - averaged, axis=1) / np.linalg.norm(averaged, axis=1)
    assert gaps.max() < 1e-5, "float32, of which a round has 12 steps"


def crossings(variant: str, change: Callable[[Tensor, bool], Tensor] | None = None) -> Any:
    """One round of all users: the algorithm, its state before and after, and what was sent, in order."""
    sent: list[tuple[Tensor, bool]] = []
    real = Wire.send

    def send(self: Wire, tensor: Tensor, up: bool) -> Tensor:
        arrived = real(self, tensor, up)
        sent.append((arrived, up))
        return arrived if change is None else change(arrived, up)

    split = algorithm(run_with({}, variant=variant))
    before = split.init(0)
    with mock.patch.object(Wire, "send", send):
        after, line = split.round(before, 0)
    return split, before, after, sent, line


def test_activations_labels_and_gradients_cross_and_nothing_else() -> None:
    split, _, after, sent, _ = crossings("relay")
    batches = [sent[i : i + 3] for i in range(0, len(sent), 3)]
    for labels, activations, gradients in batches:
        assert [up for _, up in (labels, activations, gradients)] == [True, True, False]
        assert labels[0].shape[1:] == (CLASSES,)
        assert activations[0].shape == gradients[0].shape == (len(labels[0]), 8)
    assert all(tensor.grad_fn is None for tensor, _ in sent)
    assert not set(map(id, split.parts[0].parameters.values())) & set(
        map(id, split.parts[1].parameters.values())
    )
    handed = 4 * (8 * 12 + 8)
    users = split.context.users.num_users
    down, up = split.bytes(after)
    assert (down, up) == (round(split.wire.down / users) + handed, round(split.wire.up / users) + handed)
    assert up - down == round(2 * 26 * CLASSES / users), "the labels, one byte each, of two epochs"


def test_no_label_leaves_a_client_that_has_the_head() -> None:
    split, _, after, sent, _ = crossings("u_shaped")
    for batch in (sent[i : i + 4] for i in range(0, len(sent), 4)):
        assert [up for _, up in batch] == [True, False, True, False]
        assert [tensor.shape[1] for tensor, _ in batch] == [8, 6, 6, 8]
    handed, users = 4 * (8 * 12 + 8 + CLASSES * 7), split.context.users.num_users
    assert split.bytes(after) == (
        round(split.wire.down / users) + handed,
        round(split.wire.up / users) + handed,
    )


@pytest.mark.parametrize("variant", ["relay", "splitfed"])
def test_without_the_gradient_that_comes_back_the_client_learns_nothing(variant: str) -> None:
    split, before, after, *_ = crossings(variant, lambda tensor, up: tensor if up else tensor * 0)
    for name in split.parts[0].parameters:
        assert torch.equal(before.weights[f"backbone.{name}"], after.weights[f"backbone.{name}"])
    assert any((before.weights[n] != w).any() for n, w in after.weights.items())


def test_a_round_says_the_loss_that_its_users_had() -> None:
    *_, line = crossings("relay")
    assert (line["users"], line["images"]) == (5, 26)
    assert 0 < line["train_loss"] < 2


@pytest.mark.parametrize("name", ["lenet", "cifar_cnn", "resnet18", "vgg9"])
@pytest.mark.parametrize("keep_head", [False, True])
def test_parts_of_a_network_share_its_parameters_out(name: str, keep_head: bool) -> None:
    config = ModelConfig(arch=name, input_size=32)
    backbone = build_backbone(config, 4, torch.Generator().manual_seed(1))
    whole = ImageClassifier(backbone, task=MultiLabel(), input_size=32)
    parts = parts_of(whole, 2, keep_head)
    assert len(parts) == 2 + keep_head
    assert [n for part in parts for n in part.parameters] == [n for n, _ in backbone.named_parameters()]
    head = {n for n, _ in backbone.named_parameters()} & set(parts[-1].parameters)
    assert (len(head) == 2) == keep_head


def test_a_network_that_does_more_than_run_its_blocks_is_not_cut_there() -> None:
    backbone = build_backbone(
        ModelConfig(arch="mobilenet_v2", input_size=32), 4, torch.Generator().manual_seed(1)
    )
    whole = ImageClassifier(backbone, task=MultiLabel(), input_size=32)
    assert len(parts_of(whole, 2)) == 2
    with pytest.raises(ValueError, match="parts"):
        parts_of(whole, 2, keep_head=True)  # what it pools before the last layer is in no module


KEYS = ("--federated.algorithm=split", "--federated.num_rounds=3", "--local.momentum=0.9")


@pytest.mark.parametrize("variant", ["relay", "splitfed"])
def test_it_is_killed_and_goes_on_bit_for_bit(variant: str, train: Train) -> None:
    handed = "handover" if variant == "relay" else "restart"
    argv = (*KEYS, f"--federated.options.variant={variant}", f"--federated.options.momentum={handed}")
    _, directory = killed_and_resumed(train, 2, *argv)
    kept = last_checkpoint(directory)
    assert any(name.startswith("momentum/") for name in kept) == (variant == "relay")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--federated.options.cut=0"], "federated.options.cut is '0': "),
        (["--federated.options.variant=ring"], "federated.options.variant is 'ring': "),
        (["--federated.options.momentum=lost"], "federated.options.momentum is 'lost': "),
        (["--federated.options.cut=5"], "after 5 blocks (it has 4 blocks before its last layer, of which 4"),
        (
            ["--federated.options.cut=4", "--federated.options.variant=u_shaped"],
            "of which 3 at most can stay with the client)",
        ),
        (
            ["--federated.options.variant=splitfed", "--federated.options.momentum=handover"],
            "in splitfed, users train at the same time and pass nothing to each other",
        ),
        (
            ["--federated.options.variant=splitfed", "--federated.sampling=proportional"],
            "which would count twice if they are drawn in proportion to them: set federated.sampling to",
        ),
        (["--model.trained=bias"], "split trains all layers: set model.trained to all"),
        (["--local.max_grad_norm=1", "--local.clip_by=global"], "set local.clip_by to variable, or"),
        (["--server.learning_rate=1"], "has no effect where federated.algorithm is split"),
        (["--runtime.lanes=2"], "has no effect where federated.algorithm is split"),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = split"),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(words: list[str], message: str, refused: Refused) -> None:
    refused(message, KEYS[0], *words)


def test_turns_are_taken_in_one_process() -> None:
    run = run_with({}, variant="relay")
    chosen = setup(run.config, module(), training_data(run, Users(), SquaredError()))
    with (
        mock.patch("pfl_ext.algorithms.split.current", return_value=object()),
        pytest.raises(ValueError, match="split relay trains one user after another in a single process"),
    ):
        Split.check(chosen)
