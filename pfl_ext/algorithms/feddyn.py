"""FedDyn: each user's objective is changed in every round so that all users' optima become the server's
(Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", arXiv 2111.04263, Algorithm 1).

The server keeps h, and every user i a linear term h_i. All are 0 at first. A user of a round starts at the
server's x and makes its local steps on

    F_i(y) - <h_i, y> + alpha / 2 |y - x|^2,     then    h_i <- h_i - alpha (y_i - x),

which leaves in h_i the gradient of F_i at y_i where those steps end at the optimum. It sends ``y_i - x``.
With the cohort S and weights w_i

    h <- h - alpha sum_S w_i (y_i - x) / sum_all w_i,      x <- sum_S w_i y_i / sum_S w_i - h / alpha.

So h is always the weighted mean of all h_i. At a fixed point of training all y_i are x and h is 0, so the
mean gradient is 0. It is the optimum of ``sum_i w_i F_i / sum_i w_i``, even if local steps stop early.

Differences from the paper and the authors' code:

* In the paper all w_i are 1, which is ``federated.weighting users``. For weights by images the authors give
  user i ``alpha / w_i`` and average all alike; here alpha is the same, and both means are weighted.
* The server's optimiser steps on ``sum_S w_i (y_i - x) / sum_S w_i - h / alpha``. The paper's step is that of
  ``server.optimizer sgd`` with the rate 1 and no momentum. Others have the same fixed points.
* Local steps are SGD with the ``local`` keys. Weight decay is a part of F_i; clipping comes after both terms.

alpha has the unit of F_i's curvature, loss by squared parameter; the authors' is 0.1 to 0.001. 0 is refused,
and its limit is not FedAvg: users then make FedAvg's steps, but ``- h / alpha`` stays the sum of the updates
of all rounds so far, each times its share of all weight, and the server makes it once more in every round.

With slow or unreliable devices (`pfl_ext.devices.turnout`) S is the users who report, and y_i is where a
user's steps ended. All other h_i stay unchanged.

Private training is refused: h_i outlives the round, and with it what h_i discloses about the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pfl.context import CentralContext
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.controls import Controls, WithControls, only_weighted
from pfl_ext.configs import STRICT
from pfl_ext.rules import Refusals, Rule

FILE = "linear_terms.f32"
"""Name of the file with the users' h_i, beside a run's checkpoints."""


@dataclass(frozen=True, config=STRICT)
class FedDynOptions:
    """The options of FedDyn."""

    alpha: PositiveFloat = 0.01
    """Weight of the term that holds a user near the server's model; the authors' is 0.1 to 0.001."""
    max_state_gb: PositiveFloat = 16.0
    """Most disk space, in GB, for the h_i, each as large as a model, of all users that have taken part."""


class DynamicUser:
    """One user's part of a round."""

    def __init__(self, controls: Controls, alpha: float, user: int | None) -> None:
        self._controls, self._alpha, self._user = controls, alpha, user
        self._control = controls.control(user)

    @property
    def correction(self) -> Mapping[str, Tensor]:
        """The gradient ``-h_i`` of the linear term, by variable."""
        return self._controls.named(-self._control)

    def finish(
        self, update: Mapping[str, Tensor], num_steps: int, gradient: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """Store the new h_i. Nothing is sent besides the update."""
        self._controls.renew(self._user, self._control, -self._alpha * self._controls.flat(update))
        return {}


class DynamicRule(Rule):
    """Local SGD on the objective of a round."""

    correction = "gradient"
    corrects_all = False  # where no image has an effect h_i holds weight decay, or nothing

    def __init__(self, controls: Controls, alpha: float) -> None:
        super().__init__(proximal_weight=alpha)
        self._controls = controls

    def user(self, user_id: str | None) -> DynamicUser:
        """One user's part of a round."""
        return DynamicUser(self._controls, self.proximal_weight, self._controls.number(user_id))


@register("feddyn")
class FedDyn(WithControls):
    """FedDyn on pfl's loop. h is the `Controls`' vector of the server."""

    options = FedDynOptions
    title = "FedDyn"
    files = (FILE,)
    refusals: ClassVar[Refusals] = only_weighted(
        "FedDyn",
        "users of FedDyn keep a state over all rounds, which is not protected by privacy and not "
        "changed by postprocessors",
    )
    takes: ClassVar[tuple[str, ...]] = ("devices",)

    def rule(self, model: PyTorchModel, context: CentralContext) -> DynamicRule:
        """Local SGD on the objective of this round.

        Raises:
            ValueError: for local steps to which no correction is added.
        """
        self.check_steps(model, context)
        return DynamicRule(self.controls, self.setup.options.alpha)

    def average(self, statistics: MappedVectorStatistics, context: CentralContext) -> None:
        """Move h by the mean update times the cohort's share of all weight; subtract ``h / alpha``."""
        alpha, controls = self.setup.options.alpha, self.controls
        share = float(statistics.weight) / self.total_weight
        statistics.average()
        mean = controls.flat(dict(statistics.items())).float()
        controls.end_round(-alpha * share * mean)
        for name, part in controls.named(controls.server / alpha).items():
            statistics[name] = statistics[name] - part
