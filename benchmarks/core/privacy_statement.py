"""What a private run may say of its guarantee: whom it protects, what it leaves out, a paragraph for a
paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from importlib.metadata import version

from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import dotted
from pfl_ext.algorithms.algorithm import Choice
from pfl_ext.privacy.accounting import Calibration
from pfl_ext.privacy.banded import BandedFactor
from pfl_ext.privacy.epsilon import System
from pfl_ext.privacy.local import LocalPrivacyConfig

UPDATE = Choice.sends
WEAK_DELTA = 1e-4
"""A delta above this is warned of: with that probability the guarantee may fail as a whole."""

SUBTRACTABLE = (
    "this run has no protection: its noise is drawn from the run's seed, and whoever has the config can "
    "subtract it; the figures are those of the algorithm with secret noise"
)
"""What is claimed of a run whose noise comes from its public seed."""


NO_PROTECTION = (
    "This run protects nobody: its noise was drawn from the run's seed, so whoever has the configuration can "
    "subtract it. The following describes the algorithm with secret noise."
)
"""The first sentences of the paragraph on such a run."""


@dataclass(frozen=True)
class ProtectedUnit:
    """The owner whose images, all together, the guarantee hides.

    A partition that was drawn (iid, Dirichlet, by place) has clients, not users: what one real user owns may
    be spread over many of them, and nothing is promised of users then.
    """

    partition: str | None = None
    """The name of a drawn partition; None: the data's own users."""

    @property
    def noun(self) -> str:
        """``user`` or ``client``."""
        return "user" if self.partition is None else "client"

    def __str__(self) -> str:
        if self.partition is None:
            return "one user with all of their images"
        return f"one client of the partition {self.partition}, with all images that were dealt to it"


USERS = ProtectedUnit()
"""The data's own users."""


def rounded_up(value: float) -> str:
    """Three digits of an upper bound, never below it."""
    return f"{float(Context(prec=3, rounding=ROUND_CEILING).create_decimal(repr(float(value)))):g}"


def shown(epsilon: float) -> str:
    """An epsilon in a table."""
    return "infinite" if epsilon == float("inf") else rounded_up(epsilon)


def describe_epsilon(value: float | str | None) -> str:
    """An epsilon in words; of a JSON file too, where none (older files) and ``infinite`` stand for it."""
    if value is None or isinstance(value, str) or value == float("inf"):
        return "no meaningful epsilon (given as infinite)"
    return f"epsilon = {rounded_up(value)}"


def _changed(sampler: str, noun: str) -> str:
    return {
        "poisson": f"one {noun} is added or removed",
        "fixed": f"one {noun} is replaced by another",
        "cyclic": f"the updates of one {noun} are replaced by zero",
    }[sampler]


def _sampling(system: System, rounds: int, noun: str) -> str:
    q, cohort, population = system.sampling_probability, system.cohort_size, system.population
    if system.sampler == "poisson":
        return (
            f"In each of {rounds:,} rounds every one of the {population:,} {noun}s took part independently "
            f"with probability {q:.4g} ({cohort:,} expected)."
        )
    if system.sampler == "fixed":
        return (
            f"In each of {rounds:,} rounds {cohort:,} of the {population:,} {noun}s took part, drawn without "
            "replacement."
        )
    times = system.participations(rounds)
    return (
        f"Over {rounds:,} rounds the {population:,} {noun}s took part {cohort:,} at a time in a fixed cyclic "
        f"order, each at most {times:,} times."
    )


def _clipping(calibration: Calibration, noun: str, sent: str) -> str:
    config = calibration.config
    per_layer = ", layer by layer" if config.clipping == "per_layer" else ""
    if config.mechanism == "gaussian":
        return f"Each {noun}'s {sent} was clipped to an L2 norm of {config.clipping_bound:g}{per_layer}."
    return (
        f"Each {noun}'s {sent} was clipped in L2 norm{per_layer} to a bound that started at "
        f"{config.clipping_bound:g} and followed the {config.quantile:g} quantile of the norms (Andrew et "
        "al., 2021)."
    )


def _noisy_sum(calibration: Calibration, multiplier: float, noun: str) -> str:
    band = calibration.config.band
    std = f"a standard deviation of {multiplier:.4g} times the bound"
    if band == 1:
        return f"Gaussian noise with {std} was added to the sum of what the {noun}s sent"
    largest = multiplier * float(BandedFactor(calibration.num_rounds, band).noise_scales.max())
    return (
        f"Gaussian noise, correlated over {band} rounds by a banded matrix factorisation, was added to the "
        f"sum of what the {noun}s sent; it is made from independent noise with {std} and is in one round up "
        f"to {largest:.4g} times the bound"
    )


def _noise(calibration: Calibration, system: System, noun: str) -> str:
    scale = system.cohort_size / calibration.simulated.cohort_size
    noisy_sum = _noisy_sum(calibration, calibration.value_noise_multiplier * scale, noun)
    if calibration.config.mechanism == "gaussian":
        return f"{noisy_sum}."
    return (
        f"{noisy_sum}. Gaussian noise with a standard deviation of {calibration.indicator_std * scale:.4g} "
        "was added to the number of unclipped updates. Both together are one Gaussian mechanism of noise "
        f"multiplier {system.noise_multiplier:.4g}."
    )


def _releases(calibration: Calibration, noun: str) -> list[str]:
    """What was released before training."""
    config = calibration.config
    if config.moments_multiplier is None:
        return []
    return [
        "Before training, the mean and the mean square of each feature channel were released: the vectors "
        f"of each {noun} were clipped to L2 norms of {config.mean_bound:g} and {config.square_bound:g}, and "
        f"Gaussian noise with a standard deviation of {config.moments_multiplier:g} times these bounds was "
        f"added to the sums over all {noun}s; both releases are part of epsilon."
    ]


def _end(calibration: Calibration) -> str:
    """What the run's own guarantee covers, if it has one."""
    if calibration.epsilon_executed == float("inf"):
        return "The run itself guarantees nothing."
    of = " of the run itself" if calibration.is_simulation else ""
    return f"The guarantee{of} is for the model after every round; other figures are not covered by it."


SECRET_NOISE = (
    "The noise was drawn by Philox from a secret of 128 bits of the operating system's entropy, which the "
    "run deletes after its last file is written."
)


def central_paragraph(calibration: Calibration, unit: ProtectedUnit, public: bool, sent: str = UPDATE) -> str:
    """The guarantee of a finished run in sentences that a paper can print as they are.

    The noise is ``public`` if it came from the run's seed; ``sent`` names what was clipped.
    """
    real, noun = calibration.executed, unit.noun
    accounting = (
        f"the {'privacy loss distributions' if real.accountant == 'pld' else 'Renyi accounting'} of "
        f"dp-accounting {version('dp-accounting')}"
    )
    epsilon = describe_epsilon(calibration.epsilon_executed)
    delta = f"delta = {rounded_up(real.delta)}"
    sentences = [NO_PROTECTION] if public else []
    if not calibration.is_simulation:
        sentences.append(
            f"Training was differentially private with {epsilon} at {delta}, for "
            f"{unit} as the unit of privacy: two data sets are neighbours if {_changed(real.sampler, noun)}."
        )
    else:
        there = calibration.simulated
        sentences.append(
            f"The differential privacy of a larger system was simulated. Training had {real.population:,} "
            f"{noun}s in cohorts of {real.cohort_size:,}, with the noise on the mean update that a system of "
            f"{there.population:,} {noun}s in cohorts of {there.cohort_size:,} would add; that system would "
            f"have {describe_epsilon(calibration.epsilon)} at {delta}. The run itself has "
            f"{epsilon} at {delta}, for {unit} as the unit of privacy: two data sets are "
            f"neighbours if {_changed(real.sampler, noun)}."
        )
    sentences += [
        *_releases(calibration, noun),
        _sampling(real, calibration.num_rounds, noun),
        _clipping(calibration, noun, sent),
        _noise(calibration, real, noun),
        f"The noisy sum was divided by {real.cohort_size:,}."
        if sent == UPDATE
        else "The model was computed from the noisy sum.",
        f"Privacy loss was computed by {accounting}.",
        *([] if public else [SECRET_NOISE]),
        _end(calibration),
    ]
    return " ".join(sentences)


def local_paragraph(
    config: LocalPrivacyConfig,
    unit: ProtectedUnit,
    rounds: int,
    most: int,
    spent: float,
    public: bool,
    sent: str = UPDATE,
) -> str:
    """The paragraph on a run whose updates were noised on each device.

    The user or client who took part most often did so in ``most`` rounds, and has ``spent`` that epsilon.
    """
    noun, laplace = unit.noun, config.mechanism == "laplace"
    once = f"epsilon = {config.epsilon:g}" + ("" if laplace else f" and delta = {rounded_up(config.delta)}")
    return " ".join(
        [
            *([NO_PROTECTION] if public else []),
            f"Every {noun}'s {sent} was made differentially private before it left the device, with {once} "
            f"for one of them: any two that a {noun} might send are neighbours.",
            f"They were clipped to an {'L1' if laplace else 'L2'} norm of {config.clipping_bound:g} and "
            f"noised by the {'Laplace' if laplace else 'Gaussian'} mechanism.",
            f"Over {rounds:,} rounds the {noun} who took part most often did so {most:,} times, which "
            f"composes to {describe_epsilon(spent)} at delta = {rounded_up(config.delta)} (privacy loss "
            f"distributions of dp-accounting {version('dp-accounting')}).",
            "Devices were simulated: the noise of a round was drawn once, from the distribution of the sum "
            "of the devices' noises.",
            *([] if public else [SECRET_NOISE]),
        ]
    )


def not_covered(
    config: TrainingConfig, unit: ProtectedUnit, public_seed: bool, five_runs: str | None = None
) -> Sequence[str]:
    """What the guarantee says nothing of, although the run wrote or used it; ``privacy.release`` decides what
    was written. ``five_runs`` is the epsilon of five runs like this one together, in words.
    """
    noun = unit.noun
    full = config.privacy is None or config.privacy.release == "full"
    out = []
    if full:
        out += [
            f"each round, exact: the realised cohort's {noun}s and images, the steps of its largest {noun}, "
            "the training loss, refused updates, the fraction clipped, norms and the signal-to-noise ratio "
            "(metrics.jsonl, by_round, plots, trackers)",
            *_of_devices(config, noun),
            "times, which depend on how many images took part: seconds of each round and of each worker, and "
            "of the whole run",
            f"results.json: the number of {noun}s and images, the training images of each class and the "
            "classes called few-shot, the checksum of the data",
        ]
    out += [
        "val and test: their own images are not protected, and their scores are exact",
        "the choice of the best round, which looks at val",
        f"the number of {noun}s, from which delta and the sampling probability follow: it counts as known; a "
        f"{noun} who is removed leaves its place empty, since others' crops are drawn by seed and place",
        "the classes and their number: they count as known",
        "checkpoint/, file times, the screen, and a sweep's logs/ and study.journal, which show times and "
        "the data set: they are not meant to be given away; a tracker notes when it got a line",
        "other runs on the same data, with other seeds or of a sweep: each spends a budget of its own"
        + (f"; five like this one compose to {five_runs}" if five_runs else ""),
        "floating-point rounding of the sums, also where rounds that a kill undid are made again with the "
        "same noise on another device, engine, number of workers or version of the code; and Philox, which "
        "is no cryptographic generator (Mironov 2012)",
    ]
    if config.model.pretrained:
        out.append("the images on which the pretrained weights were trained")
    fields = dotted(asdict(config))  # of whichever benchmark
    if fields.get("evaluation.per_user") or fields.get("personal.num_epochs"):
        out.append("per_user.json: scores of each test user")
    if public_seed:
        out.append("anybody who has the config: the noise is drawn from the run's seed and can be subtracted")
    return out


def _of_devices(config: TrainingConfig, noun: str) -> Sequence[str]:
    """Further numbers of each round, of the sections that change who sends what."""
    out = []
    if config.devices is not None:
        out.append(
            f"each round, exact, of simulated devices: the {noun}s selected, reported, lost and late, "
            f"the bytes sent, and virtual_seconds, which follow the slowest {noun}'s number of images "
            "(metrics.jsonl, plots, trackers)"
        )
    if config.aggregation.kind == "norm_bound":
        out.append(
            "each round, exact: bounded, the fraction of updates above aggregation.options.bound "
            "(metrics.jsonl, trackers)"
        )
    return out


def weak_delta(delta: float, key: str, origin: str = "") -> str | None:
    """A warning of a delta above `WEAK_DELTA`, which ``key`` sets; None below. ``origin``: its source."""
    if delta <= WEAK_DELTA:
        return None
    return (
        f"delta is {rounded_up(delta)}, which is large: with that probability the guarantee may fail as a "
        f"whole{origin}; set {key} to 1e-05 or so"
    )
