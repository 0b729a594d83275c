"""How unlike each other users are: the statistics behind Figures 2 and 3 of the FLAIR paper.

Shape letters: U users, N images, K labels, S image side.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataset.arrays import ByteArray, FloatArray, IntArray
from dataset.files import prefetched
from dataset.store.annotations import LabelMatrix
from dataset.store.hdf5 import DataFile
from dataset.store.index import SplitIndex
from pfl_ext.randomness import stream

LEVELS = 256
BATCH = 64


def size_curve(sizes: IntArray) -> tuple[FloatArray, FloatArray]:
    """Users, the largest first: (share of the users, share of the images they hold), ``[U + 1]`` each.

    Both start at 0 and end at 1; without quantity skew the curve is the diagonal (Figure 2, left).
    """
    held = np.concatenate([[0], np.cumsum(np.sort(sizes)[::-1])])
    return np.arange(len(held)) / len(sizes), held / held[-1]


def label_counts(labels: LabelMatrix, user_index: npt.NDArray[np.int32]) -> tuple[IntArray, IntArray]:
    """Images and users with each label, ``[K]`` each (Figure 3)."""
    owner = np.repeat(user_index.astype(np.int64), np.diff(labels.indptr))
    pairs = np.unique(owner * labels.num_labels + labels.indices)
    return labels.counts(), np.bincount(pairs % labels.num_labels, minlength=labels.num_labels)


def emd_1d(a: npt.ArrayLike, b: npt.ArrayLike) -> FloatArray:
    """Earth mover's distance between histograms over the same equidistant bins, in bins; over the last axis.

    On a line, the least work to move one heap into another is the area between their cumulative sums
    (Vallender 1974), so this is exact. Each histogram is first brought to a sum of 1.
    """
    first, second = np.asarray(a, np.float64), np.asarray(b, np.float64)
    difference = first / first.sum(-1, keepdims=True) - second / second.sum(-1, keepdims=True)
    distance: FloatArray = np.abs(difference.cumsum(-1)[..., :-1]).sum(-1)
    return distance


def pixel_histograms(images: ByteArray) -> FloatArray:
    """Share of the pixels at each of 256 levels, by colour channel: ``[n, S, S, 3]`` -> ``[n, 3, 256]``."""
    n, channels = len(images), images.shape[-1]
    cell = images.reshape(n, -1, channels).astype(np.int64)
    cell += LEVELS * (np.arange(n)[:, None, None] * channels + np.arange(channels))
    counts = np.bincount(cell.ravel(), minlength=n * channels * LEVELS)
    return counts.reshape(n, channels, LEVELS) / cell.shape[1]


@dataclass(frozen=True)
class EmdCurves:
    """EMD of each user's mean histogram to all images' mean histogram, in pixel levels, for three splits."""

    label: str
    num_images: int
    real: FloatArray  # [U]
    size_matched: FloatArray  # [U]: the same sizes, images dealt at random
    equal: FloatArray  # [U]: sizes as equal as can be, images dealt at random


def dealt_owners(sizes: IntArray) -> dict[str, IntArray]:
    """Who owns each of the N images: as it is; dealt at random to users as large; to users equally large."""
    num_users, total = len(sizes), int(sizes.sum())
    real = np.repeat(np.arange(num_users), sizes)
    edges = (np.arange(num_users + 1, dtype=np.int64) * total) // num_users
    equal = np.repeat(np.arange(num_users), np.diff(edges))
    return {
        "real": real,
        "size_matched": stream(0, "size-matched users").permutation(real),
        "equal": stream(0, "equal users").permutation(equal),
    }


def emd_of_users(file: DataFile, split: str, *, image_size: int, threads: int) -> EmdCurves:
    """Figure 2, right: on the images with the commonest coarse label.

    One label, so that users' different labels do not show as different pixels. A user's histogram is the mean
    over its images; the distance is the mean over the three colour channels.

    Raises:
        ValueError: where no image of the split has a label.
    """
    index: SplitIndex = file.split(split)
    labels, names = index.labels["labels"], file.label_mapping("labels")
    label = max(names, key=lambda name: int(labels.counts()[names[name]]))
    rows = np.repeat(np.arange(len(labels)), np.diff(labels.indptr))[labels.indices == names[label]]
    if not len(rows):
        raise ValueError(f"no image of the split {split} has the label {label!r}")
    _, sizes = np.unique(index.user_index[rows], return_counts=True)
    order = np.argsort(index.user_index[rows], kind="stable")
    rows, owners = rows[order], dealt_owners(sizes.astype(np.int64))
    sums = {name: np.zeros((len(sizes), 3, LEVELS), np.float32) for name in owners}
    batches = [np.arange(i, min(i + BATCH, len(rows))) for i in range(0, len(rows), BATCH)]

    def histograms(places: IntArray) -> FloatArray:
        return pixel_histograms(file.read_images(split, rows[places], image_size))

    for places, shares in zip(batches, prefetched(histograms, batches, ahead=2 * threads, threads=threads)):
        for name, owner in owners.items():
            np.add.at(sums[name], owner[places], shares.astype(np.float32))
    whole = sums["real"].sum(0, dtype=np.float64)
    curves = {name: emd_1d(total, whole).mean(-1) for name, total in sums.items()}
    return EmdCurves(label, len(rows), **curves)
