"""Graphs of users and their mixing matrices."""

from __future__ import annotations

from typing import Any, get_args

import networkx as nx
import numpy as np
import pytest
import torch

from pfl_ext.algorithms.decentralised import Models, mixed
from pfl_ext.algorithms.dsgd import DSGD, DSGDOptions
from pfl_ext.algorithms.pushsum import PushSum, PushSumOptions
from pfl_ext.algorithms.topologies import Directed, Undirected, directed, metropolis, undirected
from pfl_ext.randomness import stream

N = 12
UNDIRECTED, DIRECTED = get_args(Undirected), get_args(Directed)
MATRICES: list[tuple[Any, Any]] = [(DSGD, DSGDOptions(graph=kind)) for kind in UNDIRECTED] + [
    (PushSum, PushSumOptions(graph=kind)) for kind in DIRECTED
]
VARYING: list[tuple[Any, Any]] = [
    (DSGD, DSGDOptions(graph=kind, time_varying=True)) for kind in UNDIRECTED if kind != "complete"
]
VARYING += [(PushSum, PushSumOptions(graph=kind, time_varying=True)) for kind in ("ring", "exponential")]
VARYING += [(PushSum, PushSumOptions(graph="random", time_varying=True))]
VARYING += [(PushSum, PushSumOptions(graph="one_peer_exponential"))]


@pytest.mark.parametrize("n", [1, 2, 6, N])
@pytest.mark.parametrize("kind", UNDIRECTED)
def test_metropolis_weights_are_doubly_stochastic_and_connect_all(kind: Undirected, n: int) -> None:
    if kind == "torus" and n < 4:
        pytest.skip("no torus")
    graph = undirected(kind, n, stream(3, "test"))
    weights = metropolis(graph)
    assert sorted(graph) == list(range(n))
    assert nx.is_connected(graph)
    assert (weights == weights.T).all()
    assert (weights.diagonal() > 0).all()
    assert ((weights > 0) == (nx.to_numpy_array(graph, range(n)) > 0) | np.eye(n, dtype=bool)).all()
    np.testing.assert_allclose(weights.sum(0), 1, rtol=0, atol=n * 2**-53)


@pytest.mark.parametrize("n", [3, 6, N])
@pytest.mark.parametrize("kind", DIRECTED)
def test_shares_are_column_stochastic_and_connect_all(kind: Directed, n: int) -> None:
    rounds = [directed(kind, n, stream(3, "test"), 2, number) for number in range(4)]
    assert nx.is_strongly_connected(nx.compose_all(rounds))
    assert (len(set(map(str, (sorted(graph.edges) for graph in rounds)))) > 1) == (kind[:3] == "one")
    options = PushSumOptions(graph=kind)
    for number in range(4):
        parts = PushSum.matrix(options, n, 3, number)
        assert (parts >= 0).all()
        assert (parts.diagonal() > 0).all()
        np.testing.assert_allclose(parts.sum(0), 1, rtol=0, atol=n * 2**-53)


def test_degrees_are_those_of_the_graphs_names() -> None:
    rng = stream(3, "test")
    degrees = {kind: {d for _, d in undirected(kind, N, rng).degree} for kind in UNDIRECTED}
    del degrees["erdos_renyi"]
    assert degrees == {"ring": {2}, "torus": {4}, "exponential": {6}, "star": {1, 11}, "complete": {11}}
    out = {kind: {d for _, d in directed(kind, N, rng, 3).out_degree} for kind in DIRECTED}
    assert out == {"ring": {1}, "exponential": {4}, "random": {3}, "one_peer_exponential": {1}}
    assert list(directed("exponential", N, rng).successors(10)) == [11, 0, 2, 6]
    hops = [next(iter(directed("one_peer_exponential", N, rng, number=t).successors(0))) for t in range(5)]
    assert hops == [1, 2, 4, 8, 1]


def test_a_mean_over_all_is_what_a_complete_graph_mixes_to() -> None:
    np.testing.assert_allclose(DSGD.matrix(DSGDOptions(graph="complete"), 7, 0, 0), 1 / 7, rtol=1e-14)


@pytest.mark.parametrize("algorithm, options", VARYING)
def test_a_varying_graph_is_a_function_of_seed_and_round(algorithm: Any, options: Any) -> None:
    first, again, next_round, other = (
        algorithm.matrix(options, N, seed, number) for seed, number in ((5, 0), (5, 0), (5, 1), (6, 0))
    )
    assert (first == again).all()
    assert (first != next_round).any()
    assert (first != other).any() == (options.graph != "one_peer_exponential")


@pytest.mark.parametrize("algorithm, options", MATRICES[:-1])
def test_a_graph_that_does_not_vary_is_one_of_the_seed(algorithm: Any, options: Any) -> None:
    first, later, other = (
        algorithm.matrix(options, N, seed, number) for seed, number in ((5, 0), (5, 7), (6, 0))
    )
    assert (first == later).all()
    assert (first != other).any() == (options.graph in ("erdos_renyi", "random"))


@pytest.mark.parametrize("kind", UNDIRECTED)
def test_mixing_keeps_the_mean_and_brings_models_together_at_the_rate_of_the_spectral_gap(
    kind: Undirected,
) -> None:
    """From the slowest direction the distance falls by the second largest singular value, exactly."""
    weights = DSGD.matrix(DSGDOptions(graph=kind), N, 1, 0)
    centred = weights - 1 / N
    _, values, directions = np.linalg.svd(centred)
    draw = torch.Generator().manual_seed(2)
    random = torch.randn(N, 3, 2, generator=draw, dtype=torch.float64)
    for start, exact in ((random, False), (torch.from_numpy(directions[0])[:, None], True)):
        before = models(start)
        after = models(mixed(weights, before.x, torch.float64)["w"])
        assert torch.allclose(after.mean()["w"], before.mean()["w"], rtol=0, atol=1e-14)
        rate = after.consensus_distance() / before.consensus_distance()
        assert rate == pytest.approx(values[0], abs=1e-12) if exact else rate <= values[0] + 1e-12
    assert values[0] < 1 - 1e-3


@pytest.mark.parametrize("options", [o for kind, o in [*MATRICES, *VARYING] if kind is PushSum])
def test_push_sum_keeps_both_sums_and_all_come_to_the_mean_of_the_first_models(options: Any) -> None:
    draw = torch.Generator().manual_seed(2)
    x, omega = torch.randn(N, 3, 2, generator=draw, dtype=torch.float64), torch.ones(N, dtype=torch.float64)
    state, distances = Models({"w": x}, omega, torch.zeros(2, dtype=torch.int64)), []
    for number in range(120):
        matrix = PushSum.matrix(options, N, 1, number)
        mixed_omega = torch.from_numpy(matrix) @ state.omega
        state = Models(mixed(matrix, state.x, torch.float64), mixed_omega, state.sent)
        assert torch.allclose(state.x["w"].sum(0), x.sum(0), rtol=0, atol=1e-12)
        assert float(state.omega.sum()) == pytest.approx(N, abs=1e-12)
        distances.append(state.consensus_distance())
    z = state.models()["w"]
    matrix = PushSum.matrix(options, N, 1, 0)
    rate = np.sort(np.abs(np.linalg.eigvals(matrix)))[-2]
    if options.graph == "random":
        assert float((state.omega - 1).abs().max()) > 0.05, "x alone would be biased"
    if not options.time_varying and options.graph != "one_peer_exponential":
        assert distances[-1] <= 10 * rate**120 * distances[0] + 1e-12
    assert float((z - x.mean(0)).abs().max()) <= max(10 * rate**120, 1e-2)


def models(stacked: torch.Tensor) -> Models:
    """Without an omega of their own."""
    ones = torch.ones(len(stacked), dtype=torch.float64)
    return Models({"w": stacked}, ones, torch.zeros(2, dtype=torch.int64))


def test_the_consensus_distance_is_the_root_of_the_mean_squared_distance() -> None:
    both = {"a": torch.tensor([[0.0, 4.0], [6.0, 4.0]]), "b": torch.tensor([1.0, 9.0])}
    state = Models(both, torch.ones(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    assert state.consensus_distance() == pytest.approx(5)  # of (3, 0) and 4


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda rng: undirected("torus", 7, rng), "7 users cannot be arranged in the rows and columns of a"),
        (lambda rng: undirected("erdos_renyi", 40, rng, 0.001), "probability 0.001: raise probability"),
        (lambda rng: directed("random", 3, rng, 3), "a user has only 2 others to send to: lower it"),
        (lambda rng: directed("random", 40, rng, 1), "out_degree 1: raise out_degree"),
    ],
)
def test_graphs_that_do_not_exist_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(stream(1, "test"))
