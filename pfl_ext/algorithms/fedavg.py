"""FedAvg: the server moves by the weighted mean of the users' updates
(McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
arXiv 1602.05629).

The server's optimiser steps on that mean: plain SGD at rate 1 is the paper's, momentum is FedAvgM (Hsu et al.
2019), and an adaptive one FedOpt (Reddi et al. 2021); see `pfl_ext.algorithms.optimizers`.

Of slow or unreliable devices (`pfl_ext.devices.turnout`) the mean is over those who report, by their weights,
whether they did all of their work or a part.

With privacy: a user sends its update alone, which the mechanism clips before it is added, so that one user
moves the sum by the clipping bound at most.
"""

from __future__ import annotations

from typing import ClassVar

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.on_pfl import OnPfl
from pfl_ext.rules import Refusals


@register("fedavg")
class FedAvg(OnPfl):
    """pfl's algorithm; its parameters are ``NNAlgorithmParams``."""

    refusals: ClassVar[Refusals] = {}
    takes: ClassVar[tuple[str, ...]] = ("compression", "aggregation", "attack", "devices")
