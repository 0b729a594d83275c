"""The mean and the mean square of each channel of all users' features, exact or released privately.

Tramèr and Boneh (arXiv 2011.11660) standardise their features in this way. They take the clipping bounds from
the training images, without privacy; here the config gives the bounds.

**Sensitivity.** A user's vector ``[C]`` is the mean over its images of a moment of each channel. It is
clipped to an L2 norm of at most the bound, and the vectors of all users are added up. Removing one user
changes the sum by one such vector, so by at most the bound. Gaussian noise of ``multiplier`` times the bound
is added: for each of the two moments this is a Gaussian mechanism with that noise multiplier, in which every
user takes part. The sum is divided by the number of users, which is assumed to be public. The accountant
composes both with the rounds (`pfl_ext.privacy.epsilon.System.releases`), where neighbours differ by one user
added or removed.

Shape letters: U users, n images of some users, C channels, P pixels of a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dataset.arrays import Float32Array, FloatArray, IntArray
from pfl_ext.privacy.mechanisms import gaussian_noise
from pfl_ext.randomness import derive

Read = Callable[[IntArray], Float32Array]
"""Reads the features ``[n, C P]`` of some rows."""

IMAGES = 512  # that are read at a time
MOMENTS = ("mean", "mean square")


class Owners(Protocol):
    """The users who own the rows: a `pfl_ext.data.federated_dataset.Partition`."""

    @property
    def sizes(self) -> IntArray:
        """Images of each user, ``[U]``."""
        ...

    def rows_of(self, user: int) -> IntArray:
        """The rows of one user."""
        ...


@dataclass(frozen=True)
class Release:
    """How the two moments are made private."""

    multiplier: float
    """Standard deviation of the noise on each sum, in multiples of its bound."""
    bounds: tuple[float, float]
    """Bounds on the norms of a user's vector of means and of its vector of mean squares."""
    noise_seed: int
    """A secret seed of the noise."""


def channel_moments(
    read: Read, users: Owners, channels: int, release: Release | None = None
) -> tuple[Tensor, Tensor]:
    """The mean ``[C]`` over users of each channel's mean, and of its mean square, float32.

    Args:
        read: reads the features.
        users: the owners of the features. All users have the same weight; one without images counts as zero.
        channels: C.
        release: how the moments are made private; None: exact moments, without privacy.
    """
    totals = np.zeros((2, channels))
    for vectors in _vectors(read, users, channels):
        for moment, vector in enumerate(vectors):
            totals[moment] += (vector if release is None else clipped(vector, release.bounds[moment])).sum(0)
    if release is not None:
        for moment, bound in enumerate(release.bounds):
            seed = derive(release.noise_seed, "channel moments", MOMENTS[moment])
            totals[moment] += release.multiplier * bound * gaussian_noise(seed, channels).double().numpy()
    first, second = torch.from_numpy(totals / len(users.sizes)).float()
    return first, second


def clipped(vectors: FloatArray, bound: float) -> FloatArray:
    """Each of ``[U, C]`` with a norm of at most ``bound``; zeros for one that is not finite."""
    finite = np.isfinite(vectors).all(1, keepdims=True)
    vectors = np.where(finite, vectors, 0.0)
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    limit = bound * (1 - 2.0**-40)  # room for rounding
    scaled: FloatArray = vectors * np.minimum(1.0, limit / np.maximum(norms, 1e-300))
    return scaled


def _vectors(read: Read, users: Owners, channels: int) -> Iterator[FloatArray]:
    """``[2, u, C]``: both moments of some users, one group of users after another."""
    sizes = users.sizes
    owners = np.flatnonzero(sizes)
    groups = np.cumsum(sizes[owners]) // IMAGES
    for number in np.unique(groups):
        group = owners[groups == number]
        rows = np.concatenate([users.rows_of(user) for user in group.tolist()])
        features = read(rows).reshape(len(rows), channels, -1)
        means = features.mean(2, dtype=np.float64)
        squares = np.einsum("ncp,ncp->nc", features, features) / features.shape[2]
        starts = np.concatenate([[0], np.cumsum(sizes[group])[:-1]])
        sums = np.add.reduceat(np.stack([means, squares.astype(np.float64)]), starts, axis=1)
        yield sums / sizes[group][:, None]
