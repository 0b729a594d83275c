"""Canaries: users with known updates that go through real private training, and attacks that detect them.

A `Game` is one run of some rounds. A fair coin decides whether each canary, a user, is in the data. Its
update is as long as allowed, along a direction of its own that is orthogonal to all others. Half of the
canaries have directions within one tensor, the others are spread evenly over all tensors, since clipping each
tensor by itself would treat the two differently. Everything but the users' training is production code:
`FederatedImageDataset` draws the cohorts, `CentrallyEvaluatedBackend` runs the rounds and sums over workers,
and `private_mean` clips, adds noise and divides. Updates are synthetic, and `PrivateMean.user_scales` scales
them as in `CohortEngine`, so that 10^5 canaries and their rounds take a second. The tests play the same games
through pfl's loop, and with `CohortEngine` on images that have the gradients of canaries.

The neighbouring relation is that of the sampler: a canary that is out is absent (poisson), sends nothing in
its rounds (cyclic), or sends the opposite (fixed, where a user is replaced).

Letters: m canaries, T rounds, V tensors, K labels, n columns of a tensor, U users of a cohort, C the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from scipy.linalg import hadamard
from torch import nn

from dataset.arrays import BoolArray, FloatArray, IntArray
from pfl_ext.auditing.bounds import Trials
from pfl_ext.backend import CentrallyEvaluatedBackend, training_context
from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.engine.one_step import CohortSum
from pfl_ext.engine.plan import Task
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.privacy.accounting import Calibration
from pfl_ext.privacy.banded import BandedFactor
from pfl_ext.privacy.central import TALLY, PrivateMean, metric_name, private_mean
from pfl_ext.privacy.sampling import private_cohort
from pfl_ext.randomness import derive, stream
from pfl_ext.tasks.multi_label import MultiLabel

TENSORS = 4  # V, a power of two
LONG = 50.0  # length of a canary's update, in bounds
WHOLE = 0.999  # length that is not clipped, in bounds: see `pfl_ext.privacy.mechanisms.MARGIN`
PUBLIC_SEED = 7  # the seed in a run's config, which any attacker knows


@dataclass(frozen=True)
class Directions:
    """The orthonormal directions of V K n canaries in V tensors ``[K, n]``.

    Canary (v, k, i) has the direction ``h_k`` over the K labels. For columns i of the first half it lies in
    tensor v alone; for the others it lies in every tensor, with the signs of ``h_v``. The h are rows of
    Hadamard matrices over the square root of their size.
    """

    columns: int  # n
    labels: int = 1  # K, a power of two
    all_split: bool = False  # whether no canary lies in one tensor alone

    @property
    def whole(self) -> int:
        """Number of columns, from the first, whose canaries lie in one tensor."""
        return 0 if self.all_split else self.columns // 2

    @property
    def shape(self) -> tuple[int, int, int]:
        """V, K, n."""
        return TENSORS, self.labels, self.columns

    @property
    def size(self) -> int:
        """V K n, the number of parameters and the most canaries."""
        return TENSORS * self.labels * self.columns

    def place(self, canary: IntArray | int) -> tuple[Any, Any, Any]:
        """Its v, k and i."""
        return cast("tuple[Any, Any, Any]", np.unravel_index(canary, self.shape))

    def along(self, tensors: FloatArray) -> FloatArray:
        """Coefficients ``[..., V K n]`` of V tensors ``[..., V, K, n]`` in the canaries' directions."""
        out: FloatArray = np.einsum("kl,...vln->...vkn", _signs(self.labels), tensors)
        split = out[..., self.whole :]
        out[..., self.whole :] = np.einsum("vw,...wkn->...vkn", _signs(TENSORS), split)
        return out.reshape(*out.shape[:-3], self.size)

    def vector(self, canary: int) -> FloatArray:
        """Its direction, ``[V, K, n]``."""
        v, k, i = self.place(canary)
        out = np.zeros(self.shape)
        tensors = _signs(TENSORS)[v] if i >= self.whole else np.eye(TENSORS)[v]
        out[:, :, i] = np.outer(tensors, _signs(self.labels)[k])
        return out


@lru_cache(maxsize=8)
def _signs(size: int) -> FloatArray:
    """A Hadamard matrix over the square root of its size: symmetric, and its own inverse."""
    return np.asarray(hadamard(size) / size**0.5)


class CanaryNetwork(nn.Module):
    """V linear layers without bias, whose weights are the tensors of the canaries' updates; all zero."""

    def __init__(self, directions: Directions) -> None:
        super().__init__()
        self.columns = directions.columns
        layers = [nn.Linear(self.columns, directions.labels, bias=False) for _ in range(TENSORS)]
        for layer in layers:
            nn.init.zeros_(layer.weight)
        self.parts = nn.ModuleList(layers)


class CanaryUsers(FederatedImageDataset):
    """The users of a game. Absent canaries are removed from the cohorts that production draws."""

    present: BoolArray  # [users]

    def drawn(self, cohort_size: int, round_number: int | None) -> IntArray:
        """The cohort that production draws. A defect of the sampler overrides this."""
        return super().cohort(cohort_size, round_number)

    def cohort(self, cohort_size: int, round_number: int | None = None) -> IntArray:
        """See `FederatedImageDataset`."""
        drawn = self.drawn(cohort_size, round_number)
        return drawn[self.present[drawn]]


class SyntheticEngine:
    """Replaces `CohortEngine`: synthetic updates, scaled as it scales real ones."""

    def __init__(self, game: Game) -> None:
        self._game = game

    def tasks(self, members: Sequence[Member], local: Any, scaling: Any = None) -> list[Task]:
        """Tasks of some users each, so that workers can share them."""
        return [Task(tuple(members[i : i + 256]), True) for i in range(0, len(members), 256)]

    def train(
        self,
        dataset: Any,
        tasks: Sequence[Task],
        local: Any,
        weight_of: Any,
        scaling: PrivateMean,
        rule: Any = None,
    ) -> CohortSum:
        """The sum of these users' scaled updates."""
        directions = self._game.directions
        users = np.array([m.user for task in tasks for m in task.members], np.int64)
        v, _, i = directions.place(users)
        assert directions.labels == 1
        split = (i >= directions.whole)[:, None]
        patterns = np.where(split, _signs(TENSORS)[v], np.eye(TENSORS)[v])  # [U, V]
        raw = patterns * (self._game.lengths(users) * scaling.clipping_bound)[:, None]
        scales, tallies = scaling.user_scales(NAMES, torch.from_numpy(raw**2))
        scaled = raw * scales.numpy()
        total = np.zeros((directions.columns, TENSORS))
        np.add.at(total, i, scaled)
        sums = torch.from_numpy(total.T.copy()).float()
        update = {name: part.reshape(1, -1) for name, part in zip(NAMES, sums)}
        return CohortSum(update, len(users), len(users), tallies.sum(0))

    def take_losses(self) -> tuple[float, int]:
        """Zeros: synthetic updates have no loss."""
        return 0.0, 0


NAMES = [f"backbone.parts.{v}.weight" for v in range(TENSORS)]


@dataclass(frozen=True)
class Release:
    """What is public about T rounds."""

    sums: FloatArray
    """``[T, P]``: each round's noisy mean, times the expected cohort over the bound, along each direction."""
    fractions: FloatArray
    """``[T]``: the noisy fraction of unclipped updates; zero where the bound is fixed."""
    drawn: BoolArray
    """``[T, m]``: which canaries were drawn for a round, in or not. The cyclic sampler makes this public."""


MakeMechanism = Callable[..., PrivateMean]


@dataclass(frozen=True)
class Game:
    """One run with canaries.

    Args:
        calibration: the claim; its population is the canaries and the ``others``.
        directions: the directions of canaries and others.
        others: number of users who are always in; they follow the canaries.
        seed: draws coins and secrets.
        make_mechanism: `private_mean` or a defect; it is called with the calibration and ``noise_seed``.
        users: the class of the data set, or a defect.
        public: the secrets that are replaced by the public seed: "noise", "cohort".
        length: length of canaries' updates, in bounds.
        rates: learning rates of local training and of the server.
    """

    calibration: Calibration
    directions: Directions
    others: int = 0
    seed: int = 0
    make_mechanism: MakeMechanism = private_mean
    users: type[CanaryUsers] = CanaryUsers
    public: frozenset[str] = field(default_factory=frozenset)
    length: float = LONG
    rates: tuple[float, float] = (1e6, 1.0)

    @property
    def canaries(self) -> int:
        """m, the number of canaries."""
        return self.calibration.executed.population - self.others

    @property
    def sampler(self) -> str:
        """The name of the sampler."""
        return self.calibration.config.sampler

    @cached_property
    def joined(self) -> BoolArray:
        """``[m]``: the coins."""
        return stream(self.seed, "canary coins").random(self.canaries) < 0.5

    def lengths(self, users: IntArray) -> FloatArray:
        """Lengths of these users' updates, in bounds; negative if a canary is replaced by its opposite."""
        signs = np.ones(self.canaries + self.others)
        if self.sampler == "fixed":
            signs[: self.canaries] = np.where(self.joined, 1.0, -1.0)
        return np.where(users < self.canaries, self.length, LONG) * signs[users]

    def secret(self, purpose: str) -> int:
        """This run's secret for this purpose, or the public seed."""
        return PUBLIC_SEED if purpose in self.public else derive(self.seed, "secret", purpose)

    def play(self) -> Release:
        """Run all rounds; with several workers, this worker's share of them."""
        mechanism = self.make_mechanism(self.calibration, noise_seed=self.secret("noise"))
        store = self.store()
        sampling = LocalSampling(num_epochs=1, batch_size=1, flip="none", input_size=store.side)
        data = self.users(
            store,
            sampling,
            seed=PUBLIC_SEED,
            cohort_seed=self.secret("cohort"),
            sampler=cast(Any, self.sampler),
        )
        in_all = np.ones(self.others, bool)
        data.present = np.concatenate([self.joined | (self.sampler == "fixed"), in_all])
        network = self.classifier(store.side)
        backend = CentrallyEvaluatedBackend(
            data,
            seed=PUBLIC_SEED,
            postprocessors=[WeightByUser(), mechanism],
            engine=self.engine(network),
        )
        server = torch.optim.SGD(network.parameters(), lr=self.rates[1])
        model = PyTorchModel(network, torch.optim.SGD, server)
        return _rounds(backend, self.algorithm(mechanism), model, mechanism, data, self)

    def store(self) -> Any:
        """One image per user, which is not read. Games on images override this and the next methods."""
        users = self.canaries + self.others
        ids = [str(user) for user in range(users)]
        return SimpleNamespace(user_ids=ids, user_offsets=np.arange(users + 1, dtype=np.int64), side=1)

    def classifier(self, side: int) -> ImageClassifier:
        """The model for images of this side."""
        gray, plain = [128 / 255] * 3, [1.0] * 3
        return ImageClassifier(self.network(), task=MultiLabel(), input_size=side, mean=gray, std=plain)

    def network(self) -> nn.Module:
        """The network with the canaries' tensors."""
        return CanaryNetwork(self.directions)

    def engine(self, network: ImageClassifier) -> Any:
        """The replacement of `CohortEngine`."""
        return SyntheticEngine(self)

    def algorithm(self, mechanism: PrivateMean) -> Any:
        """The algorithm that the backend runs."""
        return FederatedAveraging()

    def seen(self, model: PyTorchModel, mean: MappedVectorStatistics) -> FloatArray:
        """``[P]``: a round's noisy mean along each direction. The model is not changed in any round."""
        tensors = torch.stack([mean[name].reshape(self.directions.shape[1:]) for name in NAMES])
        return self.directions.along(tensors.double().numpy())

    def trials(self, release: Release) -> Trials:
        """The canaries' coins, and each attack's scores for the release."""
        public = release.sums - _public_noise(self.calibration, self.directions)
        scores = attacks(self, release) | {"public noise": public[:, : self.canaries].sum(0)}
        return Trials(self.joined, scores)


def _rounds(
    backend: CentrallyEvaluatedBackend,
    algorithm: Any,
    model: PyTorchModel,
    mechanism: PrivateMean,
    data: CanaryUsers,
    game: Game,
) -> Release:
    expected = game.calibration.executed.cohort_size
    rounds = game.calibration.num_rounds
    train = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=game.rates[0], local_batch_size=1)
    sums, fractions, drawn = [], [], np.zeros((rounds, game.canaries + game.others), bool)
    for r in range(rounds):
        context = training_context(r, expected, train)
        bound = mechanism.clipping_bound
        drawn[r, data.drawn(expected, r)] = True
        stats, metrics = backend.gather_results(model, algorithm, central_context=context)
        stats.average()
        sums.append(game.seen(model, stats) * expected / bound)
        named = {str(name): value for name, value in metrics}
        vote = named.get(str(metric_name("noisy fraction unclipped")))
        fractions.append(0.0 if vote is None else float(vote.overall_value))
    return Release(np.stack(sums), np.array(fractions), drawn[:, : game.canaries])


def attacks(game: Game, release: Release) -> dict[str, FloatArray]:
    """Each attack's scores ``[m]``, which should be high for canaries that are in.

    The first is the best attack on the claimed mechanism (Neyman and Pearson): the likelihood ratio, which is
    a matched filter if participations are known. Each of the others looks for one defect.
    """
    m = game.canaries
    seen = release.sums[:, :m]
    found = {"likelihood": _likelihood(game, release), "sum": seen.sum(0), "largest": seen.max(0)}
    if game.sampler == "cyclic":
        rounds = (release.drawn, ~release.drawn)
        means = [(seen * of).sum(0) / np.maximum(of.sum(0), 1) for of in rounds]
        found["own rounds against others"] = means[0] - means[1]
    else:
        found["outliers among rounds"] = seen.max(0) + seen.min(0) - 2 * np.median(seen, axis=0)
        known = _public_cohorts(game)[:, :m]
        found["public cohorts"] = (seen * known).sum(0) / np.sqrt(np.maximum(known.sum(0), 1))
    return found


def _likelihood(game: Game, release: Release) -> FloatArray:
    """Log-likelihood ratio of in against out, up to increasing functions, from sums in units of the bound."""
    system, seen = game.calibration.executed, release.sums[:, : game.canaries]
    z = game.calibration.value_noise_multiplier * (
        system.cohort_size / game.calibration.simulated.cohort_size
    )
    if game.sampler == "cyclic":
        factor = BandedFactor(game.calibration.num_rounds, game.calibration.config.band).matrix()
        pattern = factor @ release.drawn
        return np.asarray(
            (pattern * (factor @ seen)).sum(0) / np.maximum(np.linalg.norm(pattern, axis=0), 1e-9)
        )
    q = system.sampling_probability

    def mixed(x: FloatArray) -> FloatArray:
        drawn = (x - 0.5) / z**2
        return np.asarray(np.logaddexp(np.log(q) + drawn, np.log1p(-q) if q < 1 else -np.inf))

    ratio = mixed(seen) - mixed(-seen) if game.sampler == "fixed" else mixed(seen)
    return np.asarray(ratio.sum(0))


def _public_cohorts(game: Game) -> BoolArray:
    """``[T, users]``: the cohorts that follow from the public seed."""
    system, rounds = game.calibration.executed, game.calibration.num_rounds
    out = np.zeros((rounds, system.population), bool)
    for r in range(rounds):
        out[r, private_cohort(system.sampler, PUBLIC_SEED, r, system.population, system.cohort_size)] = True
    return out


@lru_cache(maxsize=4)
def _public_noise(calibration: Calibration, directions: Directions) -> FloatArray:
    """``[T, P]``: the noise, in bounds, that a mechanism would draw from the public seed."""
    mechanism, rows = private_mean(calibration, noise_seed=PUBLIC_SEED), []
    for r in range(calibration.num_rounds):
        bound = mechanism.clipping_bound
        nothing = MappedVectorStatistics({"all": torch.zeros(directions.size), TALLY: torch.zeros(5)})
        stats, _ = mechanism.postprocess_server(
            stats=nothing, central_context=training_context(r, 1), aggregate_metrics=Metrics()
        )
        rows.append(stats["all"].double().numpy().reshape(directions.shape) / bound)
    return directions.along(np.stack(rows))
