"""Graphs of users who train without a server, and the weights with which they mix their models.

A round's graph is a pure function of the run's seed and, where graphs vary, of the round. All graphs are
connected (directed ones strongly), so that information from one user reaches all others; those of
``one_peer_exponential`` are so only together, over the rounds in which each distance has its turn.

Letters: n users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import networkx as nx
import numpy as np

from dataset.arrays import FloatArray

Undirected = Literal["ring", "torus", "erdos_renyi", "exponential", "star", "complete"]
Directed = Literal["ring", "exponential", "random", "one_peer_exponential"]
MOST_DRAWS = 1000
"""Most draws of a random graph to find a connected one."""


def undirected(kind: Undirected, n: int, rng: np.random.Generator, probability: float = 0.5) -> nx.Graph:
    """A connected graph of n users, without loops.

    Args:
        kind: "ring"; "torus", a grid of a x b users that is closed in both directions, where a is the largest
            divisor of n up to its root; "erdos_renyi", each pair joined with a probability, drawn until
            connected; "exponential", user i joined with those 1, 2, 4, 8, ... places on (Ying et al. 2021,
            arXiv 2110.13363); "star", all joined with user 0; "complete", all joined with all.
        n: the number of users, who are numbered from 0.
        rng: draws "erdos_renyi".
        probability: the probability of an edge in "erdos_renyi".

    Raises:
        ValueError: for a torus of a prime number of users, or if no draw gave a connected graph.
    """
    if kind == "ring":
        graph = nx.cycle_graph(n)
    elif kind == "torus":
        graph = _torus(n)
    elif kind == "erdos_renyi":
        graph = _drawn(
            lambda: nx.gnp_random_graph(n, probability, seed=rng),
            nx.is_connected,
            f"in {MOST_DRAWS:,} tries, erdos_renyi drew no connected graph of {n} users with "
            f"federated.options.probability {probability:g}: raise probability",
        )
    elif kind == "exponential":
        graph = nx.circulant_graph(n, _hops(n))
    elif kind == "star":
        graph = nx.star_graph(n - 1)
    else:
        graph = nx.complete_graph(n)
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))  # networkx joins a ring of one user with itself
    return graph


def directed(
    kind: Directed, n: int, rng: np.random.Generator, out_degree: int = 2, number: int = 0
) -> nx.DiGraph:
    """A graph of n users in which an edge leads from the sender to the receiver, without loops.

    Args:
        kind: "ring", each sends to the next; "exponential", to those 1, 2, 4, 8, ... places on; "random", to
            ``out_degree`` others, drawn until strongly connected; "one_peer_exponential", to one user, which
            is 1, 2, 4, 8, ... places on in successive rounds (Assran et al. 2019, arXiv 1811.10792), so that
            the rounds of one cycle together connect all.
        n: the number of users, who are numbered from 0.
        rng: draws "random".
        out_degree: the number of receivers of each user in "random".
        number: the round, for "one_peer_exponential".

    Raises:
        ValueError: for more receivers than other users, or if no draw gave a connected graph.
    """
    if kind == "random":
        if out_degree >= n:
            raise ValueError(
                f"federated.options.out_degree is {out_degree}, but a user has only {n - 1} others to "
                "send to: lower it"
            )
        return _drawn(
            lambda: _random(n, out_degree, rng),
            nx.is_strongly_connected,
            f"in {MOST_DRAWS:,} tries, random drew no connected graph of {n} users with "
            f"federated.options.out_degree {out_degree}: raise out_degree",
        )
    hops = _hops(n)
    if kind == "ring":
        hops = hops[:1]
    elif kind == "one_peer_exponential" and hops:
        hops = [hops[number % len(hops)]]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    graph.add_edges_from((user, (user + hop) % n) for user in range(n) for hop in hops)
    return graph


def _hops(n: int) -> list[int]:
    """1, 2, 4, ... below n."""
    return [2**k for k in range((n - 1).bit_length())]


def _torus(n: int) -> nx.Graph:
    side = max(a for a in range(1, n + 1) if n % a == 0 and a * a <= n)
    if side == 1:
        raise ValueError(
            f"{n} users cannot be arranged in the rows and columns of a torus: choose another "
            "federated.options.graph or federated.cohort_size"
        )
    return nx.convert_node_labels_to_integers(
        nx.grid_2d_graph(side, n // side, periodic=True), ordering="sorted"
    )


def _random(n: int, out_degree: int, rng: np.random.Generator) -> nx.DiGraph:
    graph = nx.DiGraph()
    graph.add_nodes_from(range(n))
    for user in range(n):
        others = rng.choice(n - 1, out_degree, replace=False)
        graph.add_edges_from((user, int(other + (other >= user))) for other in others)
    return graph


def _drawn(draw: Callable[[], nx.Graph], connected: Callable[[nx.Graph], bool], never: str) -> nx.Graph:
    """The first connected graph that is drawn."""
    for _ in range(MOST_DRAWS):
        graph = draw()
        if connected(graph):
            return graph
    raise ValueError(never)


def renumbered(graph: nx.Graph, rng: np.random.Generator) -> nx.Graph:
    """The graph with its users in a random order."""
    return nx.relabel_nodes(graph, dict(enumerate(rng.permutation(len(graph)).tolist())))


def metropolis(graph: nx.Graph) -> FloatArray:
    """Metropolis weights (Xiao, Boyd and Kim 2007): symmetric, with rows and columns of sum 1.

    ``W_ij = 1 / (1 + max(d_i, d_j))`` for neighbours i and j with degrees d. ``W_ii`` is 1 minus the rest of
    its row, which is above 0. On a complete graph W = 1/n.

    Returns:
        ``[n, n]``.
    """
    weights = np.zeros((len(graph), len(graph)))
    for i, j in graph.edges:
        weights[i, j] = weights[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    np.fill_diagonal(weights, 1 - weights.sum(1))
    return weights


def shares(graph: nx.DiGraph) -> FloatArray:
    """Weights of push-sum: a user divides its model equally among its receivers and itself.

    Returns:
        ``[n, n]``: ``A_ij`` is the part of user j's model that user i gets. Columns have the sum 1.
    """
    parts = np.zeros((len(graph), len(graph)))
    for j in graph:
        for i in (j, *graph.successors(j)):
            parts[i, j] = 1 / (1 + graph.out_degree(j))
    return parts
