"""Local differential privacy: every user's update is noised before it leaves the device.

Letters: P parameters, C bound of one update's norm, U users of a round.

pfl's mechanisms take the bound C as the sensitivity. But local privacy compares any two updates that a user
might send, which are up to 2C apart; with pfl's noise an epsilon of 1 is really 2 (Laplace). Here the noise
is for 2C. The guarantee is for one participation. A user takes part in many, which
`LocalPrivacyConfig.epsilon_after` composes. It needs no trust in the server and no secret cohorts.

`LocalPrivacyConfig.make` is the mechanism of a device. `LocallyPrivateMean` simulates a round of it: noise is
drawn once, on the sum, from the exact distribution of the sum of U users' noises (a normal one, or the
difference of two gammas of shape U). pfl approximates Laplace noise by a normal one. Its draws are seeded
with 32 bits (among a million participations 116 pairs would get the same noise), and a NaN passes its
clipping.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from typing import Annotated, Literal

import dp_accounting
import numpy as np
from dp_accounting.pld import PLDAccountant
from pfl.context import CentralContext
from pfl.privacy.adaptive_clipping import MutableClippingBound
from pfl.privacy.compute_parameters import AnalyticGM_robust
from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from dataset.arrays import Float32Array
from pfl_ext.configs import STRICT
from pfl_ext.privacy.central import NoisyMean
from pfl_ext.privacy.mechanisms import (
    ClippingBound,
    FlatGaussianMechanism,
    VectorMechanism,
    gaussian_noise,
    in_chunks,
)
from pfl_ext.randomness import derive, stream

LARGEST_EPSILON = 1e5  # accountants cannot compute with more, and there is no privacy at far less
LEAST_MULTIPLIER = 2e-3  # of noise; dp-accounting finds no epsilon for less Laplace noise, or overflows


def laplace_sum(seed: int, size: int, users: int, threads: int = 1) -> Tensor:
    """``[size]`` float32, each the sum of ``users`` independent Laplace variables of scale 1.

    The difference of two gamma variables of that shape has that distribution. A function of ``seed`` alone.
    """

    def draw(chunk: int, out: Float32Array) -> None:
        rng = stream(seed, "laplace noise", chunk)
        out[:] = rng.standard_gamma(users, len(out))
        out -= rng.standard_gamma(users, len(out)).astype(np.float32)

    return in_chunks(size, threads, draw)


class FlatLaplaceMechanism(VectorMechanism):
    """Laplace noise on an update that is clipped in L1 norm.

    Args:
        clipping_bound: C, L1.
        epsilon: the noise's scale is C over this.
    """

    order, unit_std = 1, math.sqrt(2)

    def __init__(self, clipping_bound: float, epsilon: float) -> None:
        super().__init__(clipping_bound)
        self._epsilon = epsilon

    @property
    def scale(self) -> float:
        """C / epsilon."""
        return self.bound / self._epsilon

    def unit_noise(self, seed: int, size: int) -> Tensor:
        """`laplace_sum` of one user."""
        return laplace_sum(seed, size, 1)


@checked_dataclass(frozen=True, config=STRICT)
class LocalPrivacyConfig:
    """The protection of every user's update before it leaves the device.

    Laplace noise needs no delta. Participations are composed at `delta` with either noise.

    Raises:
        ValueError: when a value makes no sense; the message names its key.
    """

    mechanism: Literal["gaussian", "laplace"] = "gaussian"
    """Distribution of the noise on every update."""
    clipping_bound: ClippingBound = 1.0
    """Norm to which updates are clipped: L2 for gaussian, L1 for laplace."""
    epsilon: Annotated[float, Field(gt=0, le=LARGEST_EPSILON)] = 8.0
    """Epsilon of one participation of a user."""
    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Probability that epsilon is exceeded, for one participation (gaussian) and for all together."""

    @cached_property  # a search of some milliseconds
    def noise_multiplier(self) -> float:
        """The noise's scale (gaussian: standard deviation) over the clipping bound."""
        if self.mechanism == "laplace":
            return 2 / self.epsilon
        return float(AnalyticGM_robust(self.epsilon, self.delta, l2=2))

    def make(self) -> FlatGaussianMechanism | FlatLaplaceMechanism:
        """The mechanism of a device, to be placed last among the postprocessors: noise on every update."""
        if self.mechanism == "laplace":
            return FlatLaplaceMechanism(self.clipping_bound, self.epsilon / 2)
        return FlatGaussianMechanism(self.clipping_bound, self.noise_multiplier)

    def epsilon_after(self, participations: int, delta: float) -> float:
        """Epsilon at ``delta`` of a user who took part ``participations`` times, by dp-accounting's PLD.

        Any two inputs are neighbours. For the library this is one record added or removed at sensitivity 2C.
        """
        return _composed(self.mechanism, self.noise_multiplier / 2, participations, delta)


@lru_cache(maxsize=512)
def _composed(mechanism: str, multiplier: float, participations: int, delta: float) -> float:
    if participations == 0:
        return 0.0
    if multiplier < LEAST_MULTIPLIER:
        return math.inf
    events = {"laplace": dp_accounting.LaplaceDpEvent, "gaussian": dp_accounting.GaussianDpEvent}
    ledger = PLDAccountant(value_discretization_interval=1e-4 * max(1.0, multiplier**-2))
    return float(ledger.compose(events[mechanism](multiplier), participations).get_epsilon(delta))


class LocallyPrivateMean(NoisyMean):
    """Simulates the mean of updates that are noised on their devices, with the same distribution.

    Args:
        num_rounds: later rounds are refused, since the guarantee does not cover them.
        noise_seed: a secret, as for `PrivateMean`.
    """

    local = True

    def __init__(
        self, config: LocalPrivacyConfig, num_rounds: int, *, noise_seed: int, threads: int = 1
    ) -> None:
        super().__init__(config.make(), MutableClippingBound(config.clipping_bound))
        self.config, self.num_rounds = config, num_rounds
        self._noise_seed, self._threads = noise_seed, threads

    def refuse_round(self, round_number: int) -> None:
        """Raise ValueError for a round after the last."""
        if round_number >= self.num_rounds:
            raise ValueError(
                f"round {round_number} is beyond the {self.num_rounds} rounds whose privacy was stated: "
                "start a new run with a larger num_rounds"
            )

    def skip(self, round_number: int) -> dict[str, float]:
        """Count a round in which no user reports, and return its entries in ``metrics.jsonl``."""
        self.refuse_round(round_number)
        self.rounds_done += 1
        return {"clipping bound": self.clipping_bound, "users": 0.0}

    def _noise(self, context: CentralContext, size: int, users: int) -> tuple[Tensor, float]:
        assert users > 0
        seed = derive(self._noise_seed, "local noise of all users", context.current_central_iteration)
        if self.config.mechanism == "laplace":
            return laplace_sum(seed, size, users, self._threads), math.sqrt(2 * users)
        return gaussian_noise(seed, size, self._threads) * math.sqrt(users), math.sqrt(users)

    def _divisor(self, users: int) -> float:
        return float(users)
