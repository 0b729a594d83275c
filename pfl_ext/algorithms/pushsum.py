"""Push-sum: decentralised SGD over a directed graph, with local training in the place of one step
(Assran et al. 2019, "Stochastic Gradient Push for Distributed Deep Learning", Algorithm 1, arXiv 1811.10792;
Nedic and Olshevsky 2016, "Stochastic Gradient-Push for Strongly Convex Functions on Time-Varying Directed
Graphs", arXiv 1406.2075).

A user knows to whom it sends, and need not know who sends to it. It divides its model among its receivers and
itself, so the columns of A have the sum 1, while its rows need not. A number omega of each user, 1 at first,
is mixed in the same way. It says how much more or less than one model a user holds:

    x_i <- sum_j A_ij (x_j + u_j),   omega_i <- sum_j A_ij omega_j,   z_i = x_i / omega_i,

with u_j the update of local training from z_j, ``- eta g_j(z_j)`` for a single step. Mixing changes neither
the sum of all x nor the sum of all omega, which stays n. So the mean of x is the mean of z with the weights
omega. `pfl_ext.algorithms.decentralised` says what is scored.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from dataset.arrays import FloatArray
from pfl_ext.algorithms.algorithm import Setup, register
from pfl_ext.algorithms.decentralised import Decentralised
from pfl_ext.algorithms.topologies import Directed, directed, renumbered, shares
from pfl_ext.configs import STRICT
from pfl_ext.randomness import stream

OUT_DEGREE = 2


@dataclass(frozen=True, config=STRICT)
class PushSumOptions:
    """The graph over which users send each other their models."""

    graph: Directed = "exponential"
    """ring, exponential, random or one_peer_exponential; all are directed graphs."""
    out_degree: PositiveInt | None = None
    """For random, the number of others to which each user sends; none: 2."""
    time_varying: bool = False
    """Whether each round has a new graph: random is drawn again; in others users change their places."""


@register("pushsum")
class PushSum(Decentralised):
    """Push-sum in which a user sends equal parts of its model to its receivers in a directed graph."""

    options: ClassVar[type] = PushSumOptions
    keeps_omega: ClassVar[bool] = True

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse options that the graph does not read."""
        options: PushSumOptions = setup.options
        if options.out_degree is not None and options.graph != "random":
            raise ValueError(
                f"federated.options.out_degree has no effect on the graph {options.graph}: remove it, or set "
                "federated.options.graph to random"
            )
        if options.time_varying and options.graph == "one_peer_exponential":
            raise ValueError(
                "one_peer_exponential already changes in every round: set "
                "federated.options.time_varying to false"
            )
        super().check(setup)

    @classmethod
    def matrix(cls, options: PushSumOptions, n: int, seed: int, number: int) -> FloatArray:
        """A of a round; see `Decentralised.matrix`."""
        rng = stream(seed, "graph of users", number if options.time_varying else 0)
        graph = directed(options.graph, n, rng, options.out_degree or OUT_DEGREE, number)
        if options.time_varying and options.graph != "random":
            graph = renumbered(graph, rng)
        return shares(graph)
