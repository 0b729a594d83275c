"""Local differential privacy: pfl's local mechanisms, with the epsilon of any two inputs.

pfl's mechanisms take a user's own bound C for the sensitivity. The definition of local privacy compares any
two updates that a user might send, which lie up to 2C apart; with pfl's noise an epsilon of 1 is in truth 2
(Laplace). Here the noise is for 2C. The guarantee is of one participation, and a user takes part in many:
`LocalPrivacyConfig.epsilon_after` composes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import dp_accounting
from dp_accounting.pld import PLDAccountant
from pfl.privacy.compute_parameters import AnalyticGM_robust
from pfl.privacy.laplace_mechanism import LaplaceMechanism
from pfl.privacy.privacy_mechanism import CentralPrivacyMechanism, LocalPrivacyMechanism

from pfl_ext.privacy_mechanisms import FlatGaussianMechanism


@dataclass(frozen=True)
class LocalPrivacyConfig:
    """What every user's update is protected by before it leaves the device.

    :raises ValueError: when a value makes no sense, naming its key.
    """

    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    clipping_bound: float = 0.1
    """L2 norm for gaussian, L1 norm for laplace."""
    epsilon: float = 8.0
    """Of one participation."""
    delta: float = 1e-6
    """Of one participation of gaussian; laplace needs none."""

    def __post_init__(self) -> None:
        for key in ("clipping_bound", "epsilon"):
            value = getattr(self, key)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"local_privacy.{key} is {value}: it must be positive and finite")
        if not 0 < self.delta < 1:
            raise ValueError(f"local_privacy.delta is {self.delta}: it must lie between 0 and 1")

    @property
    def noise_multiplier(self) -> float:
        """The noise's scale (gaussian: standard deviation) over the clipping bound."""
        if self.mechanism == "laplace":
            return 2 / self.epsilon
        return float(AnalyticGM_robust(self.epsilon, self.delta, l2=2))

    def make(self) -> LocalPrivacyMechanism:
        """The mechanism, to be placed last among the postprocessors: noise on every user's update."""
        if self.mechanism == "laplace":
            return LaplaceMechanism(self.clipping_bound, self.epsilon / 2)
        return FlatGaussianMechanism(self.clipping_bound, self.noise_multiplier)

    def make_fast(self) -> CentralPrivacyMechanism:
        """pfl's central approximation: clipping of each user, noise of as much variance once on the sum."""
        return self.make().approximate_as_central_mechanism()

    def epsilon_after(self, participations: int, delta: float) -> float:
        """What a user who took part so often has spent at ``delta``, by dp-accounting's PLD.

        Any two inputs, which the library sees as one added or removed at sensitivity 2C.
        """
        if participations == 0:
            return 0.0
        multiplier = self.noise_multiplier / 2
        events = {"laplace": dp_accounting.LaplaceDpEvent, "gaussian": dp_accounting.GaussianDpEvent}
        ledger = PLDAccountant(value_discretization_interval=1e-4 * max(1.0, multiplier**-2))
        return float(ledger.compose(events[self.mechanism](multiplier), participations).get_epsilon(delta))
