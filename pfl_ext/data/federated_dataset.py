"""Users' images as a pfl ``FederatedDataset`` whose cohorts are functions of the round.

Shape letters: U users, N images, K labels, B batch, H and W image height and width.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from pfl.data.federated_dataset import FederatedDataset
from pfl.internal.ops.selector import get_default_framework_module as get_ops

from dataset.arrays import ByteArray, Float32Array, IntArray
from dataset.files import prefetched
from pfl_ext.data import fedvc
from pfl_ext.data.augmented_views import AugmentedViews
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.schedule import longest_first, predicted_costs
from pfl_ext.data.transforms import CROP_COLUMNS
from pfl_ext.data.user_images import Annotations, Batch, Collate, UserImages
from pfl_ext.devices.turnout import Turnout, Turnouts
from pfl_ext.privacy.sampling import private_cohort
from pfl_ext.randomness import seed32, stream


class ImageStore(Protocol):
    """The interface of a store of one split. Rows are images, and a user's rows are contiguous."""

    @property
    def user_ids(self) -> Sequence[str]:
        """The U users' ids."""
        ...

    @property
    def user_offsets(self) -> IntArray:
        """``[U + 1]``: user u has the rows ``user_offsets[u]:user_offsets[u + 1]``."""
        ...

    def read(self, rows: IntArray) -> tuple[ByteArray, Annotations]:
        """Images ``[n, H, W, 3]`` and annotations ``[n, ...]`` of these rows, in their order.

        Must be safe to call from several threads.
        """
        ...

    def targets(self, rows: IntArray) -> Annotations:
        """The annotations that `read` returns, without the images."""
        ...


def are_labels(annotations: Annotations) -> bool:
    """Whether annotations of some images are labels ``[n, K]`` of 0 and 1."""
    return annotations.ndim == 2 and bool(np.isin(annotations, (0, 1)).all())


Reweighting = Callable[[Annotations, Annotations], Float32Array]
"""Weights the targets ``[n, K]`` of a user's images in a round, given those of all its images ``[N, K]``."""


@dataclass(frozen=True)
class Partition:
    """Who owns which rows of a store."""

    user_ids: Sequence[str]  # [U]
    rows: IntArray  # [N], a user's rows contiguous
    offsets: IntArray  # [U + 1] into rows

    @property
    def sizes(self) -> IntArray:
        """Images per user, ``[U]``."""
        return np.diff(self.offsets)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each user, 0 to U - 1, by its id."""
        return {user: number for number, user in enumerate(self.user_ids)}

    def rows_of(self, user: int) -> IntArray:
        """The store's rows of one user."""
        return self.rows[self.offsets[user] : self.offsets[user + 1]]


def natural_partition(store: ImageStore) -> Partition:
    """Each image with the user who took it."""
    offsets = np.asarray(store.user_offsets, np.int64)
    return Partition(store.user_ids, np.arange(offsets[-1]), offsets)


def iid_partition(store: ImageStore, seed: int) -> Partition:
    """A random partition of all images among the same number of users, in equal shares.

    Sizes are the floor and the ceiling of the real mean (8.35 in FLAIR), and every image is used once. So a
    comparison of IID with non-IID compares only the split. pfl-research's FLAIR-IID gives each user 50
    images, six times the data.
    """
    natural = natural_partition(store)
    num_users, num_images = len(natural.user_ids), len(natural.rows)
    offsets = (np.arange(num_users + 1, dtype=np.int64) * num_images) // num_users
    rows = stream(seed, "iid partition").permutation(num_images)
    return Partition([f"iid-{u:06d}" for u in range(num_users)], rows, offsets)


@dataclass(frozen=True)
class Member:
    """A place in a cohort: the user, its turn in this round (above 0 only with replacement), and its work."""

    user: int
    turn: int
    num_images: int
    """Number of the user's images that take part in this round."""
    num_steps: int
    num_passes: int
    """Number of images in all steps together."""

    def weight(self, by_images: bool) -> float:
        """Its weight in a mean: its number of images, or 1."""
        return float(self.num_images) if by_images else 1.0


Sampler = Literal["fixed", "replacement", "poisson", "cyclic", "proportional", "proportional_replacement"]


class FederatedImageDataset(FederatedDataset):
    """A pfl ``FederatedDataset`` over an `ImageStore`.

    The cohort of a round, the images that a user with many brings, their order and their crops depend on
    (seed, round, user) alone. ``sampler``: "fixed" draws a number of users without replacement, "replacement"
    with replacement (pfl-research). "poisson" draws each user independently, so the size varies. "cyclic"
    takes the next users of a circle (`pfl_ext.privacy.sampling`). FedVC's "proportional" draws one user after
    another from those left, with probabilities proportional to their images (so a user with more than 1 /
    cohort_size of all images comes less often than that). "proportional_replacement" draws from all users:
    the plain mean of updates is then unbiased, and a user that comes twice brings two samples. If all users
    have the same size, these two are "fixed" and "replacement". ``reweight`` puts weights into the targets,
    as FedIR's. ``collate`` is the task's, for annotations that are no plain arrays. ``cohort_seed`` must be a
    secret for privacy amplified by sampling, so that cohorts cannot be drawn again. ``noise_seed`` is the
    secret for the seeds that pfl gives to its own mechanisms (pfl keeps 32 bits of each). Where it is None
    they come from ``seed``, and `CentrallyEvaluatedBackend` refuses these mechanisms, because anybody who
    knows ``seed`` could subtract their noise. ``threads`` threads read ahead.

    Raises:
        ValueError: when a cohort is larger than the population.
    """

    def __init__(
        self,
        store: ImageStore,
        sampling: LocalSampling,
        *,
        seed: int,
        cohort_seed: int | None = None,
        noise_seed: int | None = None,
        partition: Partition | None = None,
        sampler: Sampler = "fixed",
        reweight: Reweighting | None = None,
        collate: Collate = torch.from_numpy,
        prefetch: int = 4,
        threads: int = 1,
    ) -> None:
        self.partition = natural_partition(store) if partition is None else partition
        super().__init__(self._user_by_id, self._no_sampler)
        self.store, self.sampling, self._seed = store, sampling, seed
        self._cohort_seed = seed if cohort_seed is None else cohort_seed
        self.noise_seed = noise_seed
        self._sampler, self._prefetch, self._threads = sampler, prefetch, threads
        self._reweight, self._collate = reweight, collate
        self._round = 0
        self._only: IntArray | None = None
        self.turnouts: Turnouts | None = None
        """Says which users report in a round, where devices are simulated; None: all users that are drawn."""

    @property
    def num_users(self) -> int:
        """U, the number of users."""
        return len(self.partition.user_ids)

    @property
    def sizes(self) -> IntArray:
        """Images of each user, ``[U]``."""
        return self.partition.sizes

    @property
    def images(self) -> IntArray:
        """Images of each user that take part in a round, ``[U]``."""
        return self.sampling.taking_part(self.sizes)

    @property
    def passes(self) -> IntArray:
        """Images in all local steps of each user that does all of its work, ``[U]``."""
        return self.sampling.image_passes(self.sizes)

    @property
    def total_images(self) -> int:
        """Number of images that would take part if all users did."""
        return int(self.images.sum())

    @property
    def has_labels(self) -> bool:
        """Whether annotations are labels ``[N, K]`` of 0 and 1, by those of the first images."""
        return are_labels(self.store.targets(self.partition.rows[:256]))

    @property
    def is_proportional(self) -> bool:
        """Whether users are drawn in proportion to their images."""
        return self._sampler.startswith("proportional")

    def set_round(self, round_number: int) -> None:
        """Set the round for the next ``get_cohort``."""
        self._round = round_number

    @contextlib.contextmanager
    def only(self, users: IntArray) -> Iterator[None]:
        """In this context these users are the cohort."""
        before, self._only = self._only, users
        try:
            yield
        finally:
            self._only = before

    def of(self, partition: Partition) -> FederatedImageDataset:
        """A data set with the same store, draws and cohorts, where these users own these rows."""
        other = copy.copy(self)
        other.partition, other.make_dataset_fn = partition, other._user_by_id
        return other

    @staticmethod
    def _no_sampler() -> int:
        raise TypeError("users are drawn as cohorts: call set_round and get_cohort")

    def _user_by_id(self, user_id: str) -> UserImages:
        return self.user_dataset(self.partition.numbers[user_id])

    def cohort(self, cohort_size: int, round_number: int | None = None) -> IntArray:
        """The users of a round's cohort (None: of the current round), the same on every worker."""
        if self._only is not None:
            return self._only
        number = self._round if round_number is None else round_number
        if self.turnouts is not None:
            return self.turnouts.of(number).users
        return self.draw_cohort(cohort_size, number)

    def draw_cohort(self, cohort_size: int, number: int, among: IntArray | None = None) -> IntArray:
        """The users that are drawn in a round, whether or not their devices let them report.

        ``among``: the users to draw from, at least ``cohort_size`` and each at most once; None: all users.
        """
        if among is not None:
            chances = fedvc.chances(self.sizes[among]) if self._sampler == "proportional" else None
            rng = stream(self._cohort_seed, "cohort of those who are on", number)
            return rng.choice(among, cohort_size, replace=False, p=chances).astype(np.int64)
        population = len(self.partition.user_ids)
        if self._sampler in ("poisson", "fixed", "cyclic"):
            return private_cohort(self._sampler, self._cohort_seed, number, population, cohort_size)
        replace = self._sampler.endswith("replacement")
        if cohort_size > population and not replace:
            raise ValueError(
                f"cohort_size is {cohort_size}, but there are only {population} training users: give at "
                f"most {population}, --federated.cohort_size {population}"
            )
        rng = stream(self._cohort_seed, "cohort", number)
        chances = fedvc.chances(self.partition.sizes) if self.is_proportional else None
        return rng.choice(population, cohort_size, replace=replace, p=chances).astype(np.int64)

    def assign(self, cohort: IntArray, world_size: int) -> list[list[int]]:
        """Positions of the cohort for each worker, by predicted time, longest first."""
        sizes = self.partition.sizes[cohort]
        steps, images = self.sampling.num_steps(sizes), self.sampling.image_passes(sizes)
        return longest_first(predicted_costs(steps, images), world_size)

    def user_dataset(self, user: int, turn: int = 0) -> UserImages:
        """The images that user number ``user`` trains on in this round."""
        rng = self._stream(user, turn)
        all_rows = self.partition.rows_of(user)
        rows = self.sampling.take(all_rows, rng)
        if len(rows) > len(all_rows):  # FedVC: images that come twice are read once
            rows, places = np.unique(rows, return_inverse=True)
            images, targets = (part[places] for part in self.store.read(rows))
        else:
            images, targets = self.store.read(rows)
        if self._reweight is not None:
            targets = self._reweight(targets, self.store.targets(all_rows))
        user_id, turnout = self.partition.user_ids[user], self._turnout
        most = None if turnout is None else turnout.steps_of.get(user)
        level = user / max(self.num_users - 1, 1) if self.sampling.noise_by_user else 1.0
        return UserImages(images, targets, user_id, self.sampling, rng, self._collate, most, level)

    def _stream(self, user: int, turn: int) -> np.random.Generator:
        """The random stream of a user's training in this round."""
        return stream(self._seed, "local training", self._round, user, turn)

    def members(self, cohort_size: int) -> list[Member]:
        """The round's cohort, the same on every worker."""
        cohort, turnout = self.cohort(cohort_size), self._turnout
        sizes = self.partition.sizes[cohort]
        steps = self.sampling.num_steps(sizes) if turnout is None else turnout.steps
        passes = self.sampling.images_of_steps(sizes, steps)
        sizes = self.sampling.taking_part(sizes)
        turns: Counter[int] = Counter()
        members = []
        for user, *work in zip(*(part.tolist() for part in (cohort, sizes, steps, passes))):
            members.append(Member(user, turns[user], *work))
            turns[user] += 1
        return members

    @property
    def _turnout(self) -> Turnout | None:
        """The turnout of this round; None if all users that are drawn do all their work."""
        return None if self.turnouts is None or self._only is not None else self.turnouts.of(self._round)

    def share(self, cohort_size: int) -> list[Member]:
        """This worker's part of the round's cohort, user by user."""
        members, distributed = self.members(cohort_size), get_ops().distributed
        shares = self.assign(np.array([m.user for m in members], np.int64), distributed.world_size)
        return [members[p] for p in shares[distributed.global_rank]]

    def later_turns(self, cohort: IntArray) -> dict[int, Iterator[int]]:
        """The turns of users who come several times in a cohort, in the order in which this worker has
        them."""
        users, counts = np.unique(cohort, return_counts=True)
        if counts.max(initial=1) == 1:
            return {}
        distributed = get_ops().distributed
        mine = self.assign(cohort, distributed.world_size)[distributed.global_rank]
        turns = {int(user): list(np.flatnonzero(cohort == user)) for user in users[counts > 1]}
        return {user: iter([places.index(p) for p in mine if p in places]) for user, places in turns.items()}

    def idle_workers(self, cohort_size: int) -> int:
        """Number of workers without a user in this round. pfl counts a placeholder user for each of them."""
        shares = self.assign(self.cohort(cohort_size), get_ops().distributed.world_size)
        return sum(not share for share in shares)

    def read(self, member: Member) -> UserImages:
        """The images that this member of the round's cohort trains on."""
        return self.user_dataset(member.user, member.turn)

    def read_all(self, members: Sequence[Member]) -> Iterator[UserImages]:
        """`read` for one member after another, reading ahead."""
        return prefetched(self.read, members, ahead=self._prefetch, threads=self._threads)

    def pooled(self, cohort_size: int) -> UserImages:
        """All images of the round's cohort as those of one user: one order, and batches across users."""
        everybody = [images.raw_data for images in self.read_all(self.members(cohort_size))]
        images, targets = (np.concatenate([data[place] for data in everybody]) for place in (0, 1))
        rng = stream(self._seed, "pooled training", self._round)
        return UserImages(images, targets, "pooled", self.sampling, rng, self._collate)

    def single_features(self, members: Sequence[Member]) -> Batch | None:
        """Features ``[n, D]``, targets and crops of n users who own one row each, in one read.

        The result is that of `read` for one after another. Nothing is drawn for such users but a view, where
        there are several: one row has one order, and features have no crops. None if a user owns more rows,
        or if rows are images or have keys.
        """
        users = np.array([member.user for member in members], np.int64)
        plain = self._reweight is None and not self.sampling.keys and self.sampling.num_epochs == 1
        if not plain or (self.partition.sizes[users] != 1).any() or (self.sampling.virtual_size or 1) != 1:
            return None
        nobody: Any = self.store.read(np.empty(0, np.int64))[0]
        of_views = isinstance(nobody, AugmentedViews)
        if not of_views and nobody.ndim != 2:
            return None
        found: tuple[Any, Annotations] = self.store.read(self.partition.rows[self.partition.offsets[users]])
        features, targets = found
        if of_views:
            draws = [features.draw(self._stream(member.user, member.turn), 1) for member in members]
            features = features.read(features.rows, np.concatenate(draws))
        crops = np.zeros((len(users), CROP_COLUMNS), np.float32)
        return torch.from_numpy(features), self._collate(targets), torch.from_numpy(crops)

    def get_cohort(self, cohort_size: int) -> Iterator[tuple[UserImages, int]]:
        """This worker's share of the cohort, in pfl's form: pairs of (user dataset, seed)."""
        mine = self.share(cohort_size)
        datasets = self.read_all(mine)
        if not mine:
            nobody = self.store.read(np.empty(0, np.int64))
            rng = stream(self._seed, "nobody")
            yield UserImages(*nobody, None, self.sampling, rng, self._collate), 0
        seed = self._seed if self.noise_seed is None else self.noise_seed
        for member, dataset in zip(mine, datasets):
            yield dataset, seed32(seed, "local noise", self._round, member.user, member.turn)
