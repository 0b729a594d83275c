"""The matching of neurons: against all orders there are, and networks against what they compute."""

from __future__ import annotations

import copy
import math
from itertools import pairwise, permutations

import numpy as np
import pytest
import torch
from torch import nn

from pfl_ext.algorithms.clients import Weights
from pfl_ext.algorithms.matching import (
    Belief,
    Neurons,
    Places,
    alive,
    layers_of,
    matched,
    mean,
    neurons,
    reordered,
)
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.ranking import Diverged

PLAIN = ("lenet", "fedavg_cnn", "simple_cnn", "cifar_cnn", "vgg9")


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
        found = matched([neurons(own, layer) for own in users], 0, Belief())
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
        kept, places = matched([one, other], 0, Belief())
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
            total = np.sum(
                [own[places] for own, places in zip(users, matched(users, passes, Belief()))], axis=0
            )
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
    with pytest.raises(
        ValueError, match=r"^fedma supports only plain networks \(no norms, branches or frozen layers\)"
    ):
        layers_of(module, "")


def _posterior(users: list[Neurons], found: list[Places], belief: Belief) -> float:
    """Log of the joint density of the users' neurons at these places and of the most likely global neurons,
    with the Indian buffet's prior of which user has which, up to a constant. The last user has k neurons that
    no other has, which by Yurochkin et al. 2019 cost log k!."""
    count = len(users)
    placed = np.stack([own[places] for own, places in zip(users, found)])  # [J, N, D]
    holders = np.stack([alive(own) for own in placed]).sum(0)
    log = 0.0
    for i, m in enumerate(holders):
        if m == 0:
            continue
        values = placed[:, i][alive(placed[:, i])]  # [m, D]
        center = values.sum(0) / (m + (belief.sigma / belief.sigma0) ** 2)
        log -= ((values - center) ** 2).sum() / (2 * belief.sigma**2)
        log -= (center**2).sum() / (2 * belief.sigma0**2)
        log += math.log(belief.gamma / count)
        log += math.lgamma(m) + math.lgamma(count - m + 1) - math.lgamma(count)
    return log - math.lgamma(int(((holders == 1) & alive(placed[-1])).sum()) + 1)


def test_neurons_that_are_not_finite_are_a_model_that_has_diverged() -> None:
    users = [np.ones((3, 2)), np.full((3, 2), np.nan)]
    with pytest.raises(Diverged, match="neurons are not finite: the model has diverged, lower local"):
        matched(users, 1, Belief())


def test_a_user_is_placed_as_the_most_likely_of_all_ways() -> None:
    """Two users with two neurons each, in layers of four: all ways of sharing neurons, by enumeration."""
    rng, shared = np.random.default_rng(2), set()
    for case in range(30):
        users = [np.concatenate([rng.normal(size=(2, 3)) * 2, np.zeros((2, 3))]) for _ in range(2)]
        near = case % 3  # so many of the second user's are near those of the first, in the other order
        users[1][:near] = users[0][:2][::-1][:near] + 0.5 * rng.normal(size=(near, 3))
        belief = Belief(sigma=0.7, sigma0=1.5, gamma=3.0)
        found = matched(users, 0, belief)
        ways = [[np.arange(4), np.array(way)] for way in permutations(range(4))]
        best = max(_posterior(users, way, belief) for way in ways)
        assert _posterior(users, found, belief) == pytest.approx(best, rel=1e-12)
        shared.add(int((alive(users[0]) & alive(users[1][found[1]])).sum()))
    assert shared == {0, 1, 2}


def test_neurons_that_one_user_has_become_further_ones() -> None:
    """Three users share three of four neurons; the fourth of the last is unlike all others."""
    rng = np.random.default_rng(3)
    common = rng.normal(size=(4, 20))
    users = []
    for user in range(3):
        own = np.zeros((6, 20))
        order = rng.permutation(4)
        own[:4] = common[order] + 0.01 * rng.normal(size=(4, 20))
        users.append(own)
        if user == 2:
            own[list(order).index(1)] = rng.normal(size=20)
    found = matched(users, 5, Belief(sigma=0.1))
    holders = np.stack([alive(own[places]) for own, places in zip(users, found)])
    assert sorted(holders.sum(0)) == [0, 1, 2, 3, 3, 3]
    for i in range(6):
        rows = [own[places[i]] for own, places in zip(users, found) if alive(own)[places[i]]]
        assert all(np.abs(a - b).max() < 0.1 for a, b in pairwise(rows))
