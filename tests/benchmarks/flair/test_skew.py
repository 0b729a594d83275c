"""Statistics of unlike users, against answers known beforehand and against scipy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy.stats import wasserstein_distance

from benchmarks.flair.skew import (
    LEVELS,
    dealt_owners,
    emd_1d,
    emd_of_users,
    label_counts,
    pixel_histograms,
    size_curve,
)
from dataset.store.hdf5 import DataFile
from tests.dataset.drawn import label_rows


def test_emd_of_two_heaps_is_their_distance_in_bins() -> None:
    heaps = np.eye(10)
    assert emd_1d(heaps[2], heaps[7]) == pytest.approx(5)
    assert emd_1d(heaps[2], heaps[2]) == 0
    # Half of the mass moves 4 bins; the sums need not be 1.
    assert emd_1d([3, 3, 0, 0, 0, 0], [0, 7, 0, 0, 7, 0]) == pytest.approx(0.5 * 1 + 0.5 * 3)


def test_emd_equals_scipys_and_is_symmetric() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.random((4, 3, LEVELS)), rng.random((4, 3, LEVELS)) ** 3
    ours, level = emd_1d(a, b), np.arange(LEVELS)
    theirs = [[wasserstein_distance(level, level, a[i, c], b[i, c]) for c in range(3)] for i in range(4)]
    np.testing.assert_allclose(ours, theirs, rtol=1e-9)
    np.testing.assert_allclose(ours, emd_1d(b, a))


def test_pixel_histograms_count_each_image_and_channel_apart() -> None:
    images = np.zeros((2, 2, 2, 3), np.uint8)
    images[0, 0, 0] = (255, 7, 0)
    images[1, ..., 2] = 9
    made = pixel_histograms(images)
    assert made.shape == (2, 3, LEVELS)
    np.testing.assert_allclose(made.sum(-1), 1)
    assert made[0, 0, 255] == made[0, 1, 7] == 0.25
    assert made[0, 2, 0] == made[1, 2, 9] == 1
    assert made[1, 0, 0] == 1


def test_the_size_curve_starts_with_the_largest_user() -> None:
    users, images = size_curve(np.array([1, 6, 1, 2]))
    np.testing.assert_allclose(users, [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_allclose(images, [0, 0.6, 0.8, 0.9, 1])


def test_label_counts_count_images_and_users() -> None:
    matrix = label_rows([[0], [0, 2], [0], [2]], 3)
    images, users = label_counts(matrix, np.array([0, 0, 1, 1], np.int32))
    assert images.tolist() == [3, 0, 2]
    assert users.tolist() == [2, 0, 2]


def test_dealt_users_keep_every_image_and_the_sizes_asked_for() -> None:
    sizes = np.array([5, 1, 1, 1])
    owners = dealt_owners(sizes)
    assert np.bincount(owners["size_matched"]).tolist() == sizes.tolist()
    assert np.bincount(owners["equal"]).tolist() == [2, 2, 2, 2]
    assert owners["size_matched"].tolist() != owners["real"].tolist()
    np.testing.assert_array_equal(owners["equal"], dealt_owners(sizes)["equal"])


def test_emd_of_users_equals_the_naive_computation(mini_file: Path) -> None:
    with DataFile(mini_file) as file:
        made = emd_of_users(file, "train", image_size=20, threads=1)
        index, column = file.split("train"), file.label_mapping("labels")[made.label]
        has = index.labels["labels"].dense(np.arange(index.num_images))[:, column] == 1
        assert has.sum() == made.num_images == index.labels["labels"].counts().max()
        images = file.read_images("train", np.arange(index.num_images), 20)
    expected = []
    for user in np.unique(index.user_index[has]):
        own = has & (index.user_index == user)
        expected.append(
            np.mean(
                [
                    wasserstein_distance(images[own][..., c].ravel(), images[has][..., c].ravel())
                    for c in range(3)
                ]
            )
        )
    np.testing.assert_allclose(made.real, expected, rtol=1e-4)
    assert made.equal.mean() < made.size_matched.mean()
