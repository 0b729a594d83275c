"""Moments of channels over users: what they are, and how far one user can move what is released."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataset.arrays import Float32Array
from pfl_ext.data.federated_dataset import Partition
from pfl_ext.privacy.moments import IMAGES, Release, channel_moments
from tests.closeness import assert_close_as_vector

CHANNELS, PIXELS = 6, 4
BOUNDS = (0.8, 1.5)


def drawn(num_images: int, seed: int = 0) -> Float32Array:
    scale = np.linspace(0.2, 2, CHANNELS).repeat(PIXELS)
    values = np.random.default_rng(seed).standard_normal((num_images, CHANNELS * PIXELS)) + 0.3
    return (values * scale).astype(np.float32)


def partition(sizes: list[int], seed: int = 1) -> Partition:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    rows = np.random.default_rng(seed).permutation(int(offsets[-1]))
    return Partition([str(u) for u in range(len(sizes))], rows, offsets)


SIZES = [3, 1, 0, 2, 700, 1, 1] + [1] * (2 * IMAGES)
"""Images of each user; one has more than are read at a time."""


def test_each_user_counts_alike_with_the_mean_of_its_images() -> None:
    features, users = drawn(sum(SIZES)), partition(SIZES)
    expected = np.zeros((2, CHANNELS))
    for user in range(len(SIZES)):
        if SIZES[user]:
            own = features[users.rows_of(user)].astype(np.float64).reshape(-1, CHANNELS, PIXELS)
            expected += np.stack([own.mean((0, 2)), (own**2).mean((0, 2))]) / len(SIZES)
    found = channel_moments(features.__getitem__, users, CHANNELS)
    assert_close_as_vector(torch.stack(found), torch.from_numpy(expected), PIXELS + 2)


@pytest.mark.parametrize("size", [1, 3, 700])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_one_user_moves_the_sums_by_no_more_than_their_bounds(size: int, scale: float) -> None:
    """With the same noise; a user without images is one that was taken away."""
    sizes = [*SIZES, size]
    features, users = drawn(sum(sizes)), partition(sizes)
    features[users.rows_of(len(SIZES))] *= scale
    without = Partition(users.user_ids, users.rows, np.append(users.offsets[:-1], users.offsets[-2]))
    release = Release(8.0, BOUNDS, 4)
    pairs = zip(*(channel_moments(features.__getitem__, u, CHANNELS, release) for u in (users, without)))
    for bound, (there, gone) in zip(BOUNDS, pairs):
        moved = float((there.double() - gone.double()).norm()) * len(sizes)
        rounding = 2**-24 * float(there.norm() + gone.norm()) * len(sizes)
        assert moved <= bound + rounding
        assert scale < 1 or moved >= 0.9 * bound - rounding, "a long vector is clipped to it"


def test_the_noise_is_that_of_the_multiplier_and_of_the_secret() -> None:
    sizes = [1] * 50
    features, users = drawn(50), partition(sizes)

    def noises(release: Release) -> list[torch.Tensor]:
        quiet = Release(1e-12, release.bounds, release.noise_seed)
        pairs = zip(*(channel_moments(features.__getitem__, users, CHANNELS, r) for r in (release, quiet)))
        return [(loud - plain) * len(sizes) / release.multiplier for loud, plain in pairs]

    drawn_noises = [noises(Release(1e6, BOUNDS, seed)) for seed in range(400)]
    for moment, bound in enumerate(BOUNDS):
        found = torch.stack([noise[moment] for noise in drawn_noises])
        # 2,400 draws: their deviation has a relative one of 1 / sqrt(2 n)
        assert float(found.std()) == pytest.approx(bound, rel=5 / (2 * found.numel()) ** 0.5)
    again = noises(Release(1e6, BOUNDS, 0))
    assert all(torch.equal(a, b) for a, b in zip(again, drawn_noises[0]))
    ratio = drawn_noises[0][0] / BOUNDS[0] - drawn_noises[0][1] / BOUNDS[1]
    assert float(ratio.abs().min()) > 1e-3, "the second moment has noise of its own"


@pytest.mark.parametrize("odd", [np.nan, np.inf])
def test_a_user_whose_features_are_not_finite_counts_as_zero(odd: float) -> None:
    features, users = drawn(3), partition([1, 2])
    features[users.rows_of(0), -1] = odd
    zeros = features.copy()
    zeros[users.rows_of(0)] = 0
    release = Release(1.0, BOUNDS, 4)
    odds, nothing = (channel_moments(f.__getitem__, users, CHANNELS, release) for f in (features, zeros))
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(odds, nothing))
