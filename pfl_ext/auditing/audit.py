"""An audit of private training, and of the audit itself: ``python -m pfl_ext.auditing.audit``.

The command prints which known defects are detected at which claims of epsilon, with the lower bound of
epsilon that was found. A defect is a mistake that private training could make, put on purpose into the
functions that production calls. Without a defect, nothing may be detected. See `pfl_ext.auditing.bounds` for
what is proved, and `pfl_ext.auditing.canaries` for how.
"""

from __future__ import annotations

import argparse
import math
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np
import torch
from pfl.context import CentralContext, UserContext
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from dataset.arrays import FloatArray, IntArray
from pfl_ext.auditing.bounds import CONFIDENCE, Claim, Finding, Trials, find
from pfl_ext.auditing.canaries import LONG, WHOLE, CanaryUsers, Directions, Game, MakeMechanism
from pfl_ext.privacy.accounting import Calibration, PrivacyConfig
from pfl_ext.privacy.central import TALLY, AdaptivePrivateMean, PrivateMean, private_mean
from pfl_ext.privacy.epsilon import Sampler

DELTA = 5e-6
CLAIMS = (0.5, 1.0, 2.0, 4.0, 8.0)
COLUMNS = 2**15  # of each of four tensors: 131,072 canaries
ROUNDS = 8
SHARES: dict[Sampler, int] = {"poisson": 10, "fixed": 4, "cyclic": 4}
"""One user in this many is in a cohort. With the cyclic sampler every user takes part twice in all."""
RUNS, RUN_ROUNDS = 300, 2
"""Number of runs, and of rounds in each, in the audits that need a run for each canary."""


class LessNoise(PrivateMean):
    """Noise divided by ``factor``."""

    factor = 2.0

    def _noise(self, context: CentralContext, size: int, users: int) -> tuple[Tensor, float]:
        noise, std = super()._noise(context, size, users)
        return noise / self.factor, std


class TwoThirdsOfTheNoise(LessNoise):
    """Noise divided by 1.5."""

    factor = 1.5


class SameNoise(PrivateMean):
    """The first round's noise in every round."""

    def _noise(self, context: CentralContext, size: int, users: int) -> tuple[Tensor, float]:
        return super()._noise(replace(context, current_central_iteration=0), size, users)


class WorkersNoise(PrivateMean):
    """Two workers add half of the noise each, with seeds of their own: its variance is halved."""

    def _noise(self, context: CentralContext, size: int, users: int) -> tuple[Tensor, float]:
        first, std = super()._noise(context, size, users)
        draw = torch.Generator().manual_seed(context.current_central_iteration)
        return (first + torch.randn(size, generator=draw)) / 2, std


class OneTensorWithoutNoise(PrivateMean):
    """The last quarter of the parameters gets no noise."""

    def _noise(self, context: CentralContext, size: int, users: int) -> tuple[Tensor, float]:
        noise, std = super()._noise(context, size, users)
        return torch.where(torch.arange(size) < 3 * size // 4, noise, 0.0), std


class EachTensorClipped(PrivateMean):
    """Each of V tensors is clipped to the bound by itself, so that an update may be sqrt(V) bounds long."""

    def user_scales(self, names: Sequence[str], squared_norms: Tensor) -> tuple[Tensor, Tensor]:
        """See `PrivateMean`; the engine calls this."""
        columns = zip(names, squared_norms.unbind(1))
        parts = [PrivateMean.user_scales(self, [name], column[:, None]) for name, column in columns]
        return torch.cat([scales for scales, _ in parts], 1), parts[0][1]

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """See `PrivateMean`; pfl's loop calls this."""
        clipped: dict[str, Tensor] = {}
        for name, tensor in stats.items():
            part = MappedVectorStatistics({name: tensor}, weight=stats.weight)
            clipped |= dict(
                PrivateMean.postprocess_one_user(self, stats=part, user_context=user_context)[0].items()
            )
        return MappedVectorStatistics(clipped, weight=stats.weight), Metrics()


class ClippedAfterAveraging(PrivateMean):
    """Users' updates are added up without clipping, and their mean is clipped."""

    def user_scales(self, names: Sequence[str], squared_norms: Tensor) -> tuple[Tensor, Tensor]:
        """Leave all updates as they are."""
        scales, tally = super().user_scales(names, squared_norms)
        return torch.ones_like(scales), tally

    def postprocess_server(
        self, *, stats: MappedVectorStatistics, central_context: CentralContext, aggregate_metrics: Metrics
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Clip the sum to the bound times the users."""
        tensors = [t for name, t in stats.items() if name != TALLY]
        norm = float(torch.linalg.vector_norm(torch.cat([t.flatten() for t in tensors])))
        most = self.clipping_bound * float(stats[TALLY][0])
        for tensor in tensors:
            tensor.mul_(min(1.0, most / max(norm, 1e-30)))
        return super().postprocess_server(
            stats=stats, central_context=central_context, aggregate_metrics=aggregate_metrics
        )


class DividedByWhoCame(PrivateMean):
    """The sum is divided by the cohort that came, as in pfl, and not by the expected one."""

    def _divisor(self, users: int) -> float:
        return float(max(users, 1))


class VotesWithoutNoise(AdaptivePrivateMean):
    """The count of unclipped updates moves the bound without its noise."""

    def _adapt(self, context: CentralContext, votes: float) -> Metrics:
        calibration = self.calibration
        config = replace(calibration.config, indicator_std_fraction=1e-9)
        self.calibration = replace(calibration, config=replace(config, mechanism="gaussian"))
        try:
            return super()._adapt(context, votes)
        finally:
            self.calibration = calibration


class SameCohort(CanaryUsers):
    """The cohort of the first round trains in every round."""

    def drawn(self, cohort_size: int, round_number: int | None) -> IntArray:
        """See `CanaryUsers`."""
        return super().drawn(cohort_size, 0)


@dataclass(frozen=True)
class Defect:
    """A mistake, and the function in which it is made."""

    name: str
    mechanism: MakeMechanism = private_mean
    users: type[CanaryUsers] = CanaryUsers
    public: frozenset[str] = field(default_factory=frozenset)
    samplers: tuple[Sampler, ...] = ("poisson", "fixed", "cyclic")
    many_runs: bool = False
    """Whether it shows only in runs of few users with one canary each."""
    adaptive: bool = False
    """Whether it concerns the adaptive bound."""


HONEST = Defect("none")
DEFECTS = (
    HONEST,
    Defect("noise divided by 1.5", TwoThirdsOfTheNoise),
    Defect("noise divided by 2", LessNoise),
    Defect("the same noise every round", SameNoise),
    Defect("noise from the public seed", public=frozenset({"noise"})),
    Defect("each of two workers adds half the noise", WorkersNoise),
    Defect("one tensor of four without noise", OneTensorWithoutNoise),
    Defect("each tensor clipped to C", EachTensorClipped),
    Defect("clipping after averaging", ClippedAfterAveraging),
    Defect("cohorts from the public seed", public=frozenset({"cohort"}), samplers=("poisson", "fixed")),
    Defect("the same cohort every round", users=SameCohort),
    Defect("none, a run per canary", samplers=("poisson", "cyclic"), many_runs=True),
    Defect(
        "divided by the realised cohort", DividedByWhoCame, samplers=("poisson", "cyclic"), many_runs=True
    ),
    Defect("none, adaptive", samplers=("poisson", "cyclic"), many_runs=True, adaptive=True),
    Defect(
        "votes without noise",
        VotesWithoutNoise,
        samplers=("poisson", "cyclic"),
        many_runs=True,
        adaptive=True,
    ),
)


def _config(epsilon: float, sampler: Sampler, **options: Any) -> PrivacyConfig:
    return PrivacyConfig(
        epsilon=epsilon, delta=DELTA, mechanism="gaussian", sampler=sampler, clipping_bound=0.5, **options
    )


@lru_cache(maxsize=64)
def claimed(epsilon: float, sampler: Sampler, columns: int = COLUMNS, **options: Any) -> Calibration:
    """A calibrated system for one run with many canaries."""
    users = Directions(columns).size
    return _config(epsilon, sampler, **options).calibrate(users, users // SHARES[sampler], ROUNDS)


@lru_cache(maxsize=64)
def small_claim(epsilon: float, sampler: Sampler, adaptive: bool) -> Calibration:
    """A calibrated system of two users who both take part in each of `RUN_ROUNDS` rounds."""
    fixed = _config(epsilon, sampler).calibrate(2, 2, RUN_ROUNDS)
    if not adaptive:
        return fixed
    enough = 2 * fixed.minimal_indicator_std_fraction
    return replace(fixed, config=replace(fixed.config, mechanism="adaptive", indicator_std_fraction=enough))


def audit(game: Game, runs: int = 1, **options: Any) -> Finding:
    """One run with many canaries, or several runs with different secrets, whose canaries count together."""
    games = [replace(game, seed=game.seed + run) for run in range(runs)]
    parts = [one.trials(one.play()) for one in games]
    scores = {name: np.concatenate([part.scores[name] for part in parts]) for name in parts[0].scores}
    trials = Trials(np.concatenate([part.joined for part in parts]), scores)
    return find(Claim(game.calibration.executed, game.calibration.num_rounds), trials, **options)


def audit_in_runs(game: Game, runs: int) -> Finding:
    """Many runs, each with its own secrets, a single canary, and one more user who is always in.

    Attacks look for the canary's update, at the size of the noise where no user has anything, at the votes on
    the bound, and at the canary's update and vote together, weighted by the likelihood ratio.
    """
    calibration = game.calibration
    joined, rows = [], []
    for run in range(runs):
        one = replace(game, seed=run)
        release = one.play()
        joined.append(bool(one.joined[0]))
        rows.append(
            [
                release.sums[:, 0].sum(),
                -np.log((release.sums[:, 2:] ** 2).mean(1)).sum(),
                release.fractions.sum(),
            ]
        )
    update, quiet, votes = np.array(rows).T
    scores: dict[str, FloatArray] = {"likelihood": update, "little noise": quiet}
    if calibration.config.mechanism == "adaptive":
        std = calibration.config.indicator_std_fraction
        step = 0.5 / calibration.executed.cohort_size  # one vote moves the fraction by this
        weighed = update / calibration.value_noise_multiplier**2 + votes * step / std**2
        scores |= {"votes": votes, "update and votes": weighed}
    claim = Claim(calibration.executed, calibration.num_rounds)
    return find(claim, Trials(np.array(joined), scores))


def audit_defect(
    defect: Defect, epsilon: float, sampler: Sampler, *, columns: int = COLUMNS, runs: int = RUNS
) -> Finding:
    """The finding about a defect at this claim, with 4 ``columns`` canaries or ``runs`` runs."""
    if not defect.many_runs:
        game = Game(claimed(epsilon, sampler, columns), Directions(columns))
    else:
        length = WHOLE if defect.adaptive else LONG
        game = Game(small_claim(epsilon, sampler, defect.adaptive), Directions(32), others=1, length=length)
    game = replace(game, make_mechanism=defect.mechanism, users=defect.users, public=defect.public)
    return audit_in_runs(game, runs) if defect.many_runs else audit(game)


def table(sampler: Sampler, claims: Sequence[float], names: str = "") -> str:
    """A Markdown table: for each defect and claim whether it is detected, and the epsilon found."""
    lines = [
        f"| sampler {sampler}: defect | " + " | ".join(f"claim {claim:g}" for claim in claims) + " |",
        "|---|" + "---|" * len(claims),
    ]
    for defect in DEFECTS:
        if sampler in defect.samplers and names in defect.name:
            cells = []
            for claim in claims:
                found = audit_defect(defect, claim, sampler)
                cells.append(f"{'**yes**' if found.convicted else 'no'}, {found.epsilon:.2f}")
                print(".", end="", file=sys.stderr, flush=True)
            lines.append(f"| {defect.name} | " + " | ".join(cells) + " |")
    print(file=sys.stderr)
    return "\n".join(lines)


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = _OneLineParser(prog="python -m pfl_ext.auditing.audit", description=__doc__)
    parser.add_argument(
        "--samplers",
        nargs="+",
        choices=list(SHARES),
        default=list(SHARES),
        help="default: all; a table for each",
    )
    parser.add_argument(
        "--claims",
        nargs="+",
        type=float,
        default=list(CLAIMS),
        metavar="EPSILON",
        help=f"default: {' '.join(f'{claim:g}' for claim in CLAIMS)}; a column for each",
    )
    parser.add_argument(
        "--defect", default="", metavar="WORDS", help="only defects whose name has these words; default: all"
    )
    options = parser.parse_args(arguments)
    if not all(0 < claim < math.inf for claim in options.claims):
        parser.error("argument --claims: give numbers above 0")
    names = [defect.name for defect in DEFECTS if not {*options.samplers}.isdisjoint(defect.samplers)]
    if not any(options.defect in name for name in names):
        known = "; ".join(dict.fromkeys(names))
        parser.error(f"argument --defect: no name has the words {options.defect!r}; choose from {known}")
    start = time.time()
    size = Directions(COLUMNS).size
    print(
        f"{size:,} canaries in one run of {ROUNDS} rounds (a run per canary: {RUNS} runs of {RUN_ROUNDS}), "
        f"delta {DELTA:g}, confidence {CONFIDENCE:g}; torch {torch.__version__}, {platform.machine()}"
    )
    for sampler in options.samplers:
        print(f"\n{table(sampler, options.claims, options.defect)}", flush=True)
    print(f"\n{time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
