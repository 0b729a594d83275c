"""Differential privacy for pfl: each user's update is clipped, and noise is added once to their sum.

Letters: P parameters, G layers, C bound of one update's norm, U users of a round, T rounds.

This module has central privacy. It builds on pfl 0.6's classes, with these differences:

* **The mean is divided by a constant**, the expected cohort. pfl divides by the actual cohort, which depends
  on who takes part. Under Poisson sampling its sensitivity is then not the one that is accounted for.
* **The noise is drawn from a stream named by (seed, round)**, with Philox and 128-bit keys. pfl's noise is
  unseeded if the seed is 0 (each worker then adds its own). torch's CPU generator keeps 32 bits of a seed:
  within 5,000 rounds two have the same noise with probability 0.3 %, and equal noise can be subtracted.
* **Clipping is one pass over one vector** and reads nothing back from the device. pfl compares and logs the
  norm on the host for every user, scales tensor by tensor, and lets rounding exceed the bound.
* **A user whose update is not finite contributes zero and is counted.** In pfl a NaN passes (``nan > C`` is
  false) and destroys the model.
* **State can be saved.** pfl's adaptive bound starts from its first value at each resume. No round is
  released twice.
* The adaptive indicator is part of the total budget, and its minimal noise is known beforehand
  (``Calibration``).

Sums are floating point and the generator is not cryptographic. This is fit for research on simulated users,
not for a deployment against an adversary who knows the code (Mironov 2012). The metrics are exact, not
private.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from pfl.context import CentralContext, UserContext
from pfl.metrics import Metrics, Weighted, get_overall_value
from pfl.postprocessor.base import Postprocessor
from pfl.privacy.adaptive_clipping import MutableClippingBound
from pfl.privacy.privacy_mechanism import (
    CentrallyAppliedPrivacyMechanism,
    NoPrivacy,
    PrivacyMechanism,
    PrivacyMetricName,
)
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from pfl_ext.privacy.accounting import Calibration
from pfl_ext.privacy.banded import BandedFactor, CorrelatedNoise
from pfl_ext.privacy.mechanisms import BOUND_RANGE, FlatGaussianMechanism, VectorMechanism
from pfl_ext.randomness import stream

WIDEST = 100.0  # change of a bound's logarithm that leaves `BOUND_RANGE` from anywhere in it
TALLY = "pfl_ext.privacy.central/tally"
"""Key under which users' votes and counts are summed with their updates."""


def is_private(postprocessor: Postprocessor) -> bool:
    """Whether a postprocessor is a privacy mechanism, ours or pfl's."""
    return isinstance(postprocessor, PrivacyMechanism) and not isinstance(postprocessor, NoPrivacy)


def metric_name(description: str, local: bool = False) -> PrivacyMetricName:
    """The name of a metric of a `NoisyMean`; its text is "Central DP | " (or "Local") and the description."""
    return PrivacyMetricName(description, is_local_privacy=local)


METRICS = (
    "clipping bound",
    "fraction clipped",
    "norm before clipping",
    "refused updates",
    "users",
    "noise std. dev. on the mean",
    "signal-to-noise ratio",
    "noisy fraction unclipped",
)
"""Descriptions of a round's metrics: its C; exact fraction of users with a layer clipped or refused; their
mean norm; how many were not finite; how many took part; the noise on each parameter of the mean; norm of the
clipped mean over the expected norm of its noise; (adaptive only) the noisy fraction that moved C."""


def tally_of(norm: Tensor, whole: Tensor, finite: Tensor) -> Tensor:
    """``[..., 5]`` float32: present, clipped, refused, norm, vote of plus or minus 1/2 for unclipped."""
    one, kept = torch.ones_like(norm), (whole & finite).double()
    norm = torch.where(finite, norm, 0.0)
    return torch.stack([one, one - kept, one - finite.double(), norm, kept - 0.5], -1).float()


class ScalesUpdates(Protocol):
    """The interface by which the engine scales each user's update by its norms."""

    @property
    def clipping_bound(self) -> float:
        """Greatest norm of a scaled update."""
        ...

    def user_scales(self, names: Sequence[str], squared_norms: Tensor) -> tuple[Tensor, Tensor]:
        """Factors ``[U, V]`` and tallies ``[U, 5]`` from the squared norms ``[U, V]`` of V variables."""
        ...


class NoisyMean(CentrallyAppliedPrivacyMechanism, ABC):
    """A mean of clipped updates with noise: the common base of simulated central and local privacy.

    A user's update must have weight 1 (``WeightByUser``, placed before this among the postprocessors).

    Several workers: users' updates and tallies are summed over workers before ``postprocess_server``, which
    runs on every worker with the same central seed. So each adds the same noise once to the same sum.

    Empty shares: pfl skips the server step in a round without users, and its workers fall out of step if only
    some have none. A dataset must then yield one user *without data points*, who is not counted.
    """

    local = False

    def __init__(self, mechanism: VectorMechanism, bound: MutableClippingBound) -> None:
        super().__init__(mechanism)
        self._mechanism = mechanism
        self._bound = bound
        self.rounds_done = 0  # rounds whose noisy mean was released
        self.greatest_ratio = math.nan
        """C over the expected norm of the noise on the mean in the last round, which no mean can surpass."""

    @property
    def clipping_bound(self) -> float:
        """C of the coming round."""
        return float(self._bound.value())

    def state(self) -> dict[str, float]:
        """The state that a checkpoint must hold besides the noise seed."""
        return {"clipping_bound": self.clipping_bound, "rounds_done": float(self.rounds_done)}

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restore a `state`.

        Raises:
            ValueError: when it has not the form of a state.
        """
        if set(state) != {"clipping_bound", "rounds_done"} or not state["clipping_bound"] > 0:
            raise ValueError(f"not the state of a privacy mechanism: {dict(state)}; start a new run")
        self._bound.set_value(float(state["clipping_bound"]))
        self.rounds_done = int(state["rounds_done"])

    @abstractmethod
    def refuse_round(self, round_number: int) -> None:
        """Raise ValueError for a round after the last one that the guarantee covers."""

    @abstractmethod
    def _noise(self, context: CentralContext, size: int, users: int) -> tuple[Tensor, float]:
        """The round's noise on the sum, ``[P]`` of unit scale, and its standard deviation."""

    @abstractmethod
    def _divisor(self, users: int) -> float:
        """The divisor of the noisy sum."""

    def _adapt(self, context: CentralContext, votes: float) -> Metrics:
        """Do nothing, since the bound is fixed."""
        return Metrics()

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Clip, and add the user's tally: present, clipped, refused, norm, vote of plus or minus 1/2."""
        if stats.weight != 1:
            raise ValueError("private training weights every user by 1: set federated.weighting to users")
        clipped = self._mechanism.clip(stats)
        tally = tally_of(clipped.norm, clipped.whole, clipped.finite)
        if user_context.num_datapoints == 0:
            for name in stats:
                stats[name] = torch.zeros_like(stats[name])
            tally.zero_()
        stats[TALLY] = tally
        return stats, Metrics()

    def postprocess_server(
        self, *, stats: MappedVectorStatistics, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Add the round's noise to the sum, and make the divisor its weight.

        Raises:
            ValueError: when the round is after the last, was released before, or skips rounds (for example
                after a resume without `load_state`).
        """
        round_number = central_context.current_central_iteration
        self.refuse_round(round_number)
        if round_number != self.rounds_done:
            raise ValueError(
                f"round {round_number} of private training came where round {self.rounds_done} was due: "
                "resume from a checkpoint that holds the privacy mechanism's state"
            )
        tally = stats.pop(TALLY)[0].tolist()
        bound, users = self.clipping_bound, round(tally[0])
        size = sum(t.numel() for t in stats.values())
        noise, noise_std = self._noise(central_context, size, users)
        stats, added = self._mechanism.add(stats, noise, noise_std, metric_name)
        stats.weight = self._divisor(users)
        std = added[metric_name("DP noise std. dev.")].overall_value / stats.weight
        self.greatest_ratio = bound / (std * math.sqrt(size)) if std else math.inf
        metrics = self._round_metrics(bound, tally, added, std)
        metrics |= self._adapt(central_context, tally[4])
        self.rounds_done += 1
        return stats, metrics

    def line(self, metrics: Metrics) -> dict[str, Any]:
        """The `METRICS` of a round by their descriptions, for ``metrics.jsonl``."""
        values = {str(name): get_overall_value(value) for name, value in metrics}
        named = {name: str(metric_name(name, self.local)) for name in METRICS}
        return {name: values[key] for name, key in named.items() if key in values}

    def _round_metrics(self, bound: float, tally: Sequence[float], added: Metrics, std: float) -> Metrics:
        users, clipped, refused, norms, _ = tally
        ratio = added[metric_name("signal-to-DP-noise ratio")].overall_value
        values = [
            Weighted.from_unweighted(bound),
            Weighted(clipped, users),
            Weighted(norms, users - refused),
            Weighted.from_unweighted(refused),
            Weighted.from_unweighted(users),
            Weighted.from_unweighted(std),
            Weighted.from_unweighted(ratio),
        ]
        return Metrics([(metric_name(name, self.local), value) for name, value in zip(METRICS, values)])


def noisy_mean_in(postprocessors: Iterable[Postprocessor]) -> NoisyMean | None:
    """The mechanism of a private run, from its postprocessors; None if it has none of ours."""
    return next((each for each in postprocessors if isinstance(each, NoisyMean)), None)


class PrivateMean(NoisyMean):
    """The mean of clipped updates under central DP, at a fixed bound.

    The sum gets noise of standard deviation ``C * z_delta * C_sm / C_lg``. Its weight is the constant
    expected cohort, by which pfl's algorithms divide, so the noise on the mean is ``C * z_delta / C_lg``.
    With a band above 1 the noise of successive rounds is correlated, and that of a single round is somewhat
    larger.

    Args:
        calibration: the amount of noise. Rounds after its last are refused.
        noise_seed: a secret of any size, such as ``secrets.randbits(128)``, the same on every worker and
            after a resume. None: the central context's 32-bit seed, reproducible and for research only; not
            with a band above 1, whose noise needs the seeds of earlier rounds.
        threads: number of threads that draw the noise, without effect on it.
    """

    def __init__(self, calibration: Calibration, *, noise_seed: int | None = None, threads: int = 1) -> None:
        config, executed = calibration.config, calibration.executed
        assert noise_seed is not None or config.band == 1
        multiplier = calibration.value_noise_multiplier * (
            executed.cohort_size / calibration.simulated.cohort_size
        )
        bound = MutableClippingBound(config.clipping_bound)
        self._gaussian = FlatGaussianMechanism(bound, multiplier, clipping=config.clipping)
        super().__init__(self._gaussian, bound)
        self._correlated = CorrelatedNoise(BandedFactor(calibration.num_rounds, config.band), threads)
        self.calibration, self._noise_seed = calibration, noise_seed

    def refuse_round(self, round_number: int) -> None:
        """Raise ValueError for a round beyond the budget."""
        self.calibration.refuse_round(round_number)

    def user_scales(self, names: Sequence[str], squared_norms: Tensor) -> tuple[Tensor, Tensor]:
        """`postprocess_one_user` for U users at once, from the squared norms ``[U, V]`` of their V variables.

        Returns factors ``[U, V]`` for each user's variables, and the tallies ``[U, 5]``.
        """
        scales, norms, whole, finite = self._gaussian.user_scales(names, squared_norms)
        return scales, tally_of(norms, whole, finite)

    def _seed(self, context: CentralContext) -> int:
        assert context.seed is not None
        return context.seed if self._noise_seed is None else self._noise_seed

    def _noise(self, context: CentralContext, size: int, users: int) -> tuple[Tensor, float]:
        return self._correlated(self._seed(context), context.current_central_iteration, size)

    def _divisor(self, users: int) -> float:
        return float(self.calibration.executed.cohort_size)


class AdaptivePrivateMean(PrivateMean):
    """`PrivateMean` whose bound follows a quantile of the norms (Andrew et al. 2021, arXiv 1905.03871).

    ``C <- C exp(-step (b - quantile))``, where b is the noisy fraction of unclipped updates. Users vote plus
    or minus 1/2, and ``b = 1/2 + (votes + N(0, (sigma_b C_sm / C_lg)^2)) / (r C_sm)`` with C_sm the expected
    cohort and r the share of it that is expected to report. An absent user moves b towards 1/2, which keeps
    the sensitivity at 1/2. A refused update votes "clipped". With per-layer clipping "unclipped" means
    unclipped in every layer.

    Args:
        calibration: see `PrivateMean`.
        reporting: r, known beforehand: 1 less the probability that a user is lost.
        options: of `PrivateMean`.
    """

    def __init__(self, calibration: Calibration, *, reporting: float = 1.0, **options: Any) -> None:
        super().__init__(calibration, **options)
        self._reporting = reporting

    def _adapt(self, context: CentralContext, votes: float) -> Metrics:
        config, cohort = self.calibration.config, self.calibration.executed.cohort_size
        noises = stream(self._seed(context), "dp indicator noise", context.current_central_iteration)
        noise = noises.standard_normal()
        fraction = 0.5 + (votes / cohort + config.indicator_std_fraction * noise) / self._reporting
        change = -config.clip_step * (fraction - config.quantile)
        bound = self.clipping_bound * math.exp(min(max(change, -WIDEST), WIDEST))
        self._bound.set_value(min(max(bound, BOUND_RANGE[0]), BOUND_RANGE[1]))
        return Metrics([(metric_name("noisy fraction unclipped"), Weighted.from_unweighted(fraction))])


def private_mean(calibration: Calibration, *, reporting: float = 1.0, **options: Any) -> PrivateMean:
    """The mechanism that ``calibration.config`` names.

    Args:
        calibration: the amount of noise.
        reporting: see `AdaptivePrivateMean`.
        options: of `PrivateMean`.
    """
    if calibration.config.mechanism == "adaptive":
        return AdaptivePrivateMean(calibration, reporting=reporting, **options)
    return PrivateMean(calibration, **options)
