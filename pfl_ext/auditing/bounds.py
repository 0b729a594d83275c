"""What an attack proves about a mechanism: lower bounds of epsilon and mu that hold with high confidence.

A fair coin decides whether each canary, a user, is in the data. An attack gives each canary a score; a score
above a threshold is the guess "in". `find` compares the guesses with the coins. It asks which noise, in the
claimed system (sampler, population, cohort, rounds), would have allowed an attack of this quality.

**What is tested** is the claimed privacy profile, delta as a function of epsilon. It is equivalent to a
trade-off function f (Dong, Roth and Su 2019, arXiv 1905.02383). For every event E, with P and Q its
probabilities with and without one canary, ``P <= exp(epsilon) Q + delta(epsilon)`` for all epsilon at once,
and the same with P and Q exchanged. One pair (epsilon, delta) alone is a far weaker claim. The result is
reported as Nasr et al. 2023 (arXiv 2302.07956, Section 4) do for Gaussian and subsampled Gaussian mechanisms.
The claim's family is the same system with less or more noise. The result is the epsilon, at the claimed
delta, of the least private profile in this family that the attack does not refute.

**Two bounds, two assumptions.**

* `Finding.epsilon` assumes that canaries are independent trials. Then the numbers of hits, among those in and
  among those out, are binomial, and Clopper and Pearson's intervals (1934) bound both rates (Nasr et al.
  2023, Section 3). The assumption holds by construction where each canary has a run of its own. Canaries of
  one run are independent if the noise on their axes is, which `pfl_ext.privacy.central` claims. A refutation
  then means that either the size or the independence of the noise is not as claimed.
* `Finding.epsilon_in_one_run` assumes nothing but fair coins, by `refuted_in_one_run` (Mahloujifar, Melis and
  Chaudhuri 2024, arXiv 2410.22235, who improve on Steinke, Nasr and Jagielski 2023, arXiv 2305.08846). It
  must allow for mechanisms that rarely reveal all canaries at once, and is therefore weaker.

Several attacks are tried, each at several thresholds. The error is divided equally among all of them
(Bonferroni), so that a finding holds for all of them together.

Letters: m canaries, E epsilons of a profile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, ndtri

from dataset.arrays import BoolArray, FloatArray
from pfl_ext.privacy.epsilon import NO_GUARANTEE_BELOW, System, deltas_spent, gaussian_delta
from pfl_ext.randomness import stream

CONFIDENCE = 0.999
"""Probability with which a lower bound holds. A correct mechanism is refuted with at most 1 minus this."""
STEP = 1.03
"""Amounts of noise are compared in steps of this factor."""
FEWEST, MOST = -60, 60
"""Steps from the claimed noise that are tried: from 5.9 times as much to 5.9 times less."""
EPSILONS = np.concatenate([np.linspace(0, 4, 81), np.linspace(4.25, 30, 104)])
LEVELS = np.concatenate([np.linspace(0.04, 0.96, 17), [0.98, 0.99, 0.995, 0.998, 0.999]])
"""Quantiles of the scores that are tried as thresholds."""
GUESSED = (0.002, 0.02)
"""Shares of the canaries that are tried as the number of guesses of the bound for one run."""
PLACING = 16
"""One canary in this many is used to place the thresholds."""


@dataclass(frozen=True)
class Profile:
    """``delta(epsilon)`` at `EPSILONS`, the same in both directions."""

    deltas: FloatArray  # [E]

    def most(self, other: npt.ArrayLike) -> FloatArray:
        """The largest probability of an event whose probability under the neighbour is at most ``other``."""
        q, a = np.asarray(other, np.float64)[..., None], np.exp(EPSILONS)
        direct = (a * q + self.deltas).min(-1)
        opposite = (1 - (1 - q - self.deltas) / a).min(-1)
        most: FloatArray = np.clip(np.minimum(direct, opposite), 0.0, 1.0)
        return most

    def least(self, probability: float) -> float:
        """The smallest probability under the neighbour of an event with this probability: `most` inverted.

        Near 1 a large epsilon multiplies the rounding error of ``1 - probability``; a margin covers this.
        """
        a = np.exp(EPSILONS)
        direct = ((probability - self.deltas) / a).max()
        opposite = (1 - self.deltas - a * (1 - probability + 2.0**-51)).max()
        return float(max(direct, opposite, 0.0))


@lru_cache(maxsize=4096)
def _profile(system: System, rounds: int, steps: int) -> Profile:
    noise = system.noise_multiplier / STEP**steps
    if system.sampler == "cyclic":
        return Profile(gaussian_delta(EPSILONS, system.participations(rounds) ** 0.5 / noise))
    return Profile(deltas_spent(replace(system, noise_multiplier=noise), rounds, EPSILONS))


@dataclass(frozen=True)
class Claim:
    """The claim that ``rounds`` rounds of ``system`` are as private as its accountant says."""

    system: System
    rounds: int

    def profile(self, steps: int = 0) -> Profile:
        """The profile of the same system with `STEP` ** ``steps`` times less noise."""
        return _profile(self.system, self.rounds, steps)

    def epsilon(self, steps: int = 0) -> float:
        """Its epsilon at the claimed delta."""
        less = replace(self.system, noise_multiplier=self.system.noise_multiplier / STEP**steps)
        return less.epsilon_after(self.rounds)

    def largest_refuted(self, refutes: Callable[[Profile], bool]) -> int | None:
        """The most steps whose profile is refuted; None if not even that of `FEWEST` is.

        If ``refutes`` holds for a profile, it must hold for every profile with more noise.
        """
        tightest = self.system.noise_multiplier / (1.1 * NO_GUARANTEE_BELOW)
        low, high = FEWEST - 1, max(0, min(MOST, int(np.log(tightest) / np.log(STEP))))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if refutes(self.profile(middle)) else (low, middle - 1)
        return None if low < FEWEST else low

    def epsilon_at_least(self, refuted: int | None) -> float:
        """The epsilon that is proved by `largest_refuted`."""
        return 0.0 if refuted is None else self.epsilon(refuted)


@dataclass(frozen=True)
class Trials:
    """Coins and scores of m canaries."""

    joined: BoolArray  # [m]
    scores: Mapping[str, FloatArray]  # by attack, [m]; high scores say "in"


@dataclass(frozen=True)
class Finding:
    """What an audit proves, with `CONFIDENCE`. Each number is a lower bound of the mechanism's true one."""

    attack: str
    hits_in: float
    """Lower bound of the share of canaries guessed "in" among those that are in."""
    hits_out: float
    """Upper bound of the share of canaries guessed "in" among those that are out."""
    claimed: float
    """Epsilon."""
    epsilon: float
    """The lower bound of epsilon at the claimed delta; see the module's docstring."""
    mu: float
    """No mu-GDP mechanism with a smaller mu allows such rates to any attack (Nasr et al. 2023, Section 4)."""
    convicted: bool
    """Whether the claimed profile is refuted, by `epsilon` or by `epsilon_in_one_run`."""
    epsilon_in_one_run: float | None = None
    """The lower bound of epsilon that assumes no independence; None unless asked for."""


def rates(
    hits_in: npt.ArrayLike, num_in: int, hits_out: npt.ArrayLike, num_out: int, confidence: float
) -> tuple[FloatArray, FloatArray]:
    """Lower bound of the rate among those in, and upper bound among those out (Clopper and Pearson 1934).

    Both hold together with ``confidence``: each may fail with probability ``(1 - confidence) / 2``.
    """
    x, y, slack = np.asarray(hits_in, np.float64), np.asarray(hits_out, np.float64), (1 - confidence) / 2
    low = np.where(x > 0, betaincinv(np.maximum(x, 1), num_in - x + 1, slack), 0.0)
    high = np.where(y < num_out, betaincinv(y + 1, np.maximum(num_out - y, 1), 1 - slack), 1.0)
    return low, high


def refuted_in_one_run(profile: Profile, canaries: int, guesses: int, correct: int, error: float) -> bool:
    """Whether ``correct`` right guesses of ``guesses`` refute the profile, without assuming independence.

    Let a fair coin decide for each of m canaries whether it is in. Let r canaries be guessed, and C of these
    rightly. Let f be the profile's trade-off function and ``g = 1 - f`` (`Profile.most`). Take any set T of
    numbers and a canary j, with the others' coins fixed. If j is in, the event "j is guessed in, and C in T"
    has a probability of at most g of its probability if j is out; then the guess is wrong and C one less. The
    mean over j, coins and both guesses is, by the concavity of g (Mahloujifar et al. 2024, main theorem, two
    choices per canary),

        ``sum_{i in T} (i / m) p_i  <=  g( sum_{i in T} ((r - i + 1) / m) p_{i-1} )``,  p_i = P(C = i).

    Let T be all numbers from i on, ``a_i = sum_{k >= i} k p_k / m`` and
    ``b_i = sum_{k >= i} (r - k) p_k / m``. Then ``b_{i-1} >= g^-1(a_i)``. As in their algorithm, the least
    possible a and b follow downwards from ``P(C >= c) = error``. At c they are ``error c / m`` and
    ``error (r - c) / m``. Then b_i is the larger of b_{i+1} and ``g^-1(a_{i+1})``, and a_i grows by
    ``i / (r - i)`` of b's growth. Since always ``a + b <= r / m``, it follows that ``P(C >= c) < error`` if
    the least a and b exceed that.
    """
    a, b = error * correct / canaries, error * (guesses - correct) / canaries
    for i in range(correct - 1, -1, -1):
        if a + b > guesses / canaries:
            return True
        grown = max(b, profile.least(a))
        a, b = a + i / (guesses - i) * (grown - b), grown
    return a + b > guesses / canaries


def find(
    claim: Claim, trials: Trials, *, in_one_run: bool = False, confidence: float = CONFIDENCE
) -> Finding:
    """What these trials prove against the claim.

    Args:
        claim: the claim to be tested.
        trials: at least a few hundred are needed to prove anything.
        in_one_run: whether to compute the bound without independence too (some seconds). Each bound then gets
            half of the error.
        confidence: the probability with which the whole finding holds.
    """
    error = (1 - confidence) / (2 if in_one_run else 1)
    attack, low, high = _rates_of_all(trials, error)

    def excess(profile: Profile) -> FloatArray:
        return low - profile.most(high)

    refuted = claim.largest_refuted(lambda profile: bool((excess(profile) > 0).any()))
    best = int(excess(claim.profile(FEWEST if refuted is None else refuted)).argmax())
    finding = Finding(
        attack=attack[best],
        hits_in=float(low[best]),
        hits_out=float(high[best]),
        claimed=claim.epsilon(),
        epsilon=claim.epsilon_at_least(refuted),
        mu=max(0.0, float((ndtri(low) - ndtri(high)).max())),
        convicted=refuted is not None and refuted >= 0,
    )
    if not in_one_run:
        return finding
    alone = claim.largest_refuted(_all_guesses(trials, error))
    convicted = finding.convicted or (alone is not None and alone >= 0)
    return replace(finding, epsilon_in_one_run=claim.epsilon_at_least(alone), convicted=convicted)


def _rates_of_all(trials: Trials, error: float) -> tuple[list[str], FloatArray, FloatArray]:
    """The bounds of `rates` for each attack and threshold. All hold together, except with ``error``.

    Thresholds are quantiles of the scores of one canary in `PLACING`; guesses are counted on the others.
    """
    num = len(trials.joined)
    placing = np.zeros(num, bool)
    placing[stream(0, "canaries that place thresholds").permutation(num)[: max(1, num // PLACING)]] = True
    joined, names, hits = trials.joined[~placing], [], []
    for name, scores in trials.scores.items():
        thresholds = np.quantile(scores[placing], LEVELS)
        sides = [np.sort(scores[~placing][joined]), np.sort(scores[~placing][~joined])]
        hits.append([len(side) - np.searchsorted(side, thresholds, side="right") for side in sides])
        names += [name] * len(thresholds)
    above = np.concatenate(hits, axis=1)
    low, high = rates(above[0], joined.sum(), above[1], (~joined).sum(), 1 - error / len(names))
    return names, low, high


def _all_guesses(trials: Trials, error: float) -> Callable[[Profile], bool]:
    """Whether a profile is refuted by an attack that guesses shares `GUESSED` of canaries, half "in"."""
    num, options = len(trials.joined), []
    for scores in trials.scores.values():
        order = np.argsort(scores, kind="stable")
        for each in (max(1, int(num * share / 2)) for share in GUESSED):
            correct = int(trials.joined[order[-each:]].sum() + (~trials.joined[order[:each]]).sum())
            options.append((2 * each, correct))
    options.sort(key=lambda option: -option[1] / option[0])
    part = error / len(options)
    return lambda profile: any(refuted_in_one_run(profile, num, *option, part) for option in options)
