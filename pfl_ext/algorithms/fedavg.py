"""FedAvg: the server moves by the weighted mean of the users' updates
(McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data",
arXiv 1602.05629).

The server's optimiser steps on that mean. Plain SGD at rate 1 is the paper's; with momentum it is FedAvgM
(Hsu et al. 2019); an adaptive optimiser makes it FedOpt (Reddi et al. 2021). See
`pfl_ext.algorithms.optimizers`.

With slow or unreliable devices (`pfl_ext.devices.turnout`) the mean is over the users who report, by their
weights, whether they did all of their work or a part.

With privacy: a user sends only its update, which the mechanism clips before it is added. So one user changes
the sum by at most the clipping bound.
"""

from __future__ import annotations

from typing import ClassVar

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.on_pfl import OnPfl
from pfl_ext.rules import Refusals


@register("fedavg")
class FedAvg(OnPfl):
    """pfl's ``FederatedAveraging``."""

    refusals: ClassVar[Refusals] = {}
    takes: ClassVar[tuple[str, ...]] = ("compression", "aggregation", "attack", "devices")
