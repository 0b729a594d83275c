"""Who sends its model to whom where users train without a server, and with what weights they are mixed.

The graph of a round is a pure function of the run's seed and, where it varies, of the round. All graphs are
connected (those with directions strongly), so that what one user knows reaches all others.

Letters: n users.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import networkx as nx
import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Undirected = Literal["ring", "torus", "erdos_renyi", "exponential", "star", "complete"]
Directed = Literal["ring", "exponential", "random", "one_peer_exponential"]
MOST_DRAWS = 1000
"""Most draws of a random graph until it is connected."""


def undirected(kind: Undirected, n: int, rng: np.random.Generator, probability: float = 0.5) -> nx.Graph:
    """A connected graph of n users, without loops.

    Args:
        kind: "ring"; "torus", a grid of a x b users that is closed on both sides, with a the largest divisor
            of n of at most its root; "erdos_renyi", each pair joined with a probability, drawn until
            connected; "exponential", user i joined with those 1, 2, 4, 8, ... places on (Ying et al. 2021,
            arXiv 2110.13363); "star", all joined with user 0; "complete", all with all.
        n: users, numbered from 0.
        rng: of the draws of "erdos_renyi".
        probability: of "erdos_renyi".

    Raises:
        ValueError: for a torus of a prime number of users, and a random graph that is never connected.
    """
    if kind == "ring":
        graph = nx.cycle_graph(n)
    elif kind == "torus":
        graph = _torus(n)
    elif kind == "erdos_renyi":
        graph = _drawn(
            lambda: nx.gnp_random_graph(n, probability, seed=rng),
            nx.is_connected,
            f"erdos_renyi joined no {n} users in {MOST_DRAWS:,} draws with federated.options.probability "
            f"{probability:g}: raise it",
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
            as many others as ``out_degree`` says, drawn until strongly connected; "one_peer_exponential", to
            one user, 1, 2, 4, 8, ... places on by turns of the rounds (Assran et al. 2019, arXiv 1811.10792),
            so that the rounds of one turn together connect all.
        n: users, numbered from 0.
        rng: of the draws of "random".
        out_degree: of "random".
        number: of the round, for "one_peer_exponential".

    Raises:
        ValueError: for more receivers than there are, and a random graph that is never connected.
    """
    if kind == "random":
        if out_degree >= n:
            raise ValueError(
                f"federated.options.out_degree is {out_degree}, and a user has {n - 1} others to send to: "
                "lower it"
            )
        return _drawn(
            lambda: _random(n, out_degree, rng),
            nx.is_strongly_connected,
            f"random joined no {n} users in {MOST_DRAWS:,} draws with federated.options.out_degree "
            f"{out_degree}: raise it",
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
            f"a torus has rows and columns, and {n} users cannot be divided into them: choose another "
            "federated.options.graph"
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
    """The first connected one of the draws."""
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

    ``W_ij = 1 / (1 + max(d_i, d_j))`` for neighbours i and j of degrees d, and ``W_ii`` what is left of 1,
    which is above 0. So W = 1/n on a complete graph.

    Returns:
        ``[n, n]``.
    """
    weights = np.zeros((len(graph), len(graph)))
    for i, j in graph.edges:
        weights[i, j] = weights[j, i] = 1 / (1 + max(graph.degree[i], graph.degree[j]))
    np.fill_diagonal(weights, 1 - weights.sum(1))
    return weights


def shares(graph: nx.DiGraph) -> FloatArray:
    """What each user makes of its model: equal parts, for its receivers and for itself; columns of sum 1.

    Returns:
        ``[n, n]``: ``A_ij`` is the part of user j's model that user i gets.
    """
    parts = np.zeros((len(graph), len(graph)))
    for j in graph:
        for i in (j, *graph.successors(j)):
            parts[i, j] = 1 / (1 + graph.out_degree(j))
    return parts
