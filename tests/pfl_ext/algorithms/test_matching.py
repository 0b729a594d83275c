"""The matching of neurons: against all orders there are, and networks against what they compute."""

from __future__ import annotations

import copy
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from torch import nn

from pfl_ext.algorithms.clients import Weights
from pfl_ext.algorithms.matching import layers_of, matched, mean, neurons, reordered
from pfl_ext.models.small import NETWORKS

PLAIN = ("lenet", "simple_cnn", "cifar_cnn", "vgg9")


def network(name: str) -> nn.Sequential:
    torch.manual_seed(3)
    found = NETWORKS[name](10, 16)
    assert isinstance(found, nn.Sequential)
    for place, child in enumerate(found):
        if isinstance(child, (nn.Dropout, nn.Dropout2d)):
            found[place] = nn.Identity()
    return found


def weights_of(module: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def shuffled(module: nn.Sequential, seed: int) -> Weights:
    """Another order of the neurons of every layer but the last."""
    layers, found, rng = layers_of(module, ""), weights_of(module), np.random.default_rng(seed)
    for layer, following in pairwise(layers):
        found = reordered(found, layer, following, rng.permutation(layer.neurons))
    return found


@pytest.mark.parametrize("name", PLAIN)
def test_a_network_whose_neurons_are_reordered_computes_the_same(name: str) -> None:
    module = network(name).double()
    images = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    other = copy.deepcopy(module)
    other.load_state_dict(shuffled(module, 5))
    assert all((a != b).any() for a, b in zip(list(module.parameters())[:-2], other.parameters()))
    torch.testing.assert_close(other(images), module(images), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", PLAIN)
def test_reordered_copies_are_matched_back_exactly_in_all_layers(name: str) -> None:
    module = network(name)
    users = [weights_of(module), shuffled(module, 1), shuffled(module, 2)]
    layers = layers_of(module, "")
    for layer, following in pairwise(layers):
        found = matched([neurons(own, layer) for own in users], 0)
        users = [reordered(own, layer, following, places) for own, places in zip(users, found)]
        for own in users[1:]:
            assert all(torch.equal(own[key], users[0][key]) for key in layer.variables)
    for key, tensor in weights_of(module).items():
        assert all(torch.equal(own[key], tensor) for own in users)
        torch.testing.assert_close(mean([own[key] for own in users], [0.5, 0.2, 0.3]), tensor)


def test_two_users_are_matched_as_the_best_of_all_orders() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        one, other = rng.normal(size=(2, 5, 4))
        kept, places = matched([one, other], 0)
        assert kept.tolist() == list(range(5))
        best = min(permutations(range(5)), key=lambda order: ((one - other[list(order)]) ** 2).sum())
        assert places.tolist() == list(best)


def test_matching_again_never_makes_it_worse_and_can_make_it_better() -> None:
    rng, better = np.random.default_rng(1), 0
    for _ in range(20):
        users = list(rng.normal(size=(5, 6, 3)))

        def norm(
            passes: int, users: list[np.ndarray[tuple[int, ...], np.dtype[np.float64]]] = users
        ) -> float:
            total = np.sum([own[places] for own, places in zip(users, matched(users, passes))], axis=0)
            return float((total**2).sum())

        found = [norm(passes) for passes in (0, 1, 2, 50)]
        assert all(b >= a - 1e-9 for a, b in pairwise(found))
        better += found[-1] > found[0] + 1e-6
    assert better


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(12, 2)),
        nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(16, 2)),
        nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Linear(2, 2).requires_grad_(False)),
        nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2), nn.ReLU()),
        nn.Linear(3, 2),
    ],
)
def test_other_networks_are_refused(module: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"^fedma matches the neurons of plain networks, without norms,"):
        layers_of(module, "")
