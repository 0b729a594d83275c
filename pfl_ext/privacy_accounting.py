"""From a privacy budget to the noise that keeps it, and from noise to the budget that it spends.

Letters: N population, C users in a round (C_sm really trained, C_lg whose noise is simulated), T rounds,
q = C / N, z noise multiplier. The unit of privacy is one user with all of their images. Every epsilon
comes from the library dp-accounting; nothing here derives one by itself.

What goes with what, and what is refused because no sound accounting is known to us:

* ``sampler="poisson"``: each user joins a round independently with probability q. Neighbours differ by one
  user added or removed. PLD (tight) or RDP.
* ``sampler="fixed"``: exactly C users without replacement. Neighbours differ by one user replaced by
  another (N and C are public), which moves the clipped sum by up to *twice* the bound, so the library, whose
  bound for this event is written for sensitivity one, is asked about z / 2. RDP only (Wang et al. 2019,
  arXiv 1808.00087, Theorem 27): dp-accounting has no PLD for it. At the paper's setting it
  needs 4 times the noise of Poisson sampling (75.1 for 18.7 by RDP); the paper's code takes it for Poisson.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

Accountant = Literal["pld", "rdp"]
Sampler = Literal["poisson", "fixed"]
Mechanism = Literal["gaussian", "adaptive"]

STEP = 1e-3  # noise multipliers are whole multiples of this, rounded up
BOUND_RANGE = (1e-9, 1e9)  # of the clipping bound, within which float32 norms neither under- nor overflow
NO_GUARANTEE_BELOW = 0.1  # noise multiplier under which epsilon (then over 100) is given as infinite
PAPER_ORDERS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 4.5, *range(5, 64), 128, 256, 512)
"""RDP orders of tensorflow_privacy's compute_noise, with which the paper's code calibrates."""
GRID = 7e-3  # PLD's grid is this over sqrt(T): it then overstates epsilon by about T grid^2 = 5e-5
RELATIONS = {
    "poisson": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "fixed": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def epsilon_spent(
    noise_multiplier: float,
    *,
    population: int,
    cohort_size: int,
    rounds: int,
    delta: float,
    sampler: Sampler = "poisson",
    accountant: Accountant = "pld",
    coarse: bool = False,
    orders: Sequence[float] | None = None,
) -> float:
    """Epsilon of ``rounds`` subsampled Gaussian rounds at ``delta``; an upper bound, infinite if hopeless.

    ``noise_multiplier`` is the noise's standard deviation on the sum over the bound of one user's norm.
    ``coarse``: PLD on a five times wider grid, RDP at few orders; faster, and a little above. ``orders``:
    RDP's, or the library's.
    """
    _refuse_unsound(sampler, accountant)
    assert 0 < cohort_size <= population
    assert rounds >= 0
    if rounds == 0:
        return 0.0
    if noise_multiplier < NO_GUARANTEE_BELOW:
        return math.inf
    if sampler == "poisson":
        event = dp_accounting.PoissonSampledDpEvent(
            cohort_size / population, dp_accounting.GaussianDpEvent(noise_multiplier)
        )
    else:
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            population, cohort_size, dp_accounting.GaussianDpEvent(noise_multiplier / 2)
        )
    if accountant == "rdp":
        orders = range(2, 64, 4) if coarse else orders
        ledger = RdpAccountant(orders, neighboring_relation=RELATIONS[sampler])
    else:
        interval = max(1e-4, GRID / math.sqrt(rounds)) * (5 if coarse else 1) * max(1.0, noise_multiplier**-2)
        ledger = PLDAccountant(RELATIONS[sampler], value_discretization_interval=interval)
    return float(ledger.compose(event, rounds).get_epsilon(delta))


def _refuse_unsound(sampler: Sampler, accountant: Accountant) -> None:
    if sampler == "fixed" and accountant != "rdp":
        raise ValueError(
            "privacy.sampler fixed has no sound accounting with privacy.accountant pld: "
            "set accountant to rdp, or sampler to poisson"
        )


def least_multiplier(epsilon_of: Callable[[float], float], epsilon: float, start: float) -> float:
    """The smallest whole multiple of ``STEP`` with ``epsilon_of(it) <= epsilon``, searched from ``start``.

    ``epsilon_of`` must fall as the multiplier grows.
    """
    high = max(1, math.ceil(start / STEP))
    low = 0  # no noise: never private
    while epsilon_of(high * STEP) > epsilon:
        low, high = high, 2 * high
        if high * STEP > 1e6:
            raise ValueError(f"privacy.epsilon = {epsilon:g} needs a noise multiplier above 1e6: raise it")
    stride = max(1, high // 512)
    while high - stride > low:
        if epsilon_of((high - stride) * STEP) > epsilon:
            low = high - stride
            break
        high, stride = high - stride, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if epsilon_of(middle * STEP) <= epsilon else (middle, high)
    return round(high * STEP, 6)


@dataclass(frozen=True)
class System:
    """Private training as an accountant sees it: who could take part, how many do, how much noise."""

    population: int
    cohort_size: int  # expected, for Poisson sampling
    noise_multiplier: float
    delta: float
    sampler: Sampler
    accountant: Accountant

    @property
    def sampling_probability(self) -> float:
        """That of one user in one round."""
        return self.cohort_size / self.population

    def epsilon_after(self, rounds: int, accountant: Accountant | None = None) -> float:
        """What ``rounds`` rounds spend, by this system's accountant or another; infinite when hopeless."""
        return epsilon_spent(
            self.noise_multiplier,
            population=self.population,
            cohort_size=self.cohort_size,
            rounds=rounds,
            delta=self.delta,
            sampler=self.sampler,
            accountant=accountant or self.accountant,
        )

    def to_json(self, rounds: int, num_rounds: int) -> dict[str, Any]:
        """Its facts, and its epsilon after ``rounds`` and at the end; an infinite epsilon becomes null."""
        return {
            "population": self.population,
            "cohort_size": self.cohort_size,
            "sampling_probability": self.sampling_probability,
            "noise_multiplier": self.noise_multiplier,
            "epsilon_spent": _finite(self.epsilon_after(rounds)),
            "epsilon_at_end": _finite(self.epsilon_after(num_rounds)),
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class PrivacyConfig:
    """What private training promises and how; the defaults are the paper's (flair.md A4, A6).

    :raises ValueError: when a value makes no sense, naming its key.
    """

    epsilon: float = 2.0
    """Budget of the whole run, of the system with the noise cohort; never exceeded."""
    delta: float | None = None
    """None: N^-1.1."""
    noise_cohort_size: int | None = None
    """C_lg: train ``cohort_size`` users a round with the noise on their *mean* that so many would get. This
    simulates a large cohort cheaply; the run itself is less private, and both epsilons are reported. None:
    no simulation. The paper: 5,000."""
    noise_population: int | None = None
    """Users of the system whose noise is simulated, where the data has too few (a few hundred cannot hide
    each other at any useful noise). None: the data's own."""
    mechanism: Mechanism = "adaptive"
    """Clip at a fixed bound, or at one that follows a quantile of the norms (Andrew et al. 2021)."""
    clipping: Literal["flat", "per_layer"] = "flat"
    """Bound the whole update's norm, or each of L layers' at bound / sqrt(L), so the whole's as well."""
    clipping_bound: float = 0.1
    """L2 norm; where the adaptive bound starts."""
    quantile: float = 0.1
    """Adaptive: the fraction of updates that should stay unclipped."""
    clip_step: float = 0.2
    """Adaptive: size of the geometric step."""
    indicator_std_fraction: float = 0.05
    """Adaptive: standard deviation of the noise on the fraction of unclipped users (on their count: times
    the noise cohort). Part of the budget goes to it, so it has a minimum."""
    accountant: Accountant = "pld"
    sampler: Sampler = "poisson"
    noise: Literal["calibrated", "paper_bug"] = "calibrated"
    """``paper_bug``: the noise of the paper's code, which passes rounds as epochs (53.49 where 18.68 by the
    same RDP would do, so epsilon 0.6 instead of 2). Only to reproduce its table."""

    def __post_init__(self) -> None:
        _refuse_unsound(self.sampler, self.accountant)
        for key in ("epsilon", "clipping_bound", "clip_step", "indicator_std_fraction"):
            value = getattr(self, key)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"privacy.{key} is {value}: it must be positive and finite")
        if not 0 < self.quantile < 1:
            raise ValueError(f"privacy.quantile is {self.quantile}: it must lie between 0 and 1")
        if not BOUND_RANGE[0] <= self.clipping_bound <= BOUND_RANGE[1]:
            raise ValueError(f"privacy.clipping_bound is {self.clipping_bound}: it must lie in {BOUND_RANGE}")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"privacy.delta is {self.delta}: it must lie between 0 and 1")

    def calibrate(self, population: int, cohort_size: int, num_rounds: int) -> Calibration:
        """The least noise, rounded up, with which ``num_rounds`` rounds keep the budget; takes seconds.

        :raises ValueError: for cohorts that do not fit each other or the population, for a delta of 1 / N or
            more, for an indicator noise below its minimum, for a bug's noise that would break the budget.
        """
        noise_cohort = cohort_size if self.noise_cohort_size is None else self.noise_cohort_size
        noise_population = population if self.noise_population is None else self.noise_population
        delta = noise_population**-1.1 if self.delta is None else self.delta
        if noise_cohort < cohort_size:
            raise ValueError(
                f"privacy.noise_cohort_size is {noise_cohort}, below the cohort_size of {cohort_size}: "
                "raise it, or leave it out"
            )
        if cohort_size > population:
            raise ValueError(
                f"cohort_size is {cohort_size} but there are only {population} training users: "
                f"set cohort_size to at most {population}"
            )
        if noise_population < population:
            raise ValueError(
                f"privacy.noise_population is {noise_population}, below the data's {population} users: "
                "raise it, or leave it out"
            )
        if noise_cohort > noise_population:
            raise ValueError(
                f"privacy.noise_cohort_size is {noise_cohort} but there are only {noise_population} users: "
                f"set it to at most {noise_population}"
            )
        if delta * population >= 1:
            raise ValueError(
                f"privacy.delta is {delta:g}, not below one in {population} users, which lets a mechanism "
                "publish a user outright: lower it"
            )
        multiplier = self._multiplier(noise_population, noise_cohort, num_rounds, delta)

        def system(users: int, size: int, noise: float) -> System:
            return System(users, size, noise, delta, self.sampler, self.accountant)

        calibration = Calibration(
            config=self,
            num_rounds=num_rounds,
            simulated=system(noise_population, noise_cohort, multiplier),
            executed=system(population, cohort_size, multiplier * (cohort_size / noise_cohort)),
        )
        if calibration.epsilon > self.epsilon:
            raise ValueError(
                f"privacy.noise {self.noise} spends an epsilon of {calibration.epsilon:.3f}, over the "
                f"privacy.epsilon of {self.epsilon:g}: raise the budget"
            )
        return calibration

    def _multiplier(self, population: int, cohort: int, rounds: int, delta: float) -> float:
        """The noise multiplier of the system with cohorts of this size."""

        def search(start: float, **how: Any) -> float:
            facts: dict[str, Any] = {"population": population, "cohort_size": cohort, "rounds": rounds}
            facts |= {"delta": delta, "sampler": self.sampler, "accountant": self.accountant} | how
            return least_multiplier(lambda z: epsilon_spent(z, **facts), self.epsilon, start)

        start = search(1.0, sampler="poisson", accountant="pld", coarse=True)
        if self.noise == "paper_bug":
            bug: dict[str, Any] = {"rounds": -(-rounds * population // cohort), "sampler": "poisson"}
            start *= math.sqrt(population / cohort)
            return search(start, accountant="rdp", orders=PAPER_ORDERS, **bug)
        if self.sampler == "fixed":
            start = search(3 * start, coarse=True)
        return search(start)


@dataclass(frozen=True)
class Calibration:
    """How much noise a run adds and what that is worth.

    ``simulated`` is the system with the noise cohort, whose epsilon keeps the budget. ``executed`` is the
    run itself: its real cohort, whose sum gets C_sm / C_lg of the noise.
    """

    config: PrivacyConfig
    num_rounds: int
    simulated: System
    executed: System

    def __post_init__(self) -> None:
        z, smallest = self.simulated.noise_multiplier, self.minimal_indicator_std_fraction
        if self.config.mechanism == "adaptive" and self.config.indicator_std_fraction <= smallest:
            raise ValueError(
                f"privacy.indicator_std_fraction is {self.config.indicator_std_fraction:g} and must exceed "
                f"{smallest:.6g}: at noise multiplier {z:g} and {self.simulated.cohort_size} users a count "
                "with so little noise would by itself spend the whole budget"
            )

    @property
    def minimal_indicator_std_fraction(self) -> float:
        """z / (2 C_lg): here the indicator alone, of sensitivity 1/2, would use up the noise multiplier z."""
        return self.simulated.noise_multiplier / (2 * self.simulated.cohort_size)

    @property
    def indicator_std(self) -> float:
        """sigma_b: standard deviation of the noise on the noise cohort's count of unclipped users."""
        return self.config.indicator_std_fraction * self.simulated.cohort_size

    @property
    def value_noise_multiplier(self) -> float:
        """z_delta, for the updates: ``(z^-2 - (2 sigma_b)^-2)^-1/2``, above z, as the indicator costs some.

        The pair (update / bound, vote of plus or minus 1/2) is one Gaussian mechanism (Andrew et al. 2021,
        Theorem 1). Replacing a user doubles both sensitivities, so it holds for either relation.
        """
        z = self.simulated.noise_multiplier
        if self.config.mechanism == "gaussian":
            return z
        return float((z**-2 - (2 * self.indicator_std) ** -2) ** -0.5)

    @property
    def is_simulation(self) -> bool:
        """Whether the noise is that of a larger cohort, or population, than is trained."""
        here, there = self.executed, self.simulated
        return (here.cohort_size, here.population) != (there.cohort_size, there.population)

    @cached_property
    def epsilon(self) -> float:
        """Of the whole run, for the system with the noise cohort."""
        return self.epsilon_after(self.num_rounds)

    @cached_property
    def epsilon_executed(self) -> float:
        """Of the whole run as executed; infinite when there is no guarantee to speak of."""
        return self.executed.epsilon_after(self.num_rounds)

    @cached_property
    def epsilon_rdp(self) -> float:
        """`epsilon` by RDP: the cross-check, equal to or above PLD's."""
        return self.simulated.epsilon_after(self.num_rounds, "rdp")

    def epsilon_after(self, rounds: int) -> float:
        """What ``rounds`` rounds spend of the budget.

        :raises ValueError: past the rounds that the noise was calibrated for.
        """
        self.refuse_round(rounds - 1)
        return self.simulated.epsilon_after(rounds)

    def refuse_round(self, round_number: int) -> None:
        """Raise ValueError when round ``round_number`` (from 0) lies beyond the budget."""
        if round_number >= self.num_rounds:
            raise ValueError(
                f"round {round_number} is beyond the {self.num_rounds} rounds for which the noise keeps "
                f"epsilon {self.config.epsilon:g}: start a new run with a larger num_rounds"
            )

    def to_json(self, rounds: int | None = None) -> dict[str, Any]:
        """All that ``privacy.json`` says of the guarantee after ``rounds`` rounds (all, by default)."""
        done = self.num_rounds if rounds is None else rounds
        system, executed = self.simulated, self.executed
        claim = (
            f"simulated_system SIMULATES {system.cohort_size} users a round of {system.population}: its "
            f"epsilon is not this run's, which trains {executed.cohort_size} of {executed.population} and "
            "has the one of as_executed"
            if self.is_simulation
            else "the run is the system accounted for: simulated_system and as_executed are the same"
        )
        return {
            "config": asdict(self.config),
            "unit": "one user with all of their images",
            "neighbouring_relation": RELATIONS[system.sampler].name.lower(),
            "sampler": system.sampler,
            "num_rounds": self.num_rounds,
            "rounds_done": done,
            "delta": system.delta,
            "accountant": system.accountant,
            "accountant_version": f"dp-accounting {version('dp-accounting')}",
            "is_simulation": self.is_simulation,
            "claim": claim,
            "simulated_system": {
                **system.to_json(done, self.num_rounds),
                "epsilon_at_end_rdp": _finite(self.epsilon_rdp),
                "value_noise_multiplier": self.value_noise_multiplier,
                "indicator_std": self.indicator_std if self.config.mechanism == "adaptive" else None,
            },
            "as_executed": executed.to_json(done, self.num_rounds),
            "not_covered": "metrics of the run (losses, norms, fraction clipped, signal-to-noise) are exact",
        }
