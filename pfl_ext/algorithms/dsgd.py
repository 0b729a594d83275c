"""DSGD: decentralised SGD over an undirected graph, with local training in the place of one step
(Lian et al. 2017, "Can Decentralized Algorithms Outperform Centralized Algorithms? A Case Study for
Decentralized Parallel Stochastic Gradient Descent", arXiv 1705.09056; with local steps and changing graphs:
Koloskova et al. 2020, "A Unified Theory of Decentralized SGD with Changing Topology and Local Updates",
Algorithm 1, arXiv 2003.10422).

    x_i <- sum_j W_ij (x_j + u_j),   u_j = - eta g_j(x_j) where local training is a single step.

W has the Metropolis weights of the graph (`pfl_ext.algorithms.topologies`): it is symmetric with rows of sum
1. On a complete graph W = 1/n: all users have one model after each round, and the algorithm is FedAvg of all
users with equal weights. `pfl_ext.algorithms.decentralised` says what is scored.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field
from pydantic.dataclasses import dataclass

from dataset.arrays import FloatArray
from pfl_ext.algorithms.algorithm import Setup, register
from pfl_ext.algorithms.decentralised import Decentralised
from pfl_ext.algorithms.topologies import Undirected, metropolis, renumbered, undirected
from pfl_ext.configs import STRICT
from pfl_ext.randomness import stream

PROBABILITY = 0.5


@dataclass(frozen=True, config=STRICT)
class DSGDOptions:
    """The graph over which users send each other their models."""

    graph: Undirected = "ring"
    """ring, torus, erdos_renyi, exponential, star or complete."""
    probability: Annotated[float, Field(gt=0, le=1)] | None = None
    """Probability of an edge, for erdos_renyi; none: 0.5."""
    time_varying: bool = False
    """Whether each round has a new graph: erdos_renyi is drawn again; in others users change their places."""


@register("dsgd")
class DSGD(Decentralised):
    """Decentralised SGD whose mixing matrix has Metropolis weights over an undirected graph."""

    options: ClassVar[type] = DSGDOptions

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse options that the graph does not read."""
        options: DSGDOptions = setup.options
        if options.probability is not None and options.graph != "erdos_renyi":
            raise ValueError(
                f"federated.options.probability has no effect on the graph {options.graph}: remove it, or "
                "set federated.options.graph to erdos_renyi"
            )
        if options.time_varying and options.graph == "complete":
            raise ValueError(
                "a complete graph is the same in every round: set federated.options.time_varying to false"
            )
        super().check(setup)

    @classmethod
    def matrix(cls, options: DSGDOptions, n: int, seed: int, number: int) -> FloatArray:
        """W of a round; see `Decentralised.matrix`."""
        rng = stream(seed, "graph of users", number if options.time_varying else 0)
        graph = undirected(options.graph, n, rng, options.probability or PROBABILITY)
        if options.time_varying and options.graph != "erdos_renyi":
            graph = renumbered(graph, rng)
        return metropolis(graph)
