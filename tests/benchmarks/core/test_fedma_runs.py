"""FedMA as runs: copies averaged to the network, frozen layers, killed and resumed, workers, refusals."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.fedma import FedMA
from pfl_ext.algorithms.matching import alive, neurons, reordered
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.user_images import UserImages
from pfl_ext.tasks.single_label import SingleLabel
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.run_files import last_checkpoint, lines, results

FEDMA = ("--federated.algorithm=fedma", "--federated.num_rounds=5", "--evaluation.best_by=last")


def test_copies_in_another_order_are_averaged_to_the_network(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[Weights] = []
    begin = FedMA.init

    def shuffled(self: FedMA, seed: int) -> list[Weights]:
        whole, rng = begin(self, seed)[0], np.random.default_rng(4)
        first.append(whole)
        users = [whole]
        for _ in self.users[1:]:
            own = whole
            for layer, following in pairwise(self.layers):
                own = reordered(own, layer, following, rng.permutation(layer.neurons))
            users.append(own)
        return users

    def still(
        self: Clients, weights: Sequence[Mapping[str, torch.Tensor]], users: Any, number: int
    ) -> tuple[list[Weights], dict[str, Any]]:
        return [{n: torch.zeros_like(w) for n, w in own.items()} for own in weights], {"users": len(users)}

    monkeypatch.setattr(FedMA, "init", shuffled)
    monkeypatch.setattr(Clients, "each_update", still)
    directory = train(*FEDMA)
    found = load_file(directory / "model.safetensors")
    for name, tensor in first[0].items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-8)
    assert all(line["moved"] > 0 for line in lines(directory)[:4])


def test_images_with_a_class_are_counted_before_they_are_mixed() -> None:
    labels = np.eye(4, dtype=np.uint8)[[0, 2, 2, 3, 2]]
    sampling, rng = (
        LocalSampling(input_size=4, batch_size=5, mixup=1.0),
        np.random.Generator(np.random.Philox(1)),
    )
    user = UserImages(np.zeros((5, 4, 4, 3), np.uint8), labels, "user", sampling, rng)
    users = SimpleNamespace(set_round=lambda number: None, user_dataset=lambda number: user)
    context = SimpleNamespace(users=users, module=SimpleNamespace(task=SingleLabel()))
    algorithm: Any = SimpleNamespace(context=context)
    assert FedMA._labels(algorithm, 0, 0).tolist() == [1, 0, 3, 1]


@pytest.mark.parametrize("engine", ["stock", "fast"])
def test_users_train_the_layers_from_one_on(
    engine: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's own SGD on copies of the network, whose lower layers have no gradient."""
    real, seen = FedMA._trained, []

    def compared(self: FedMA, users: list[Weights], place: int, number: int) -> Any:
        found, line = real(self, users, place, number)
        data, local = self.context.users, self.context.local_in(number)
        data.set_round(number)
        for user, own, trained in zip(self.users, users, found):
            module = copy.deepcopy(self.context.module)
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    parameter.copy_(own[name])
            opened = {n for layer in self.layers[place:] for n in layer.variables}
            parameters = [p for n, p in module.named_parameters() if n in opened]
            optimizer = torch.optim.SGD(parameters, lr=local.local_learning_rate)
            images = data.user_dataset(int(user))
            for _ in range(local.local_num_epochs):
                for batch in images.iter(local.local_batch_size):
                    optimizer.zero_grad()
                    torch.autograd.backward(module.loss(*batch))
                    optimizer.step()
            for name, parameter in module.named_parameters():
                assert torch.equal(trained[name], own[name]) == (name not in opened)
                distance = float((trained[name] - parameter.detach()).norm())
                assert distance <= 1e-4 * float((parameter.detach() - own[name]).norm())
        seen.append(place)
        return found, line

    monkeypatch.setattr(FedMA, "_trained", compared)
    train(*FEDMA, f"--runtime.engine={engine}", "--local.learning_rate=0.1", "--local.max_grad_norm=none")
    assert seen == [0, 1, 2, 3, 4]


def test_after_a_pass_all_users_have_one_network_whose_last_layer_is_by_class(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, trained = FedMA.round, FedMA._trained
    kept: dict[str, int] = {}
    sent: list[Weights] = []

    def noted(self: FedMA, users: list[Weights], place: int, number: int) -> Any:
        found, line = trained(self, users, place, number)
        sent[:] = found
        return found, line

    def compared(self: FedMA, state: list[Weights], number: int) -> Any:
        found = real(self, state, number)
        layer = self.layers[number % 5]
        if layer is not self.layers[-1]:
            return found
        counts = []
        for user in self.users:
            rows = self.context.users.partition.rows_of(int(user))
            counts.append((np.asarray(self.context.users.store.targets(rows)) > 0).sum(0))
        images = [len(self.context.users.partition.rows_of(int(user))) for user in self.users]
        for name in layer.variables:
            for k in range(layer.neurons):
                weights = [int(c[k]) for c in counts]
                weights = weights if sum(weights) else images
                parts = [w * own[name][k].double() / sum(weights) for w, own in zip(weights, sent)]
                expected = torch.stack(parts).sum(0)
                torch.testing.assert_close(found[0][1][name][k], expected.float(), rtol=1e-5, atol=1e-7)
        kept["classes"] = sum(sum(int(c[k]) for c in counts) > 0 for k in range(layer.neurons))
        return found

    monkeypatch.setattr(FedMA, "_trained", noted)
    monkeypatch.setattr(FedMA, "round", compared)
    directory = train(*FEDMA, "--runtime.checkpoint_every=5", "--local.max_images=none")
    assert kept["classes"] > 3
    tensors = last_checkpoint(directory)
    for name in [key[2:] for key in tensors if key.startswith("0/")]:
        assert all(torch.equal(tensors[f"0/{name}"], tensors[f"{place}/{name}"]) for place in (1, 2, 3))


def test_it_is_killed_within_a_pass_and_goes_on_bit_for_bit(train: Train) -> None:
    argv = (FEDMA[0], *FEDMA[2:], "--federated.num_rounds=10", "--local.learning_rate=0.1")
    whole, _ = killed_and_resumed(train, 7, *argv)
    assert [line["layer"] for line in lines(whole)[:10]] == [0, 1, 2, 3, 4] * 2


def test_layers_grow_by_neurons_that_only_some_users_have(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty neurons stay empty in training, and a new one has the mean of the users that have it."""
    real, new, only = FedMA.round, [], []

    def compared(self: FedMA, state: list[Weights], number: int) -> Any:
        place = number % 5
        layer = self.layers[place]
        before = [alive(neurons(own, layer)) for own in state]
        assert number or [int(a.sum()) for a in before] == [5] * 4
        trained, _ = FedMA._trained(self, state, place, number)
        for own, was in zip(trained, before):
            assert np.array_equal(alive(neurons(own, layer)), was)
        found, line = real(self, state, number)
        if place < 4:
            rows = [neurons(own, layer) for own in trained]
            together = neurons(found[0], layer)
            counts = [int(alive(r).sum()) for r in rows]
            assert max(counts) <= line["neurons"] == int(alive(together).sum()) <= sum(counts)
            new.append(line["neurons"] - max(counts))
            of_one = [v for r in rows for v in r[alive(r)] if np.isclose(together, v).all(1).any()]
            only.append(len(of_one))
        return found, line

    monkeypatch.setattr(FedMA, "round", compared)
    options = ("--federated.options.room=0.25", "--federated.options.gamma=1e4", "--federated.num_rounds=10")
    directory = train(*FEDMA, *options, "--local.learning_rate=0.1", "--federated.weighting=users")
    assert new[0] > 0
    assert only[0] > 0
    grown = [line["neurons"] for line in lines(directory)[:10]]
    assert all(first <= later for first, later in zip(grown[:4], grown[5:9]))
    assert results(directory)["neurons"] == grown[5:9]
    assert all(count <= most for count, most in zip(grown, (6, 16, 120, 84, 17) * 2))


def test_what_is_sent_is_counted(train: Train) -> None:
    found = results(train(*FEDMA))
    size = 4 * found["trainable_parameters"]
    up, down = size + 4 * 17, size + 4 * (6 + 16 + 120 + 84)
    assert found["traffic"] == {"down": -(-down // 5) + -(-size // 5), "up": -(-up // 5)}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--federated.num_rounds=7"], "set federated.num_rounds to a multiple of 5, such as 5"),
        (["--model.arch=resnet18", "--model.input_size=16"], "plain networks (no norms, branches or fr"),
        (
            ["--model.trained=head"],
            "set model.arch to lenet, fedavg_cnn, simple_cnn, cifar_cnn or vgg9, and model.trai",
        ),
        (["--model.bottleneck=8"], "fedma supports only plain networks"),
        (["--evaluation.best_by=loss"], "has a model for all users only after the last round: set"),
        (["--server.optimizer=sgd"], "--server.optimizer has no effect where federated.algorithm is fedma"),
        (["--federated.replacement=true"], "must not be drawn twice in a cohort: set federated.replacement"),
        (["--federated.options.passes=-1"], "federated.options.passes is '-1': "),
        (["--federated.options.growth=2"], "growth is not an option of fedma, which has passes, room"),
        (["--federated.options.room=1"], "federated.options.room is '1': "),
        (
            ["--federated.options.gamma=2"],
            "federated.options.gamma has no effect because no neuron can be added: remove",
        ),
        (["--config=pfl-r-17"], "privacy refuses federated.algorithm = fedma ("),
        (
            ["--federated.weighting=users", "--local_privacy.epsilon=4"],
            "local_privacy refuses federated.algo",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_in_one_line(words: list[str], message: str, refused: Refused) -> None:
    refused(message, *FEDMA, *words)


def test_networks_beyond_the_memory_are_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pfl_ext.models.memory.physical_memory", lambda: 1000)
    refused("fedma keeps a network of each of 4 users", *FEDMA)
