"""From a privacy budget to the noise that keeps it, and what a run says of its guarantee.

Letters: N population, C users in a round (C_sm really trained, C_lg whose noise is simulated), T rounds,
q = C / N, z noise multiplier, b band. The unit of privacy is one user with all of their images. Epsilons are
those of `pfl_ext.privacy.epsilon`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from pfl_ext.configs import STRICT
from pfl_ext.privacy.epsilon import (
    COMPUTE_NOISE_ORDERS,
    LEAST_DELTA,
    RELATIONS,
    Accountant,
    PrivacyProfile,
    Sampler,
    epsilon_spent,
    least_multiplier,
    min_separation,
    participations,
    privacy_profile,
    refuse_unsound,
)
from pfl_ext.privacy.mechanisms import BOUND_RANGE

Mechanism = Literal["gaussian", "adaptive"]

ACCOUNTINGS = 20  # so often at most is what was spent computed in a run


def accounted_rounds(rounds: int, num_rounds: int) -> int:
    """``rounds``, rounded up to one of `ACCOUNTINGS` equal steps, so that epsilon is never too low."""
    step = -(-num_rounds // ACCOUNTINGS)
    return min(-(-rounds // step) * step, num_rounds)


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
        """That of one user in one round; of a circle, the share of the rounds."""
        return self.cohort_size / self.population

    def epsilon_after(self, rounds: int, accountant: Accountant | None = None) -> float:
        """What ``rounds`` rounds spend, by this system's accountant or another; infinite when hopeless."""
        return epsilon_spent(self.noise_multiplier, **self._facts(rounds, accountant))

    def _facts(self, rounds: int, accountant: Accountant | None = None) -> dict[str, Any]:
        """What `pfl_ext.privacy.epsilon` asks for besides the noise."""
        return {
            "population": self.population,
            "cohort_size": self.cohort_size,
            "rounds": rounds,
            "delta": self.delta,
            "sampler": self.sampler,
            "accountant": accountant or self.accountant,
        }

    def epsilon_of_runs(self, runs: int, rounds: int) -> float:
        """What so many runs of ``rounds`` rounds each spend together, each with a secret of its own.

        Every run of a circle starts its own, so a user may take part in each as often as in one.
        """
        if self.sampler != "cyclic":
            return self.epsilon_after(runs * rounds)
        noisier = replace(self, noise_multiplier=self.noise_multiplier / math.sqrt(runs))
        return noisier.epsilon_after(rounds)

    def participations(self, rounds: int) -> int:
        """The most often that one user takes part; of a circle fewer than ``rounds``."""
        if self.sampler != "cyclic":
            return rounds
        return participations(self.population, self.cohort_size, rounds)

    def profile(self, rounds: int) -> PrivacyProfile:
        """Delta at some epsilons and mu-GDP after ``rounds`` rounds."""
        return privacy_profile(self.noise_multiplier, **self._facts(rounds))

    def to_json(self, rounds: int, num_rounds: int) -> dict[str, Any]:
        """Its facts, and what it spends after ``rounds`` and at the end; without a bound: ``"infinite"``."""
        cyclic = {
            "participations_at_most": self.participations(num_rounds),
            "min_separation": min_separation(self.population, self.cohort_size),
        }
        profile = self.profile(num_rounds)
        return {
            "population": self.population,
            "cohort_size": self.cohort_size,
            "sampling_probability": self.sampling_probability,
            **(cyclic if self.sampler == "cyclic" else {}),
            "noise_multiplier": self.noise_multiplier,
            "epsilon_spent": finite(self.epsilon_after(rounds)),
            "epsilon_at_end": finite(self.epsilon_after(num_rounds)),
            "epsilon_at_end_rdp": finite(self.epsilon_after(num_rounds, "rdp")),
            "delta_at_epsilon": {f"{at:g}": delta for at, delta in profile.delta_at_epsilon.items()},
            "mu_gdp": finite(profile.mu),
        }


def finite(value: float) -> float | Literal["infinite"]:
    """For JSON, which has no infinity."""
    return value if math.isfinite(value) else "infinite"


NOTES = {
    "epsilon_at_end_rdp": "the same guarantee by Renyi accounting: a looser bound that checks the first; it "
    "is no second guarantee",
    "delta_at_epsilon": "other pairs (epsilon, delta) that hold after the last round",
    "mu_gdp": "at every epsilon up to epsilon_at_end, all rounds together give no more away than one "
    "Gaussian mechanism whose sensitivity is mu times its noise",
}
"""What the figures of `System.to_json` mean."""


@checked_dataclass(frozen=True, config=STRICT)
class PrivacyConfig:
    """What private training promises and how; the defaults are the FLAIR paper's.

    A noise cohort larger than the cohort (the paper's: 5,000) gives the mean the little noise of a large
    cohort at the cost of a small one. The run itself is less private, and both epsilons are reported. A noise
    population does so for data with too few users, as a few hundred cannot hide each other at useful noise.

    A band of b takes back in each round some of the noise that the last b - 1 rounds added (banded matrix
    factorisation, `pfl_ext.privacy.banded`). It needs at least b rounds between two participations of a user.

    The noise ``paper_bug`` is that of code which passes rounds as epochs: 53.49 where 18.68 by the same RDP
    would do, so epsilon 0.6 instead of 2.

    The noise on the share of unclipped users is, on their count, `indicator_std_fraction` times the noise
    cohort. Part of the budget goes to it, so it has a minimum.

    Raises:
        ValueError: when a value makes no sense, naming its key.
    """

    epsilon: float = 2.0
    """Budget of the whole run, of the system with the noise cohort; never exceeded."""
    delta: float | None = None
    """Probability that the budget may be exceeded; none: N^-1.1 for a population of N."""
    noise_cohort_size: int | None = None
    """Users in a round whose noise on the mean is simulated, at least cohort_size; none: no simulation."""
    noise_population: int | None = None
    """Users of the system whose noise is simulated; none: as many as the data has."""
    mechanism: Mechanism = "adaptive"
    """Clipping at a fixed bound, or at one that follows a quantile of the norms (Andrew et al. 2021)."""
    clipping: Literal["flat", "per_layer"] = "flat"
    """What the bound limits: the whole update, or each of L layers at bound / sqrt(L)."""
    clipping_bound: float = 0.1
    """L2 norm to which updates are clipped; where the adaptive bound starts."""
    quantile: float = 0.1
    """Share of updates that should stay unclipped (adaptive)."""
    clip_step: float = 0.2
    """Rate at which the bound is multiplied, on a logarithmic scale (adaptive)."""
    indicator_std_fraction: float = 0.05
    """Standard deviation of the noise on the share of unclipped users; it costs budget (adaptive)."""
    accountant: Accountant = "pld"
    """Arithmetic of epsilon: privacy loss distributions, or Renyi differential privacy."""
    sampler: Sampler = "poisson"
    """Way that cohorts are drawn: see `pfl_ext.privacy.epsilon`."""
    band: int = 1
    """Rounds over which noise is correlated, so that less of it adds up; above 1 with the cyclic sampler."""
    noise: Literal["calibrated", "paper_bug"] = "calibrated"
    """Amount of noise: what the budget needs, or that of the FLAIR paper's code, to reproduce its table."""

    def __post_init__(self) -> None:
        refuse_unsound(self.sampler, self.band)
        for key in ("epsilon", "clipping_bound", "clip_step", "indicator_std_fraction"):
            value = getattr(self, key)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"privacy.{key} is {value}: it must be positive and finite")
        if self.band < 1:
            raise ValueError(f"privacy.band is {self.band}: it must be at least 1")
        if self.noise == "paper_bug" and self.sampler == "cyclic":
            raise ValueError(
                "privacy.noise paper_bug is for subsampled rounds: set privacy.sampler to poisson"
            )
        if not 0 < self.quantile < 1:
            raise ValueError(f"privacy.quantile is {self.quantile}: it must lie between 0 and 1")
        if not BOUND_RANGE[0] <= self.clipping_bound <= BOUND_RANGE[1]:
            raise ValueError(f"privacy.clipping_bound is {self.clipping_bound}: it must lie in {BOUND_RANGE}")
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"privacy.delta is {self.delta}: it must lie between 0 and 1")

    def calibrate(self, population: int, cohort_size: int, num_rounds: int) -> Calibration:
        """The least noise, rounded up, with which ``num_rounds`` rounds keep the budget; takes seconds.

        Raises:
            ValueError: for cohorts that do not fit each other or the population, for a delta of 1 / N or
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
                f"cohort_size is {cohort_size} but there are only {population} training users: set "
                f"cohort_size to at most {population}"
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
        separation = min(
            min_separation(population, cohort_size), min_separation(noise_population, noise_cohort)
        )
        if self.band > separation:
            raise ValueError(
                f"privacy.band is {self.band} but a user may take part again after {separation} rounds "
                f"(population over cohort, of the data and of the noise): set it to at most {separation}"
            )
        if delta * population >= 1:
            raise ValueError(
                f"privacy.delta is {delta:g}, not below one in {population} users, which lets a mechanism "
                "publish a user outright: lower it"
            )
        if delta < LEAST_DELTA and self.accountant == "pld":
            raise ValueError(
                f"privacy.delta is {delta:g}, below {LEAST_DELTA:g}, which PLD accounting cannot tell from "
                "its rounding, so that it would ask for far too much noise: raise it, or set "
                "privacy.accountant to rdp"
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

        if self.sampler == "cyclic":
            return search(1.0)
        start = search(1.0, sampler="poisson", accountant="pld", coarse=True)
        if self.noise == "paper_bug":
            bug: dict[str, Any] = {"rounds": -(-rounds * population // cohort), "sampler": "poisson"}
            start *= math.sqrt(population / cohort)
            return search(start, accountant="rdp", orders=COMPUTE_NOISE_ORDERS, **bug)
        if self.sampler == "fixed":
            start = search((2 if self.accountant == "pld" else 3) * start, coarse=True)
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

        Raises:
            ValueError: past the rounds that the noise was calibrated for.
        """
        self.refuse_round(rounds - 1)
        return self.simulated.epsilon_after(rounds)

    def accounted_rounds(self, rounds: int) -> int:
        """`accounted_rounds` of this run's."""
        return accounted_rounds(rounds, self.num_rounds)

    def refuse_round(self, round_number: int) -> None:
        """Raise ValueError when round ``round_number`` (from 0) lies beyond the budget."""
        if round_number >= self.num_rounds:
            raise ValueError(
                f"round {round_number} is beyond the {self.num_rounds} rounds for which the noise keeps "
                f"epsilon {self.config.epsilon:g}: start a new run with a larger num_rounds"
            )

    def to_json(self, rounds: int | None = None, noun: str = "user") -> dict[str, Any]:
        """What ``privacy.json`` says of noise and spending after ``rounds`` rounds (all, by default).

        What was spent is that of ``epsilon_spent_counts_rounds``, at least as many: see `accounted_rounds`.
        There is a ``simulated_system`` only where one is simulated. ``noun``: whom the guarantee protects.
        """
        done = self.num_rounds if rounds is None else rounds
        counted = self.accounted_rounds(done)
        there, here = self.simulated, self.executed
        claim = (
            f"simulated_system SIMULATES {there.cohort_size} {noun}s a round of {there.population}: its "
            f"epsilon is not this run's, which trains {here.cohort_size} of {here.population} and has the "
            "one of as_executed"
            if self.is_simulation
            else "as_executed is the guarantee of this run; nothing is simulated"
        )
        return {
            "config": asdict(self.config),
            "neighbouring_relation": RELATIONS[here.sampler].name.lower(),
            "sampler": here.sampler,
            "num_rounds": self.num_rounds,
            "rounds_done": done,
            "epsilon_spent_counts_rounds": counted,
            "delta": here.delta,
            "accountant": here.accountant,
            "accountant_version": f"dp-accounting {version('dp-accounting')}",
            "is_simulation": self.is_simulation,
            "claim": claim,
            "notes": NOTES,
            **({"simulated_system": self._system(there, counted)} if self.is_simulation else {}),
            "as_executed": self._system(here, counted),
        }

    def _system(self, system: System, counted: int) -> dict[str, Any]:
        share = system.cohort_size / self.simulated.cohort_size
        adaptive = self.config.mechanism == "adaptive"
        return {
            **system.to_json(counted, self.num_rounds),
            "value_noise_multiplier": self.value_noise_multiplier * share,
            "indicator_std": self.indicator_std * share if adaptive else None,
        }
