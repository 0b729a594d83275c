"""The noise that keeps a privacy budget, and a run's statement of its guarantee.

Letters: N population, C users in a round (C_sm really trained, C_lg whose noise is simulated), T rounds,
q = C / N, z noise multiplier, b band. The unit of privacy is one user with all of their images. Epsilons are
those of `pfl_ext.privacy.epsilon`.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass as checked_dataclass

from pfl_ext.configs import STRICT
from pfl_ext.privacy.epsilon import (
    COMPUTE_NOISE_ORDERS,
    LARGEST_MULTIPLIER,
    LEAST_DELTA,
    RELATIONS,
    Accountant,
    Sampler,
    System,
    epsilon_spent,
    least_multiplier,
    min_separation,
)
from pfl_ext.privacy.mechanisms import ClippingBound

Mechanism = Literal["gaussian", "adaptive"]
Noise = Literal["calibrated", "rounds_as_epochs"]

ACCOUNTINGS = 20  # the most times that a run computes its spending


def accounted_rounds(rounds: int, num_rounds: int) -> int:
    """``rounds``, rounded up to one of `ACCOUNTINGS` equal steps, so that epsilon is never too low."""
    step = -(-num_rounds // ACCOUNTINGS)
    return min(-(-rounds // step) * step, num_rounds)


def finite(value: float) -> float | Literal["infinite"]:
    """The value for JSON, which has no infinity."""
    return value if math.isfinite(value) else "infinite"


NOTES = {
    "epsilon_at_end_rdp": "the same guarantee by Renyi accounting: a looser bound that checks the first; it "
    "is no second guarantee",
    "delta_at_epsilon": "other pairs (epsilon, delta) that hold after the last round",
    "mu_gdp": "at every epsilon up to epsilon_at_end, all rounds together give no more away than one "
    "Gaussian mechanism whose sensitivity is mu times its noise",
}
"""The meaning of a system's figures in ``privacy.json``."""


@checked_dataclass(frozen=True, config=STRICT)
class PrivacyConfig:
    """The guarantee of private training and its mechanism. The budget, a promise to users, has no default.

    With a noise cohort larger than the cohort, the mean has the small noise of a large cohort at the cost of
    training a small one. The run itself is less private, and both epsilons are reported. A noise population
    does the same for data with too few users: a few hundred cannot hide each other at useful noise.

    A band of b removes in each round some of the noise that the last b - 1 rounds added (banded matrix
    factorisation, `pfl_ext.privacy.banded`). It needs at least b rounds between two participations of a user.

    The noise ``rounds_as_epochs`` is that of code which passes rounds as epochs to an accountant. It may be a
    multiple of the noise that the budget needs.

    The noise on the count of unclipped users is `indicator_std_fraction` times the noise cohort. It uses part
    of the budget, so it has a minimum.

    Raises:
        ValueError: when a value makes no sense; the message names its key.
    """

    epsilon: PositiveFloat
    """Epsilon of the whole run, for the system with the noise cohort; it is never exceeded."""
    delta: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Delta, the probability that the budget is exceeded; none: N^-1.1 for a population of N."""
    noise_cohort_size: int | None = None
    """Size of the cohort whose noise on the mean is simulated, at least cohort_size; none: no simulation."""
    noise_population: int | None = None
    """Number of users of the system whose noise is simulated; none: that of the data."""
    mechanism: Mechanism = "gaussian"
    """Clipping at a fixed bound, or at one that follows a quantile of the norms (Andrew et al. 2021)."""
    clipping: Literal["flat", "per_layer"] = "flat"
    """What the bound limits: the whole update, or each of L layers at bound / sqrt(L)."""
    clipping_bound: ClippingBound = 1.0
    """L2 norm to which updates are clipped; the first value of an adaptive bound."""
    quantile: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of updates that should stay unclipped (adaptive); Andrew et al. recommend a half."""
    clip_step: PositiveFloat = 0.2
    """Step size of the bound's logarithm (adaptive); 0.2 is Andrew et al.'s."""
    indicator_std_fraction: Annotated[float, Field(gt=0, le=LARGEST_MULTIPLIER)] = 0.05
    """Standard deviation of the noise on the share of unclipped users, which uses budget (adaptive)."""
    accountant: Accountant = "pld"
    """Accountant of epsilon: privacy loss distributions, or Renyi differential privacy."""
    sampler: Sampler = "poisson"
    """How cohorts are drawn: see `pfl_ext.privacy.epsilon`."""
    band: PositiveInt = 1
    """Rounds over which noise is correlated, so that less adds up; above 1 only with the cyclic sampler."""
    noise: Noise = "calibrated"
    """Amount of noise: as the budget needs, or as computed by code that passes rounds as epochs."""
    moments_multiplier: Annotated[float, Field(gt=0, le=LARGEST_MULTIPLIER)] | None = None
    """Noise multiplier of each of the two moments for model.channel_norm data; none: no release."""
    mean_bound: ClippingBound = 1.0
    """L2 norm to which a user's vector of channel means is clipped before the release."""
    square_bound: ClippingBound = 1.0
    """L2 norm to which a user's vector of channel mean squares is clipped before the release."""

    @property
    def releases(self) -> tuple[float, ...]:
        """Noise multipliers of the releases before the first round."""
        return () if self.moments_multiplier is None else (self.moments_multiplier,) * 2

    def __post_init__(self) -> None:
        if self.moments_multiplier is not None:
            for key, value, needed in (
                ("sampler", self.sampler, "poisson"),
                ("noise", self.noise, "calibrated"),
                ("noise_cohort_size", self.noise_cohort_size, None),
                ("noise_population", self.noise_population, None),
            ):
                if value != needed:
                    raise ValueError(
                        f"privacy.{key} is {value}, but privacy.moments_multiplier needs Poisson "
                        f"sampling of the users of the data: set privacy.{key} to {needed or 'none'}"
                    )
        if self.band > 1 and self.sampler != "cyclic":
            raise ValueError(
                f"privacy.band is {self.band}, which needs users to take part at fixed distances: "
                "set privacy.sampler to cyclic, or band to 1"
            )
        if self.noise == "rounds_as_epochs" and self.sampler == "cyclic":
            raise ValueError(
                "privacy.noise rounds_as_epochs needs rounds with random sampling: set privacy.sampler "
                "to poisson"
            )

    def calibrate(self, population: int, cohort_size: int, num_rounds: int) -> Calibration:
        """The least noise, rounded up, with which ``num_rounds`` rounds keep the budget; takes seconds.

        Raises:
            ValueError: when cohorts do not fit each other or the population, delta is 1 / N or more, the
                indicator's noise is below its minimum, or the noise of ``rounds_as_epochs`` is too small.
        """
        noise_cohort = cohort_size if self.noise_cohort_size is None else self.noise_cohort_size
        noise_population = population if self.noise_population is None else self.noise_population
        self._check_population(noise_population, noise_cohort, population, cohort_size)
        delta = self._checked_delta(noise_population, population)
        quiet = System(
            noise_population, noise_cohort, 0.0, delta, self.sampler, self.accountant, self.releases
        )
        alone = epsilon_spent(replace(quiet, noise_multiplier=LARGEST_MULTIPLIER), 0)
        if alone >= self.epsilon:
            raise ValueError(
                f"privacy.moments_multiplier is {self.moments_multiplier:g}: its two releases alone spend an "
                f"epsilon of {alone:.3g}, and privacy.epsilon is {self.epsilon:g}: raise one of them"
            )
        simulated = replace(quiet, noise_multiplier=self._multiplier(quiet, num_rounds))
        less = simulated.noise_multiplier * (cohort_size / noise_cohort)
        executed = replace(simulated, population=population, cohort_size=cohort_size, noise_multiplier=less)
        calibration = Calibration(self, num_rounds, simulated, executed)
        if calibration.epsilon > self.epsilon:
            raise ValueError(
                f"privacy.noise {self.noise} gives an epsilon of {calibration.epsilon:.3f}, above "
                f"privacy.epsilon = {self.epsilon:g}: raise privacy.epsilon"
            )
        return calibration

    def _check_population(
        self, noise_population: int, noise_cohort: int, population: int, cohort_size: int
    ) -> None:
        """Raise ValueError where cohorts do not fit each other or the population, or users come too often."""
        if noise_cohort < cohort_size:
            raise ValueError(
                f"privacy.noise_cohort_size is {noise_cohort}, but must be at least the cohort_size, "
                f"{cohort_size}: raise it, or leave it out"
            )
        if cohort_size > population:
            raise ValueError(
                f"cohort_size is {cohort_size} but there are only {population} training users: "
                f"give at most {population}, for example --federated.cohort_size {population}"
            )
        if noise_population < population:
            raise ValueError(
                f"privacy.noise_population is {noise_population}, but must be at least the number of "
                f"users, {population}: raise it, or leave it out"
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

    def _checked_delta(self, noise_population: int, population: int) -> float:
        """The delta of this budget; ValueError where it is too large or too small."""
        delta = noise_population**-1.1 if self.delta is None else self.delta
        if delta * population >= 1:
            raise ValueError(
                f"privacy.delta is {delta:g}, not below one in {population} users, which lets a mechanism "
                "publish a user outright: lower it"
            )
        if delta < LEAST_DELTA and self.accountant == "pld":
            raise ValueError(
                f"privacy.delta is {delta:g}, which is below {LEAST_DELTA:g}, where rounding errors of "
                "PLD accounting would add far too much noise: raise it, or set privacy.accountant to "
                "rdp"
            )
        return delta

    def _multiplier(self, quiet: System, num_rounds: int) -> float:
        """The noise multiplier that a system needs."""

        def search(system: System, start: float, rounds: int = num_rounds, **options: Any) -> float:
            def epsilon_of(multiplier: float) -> float:
                return epsilon_spent(replace(system, noise_multiplier=multiplier), rounds, **options)

            return least_multiplier(epsilon_of, self.epsilon, start)

        if self.sampler == "cyclic":
            return search(quiet, 1.0)
        poisson = replace(quiet, sampler="poisson")
        start = search(replace(poisson, accountant="pld"), 1.0, coarse=True)
        if self.noise == "rounds_as_epochs":
            by_rdp, orders = replace(poisson, accountant="rdp"), COMPUTE_NOISE_ORDERS
            rounds = -(-num_rounds * quiet.population // quiet.cohort_size)
            return search(
                by_rdp, start * math.sqrt(quiet.population / quiet.cohort_size), rounds, orders=orders
            )
        if self.sampler == "fixed":
            start *= 2 if self.accountant == "pld" else 3
            with contextlib.suppress(ValueError):  # the few orders of a coarse search reach no small epsilon
                start = search(quiet, start, coarse=True)
        return search(quiet, start)


@dataclass(frozen=True)
class Calibration:
    """The noise that a run adds, and the guarantee that follows.

    ``simulated`` is the system with the noise cohort, whose epsilon keeps the budget. ``executed`` is the run
    itself, whose real cohort's sum gets C_sm / C_lg of the noise.
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
        """z / (2 C_lg): with this the indicator alone, of sensitivity 1/2, would use up the multiplier z."""
        return self.simulated.noise_multiplier / (2 * self.simulated.cohort_size)

    @property
    def indicator_std(self) -> float:
        """sigma_b: standard deviation of the noise on the noise cohort's count of unclipped users."""
        return self.config.indicator_std_fraction * self.simulated.cohort_size

    @property
    def value_noise_multiplier(self) -> float:
        """z_delta for the updates, ``(z^-2 - (2 sigma_b)^-2)^-1/2``; above z, as the indicator costs some.

        The pair (update / bound, vote of plus or minus 1/2) is one Gaussian mechanism (Andrew et al. 2021,
        Theorem 1). Replacing a user doubles both sensitivities, so it holds for either relation.
        """
        z = self.simulated.noise_multiplier
        if self.config.mechanism == "gaussian":
            return z
        return float((z**-2 - (2 * self.indicator_std) ** -2) ** -0.5)

    @property
    def is_simulation(self) -> bool:
        """Whether the noise is that of a larger cohort or population than the trained one."""
        here, there = self.executed, self.simulated
        return (here.cohort_size, here.population) != (there.cohort_size, there.population)

    @cached_property
    def epsilon(self) -> float:
        """Epsilon of the whole run, for the system with the noise cohort."""
        return self.epsilon_after(self.num_rounds)

    @cached_property
    def epsilon_executed(self) -> float:
        """Epsilon of the whole run as executed; infinite when there is no meaningful guarantee."""
        return self.executed.epsilon_after(self.num_rounds)

    @cached_property
    def epsilon_rdp(self) -> float:
        """`epsilon` by RDP, as a cross-check; it is equal to or above PLD's."""
        return self.simulated.epsilon_after(self.num_rounds, "rdp")

    def epsilon_after(self, rounds: int) -> float:
        """The epsilon that ``rounds`` rounds spend.

        Raises:
            ValueError: for more rounds than the noise was calibrated for.
        """
        self.refuse_round(rounds - 1)
        return self.simulated.epsilon_after(rounds)

    def refuse_round(self, round_number: int) -> None:
        """Raise ValueError if round ``round_number`` (from 0) would exceed the budget."""
        if round_number >= self.num_rounds:
            raise ValueError(
                f"round {round_number} is beyond the {self.num_rounds} rounds for which the noise keeps "
                f"epsilon {self.config.epsilon:g}: start a new run with a larger num_rounds"
            )

    def to_json(self, rounds: int | None = None, noun: str = "user") -> dict[str, Any]:
        """The content of ``privacy.json``: noise, and spending after ``rounds`` rounds (by default all).

        The spending is that of ``epsilon_spent_counts_rounds`` rounds, at least ``rounds``: see
        `accounted_rounds`. ``simulated_system`` exists only if one is simulated. ``noun``: who is protected.
        """
        done = self.num_rounds if rounds is None else rounds
        counted = accounted_rounds(done, self.num_rounds)
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
        """A system's facts, and its spending after ``counted`` rounds and at the end."""
        share = system.cohort_size / self.simulated.cohort_size
        profile = system.profile(self.num_rounds)
        cyclic = {
            "participations_at_most": system.participations(self.num_rounds),
            "min_separation": min_separation(system.population, system.cohort_size),
        }
        return {
            "population": system.population,
            "cohort_size": system.cohort_size,
            "sampling_probability": system.sampling_probability,
            **(cyclic if system.sampler == "cyclic" else {}),
            "noise_multiplier": system.noise_multiplier,
            **({"releases_before_training": list(system.releases)} if system.releases else {}),
            "epsilon_spent": finite(system.epsilon_after(counted)),
            "epsilon_at_end": finite(system.epsilon_after(self.num_rounds)),
            "epsilon_at_end_rdp": finite(system.epsilon_after(self.num_rounds, "rdp")),
            "delta_at_epsilon": {f"{at:g}": delta for at, delta in profile.delta_at_epsilon.items()},
            "mu_gdp": finite(profile.mu),
            "value_noise_multiplier": self.value_noise_multiplier * share,
            "indicator_std": self.indicator_std * share if self.config.mechanism == "adaptive" else None,
        }
