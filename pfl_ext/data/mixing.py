"""Mixup and CutMix: each image of a batch is mixed with another one of the same batch, and so are its labels.

Zhang et al. 2018 (mixup, arXiv 1710.09412, Section 2) and Yun et al. 2019 (CutMix, arXiv 1905.04899, Section
3.1). For images x_a and x_b with labels y_a and y_b, and a share s that is drawn from Beta(alpha, alpha),

    mixup:  x = s x_a + (1 - s) x_b              y = s y_a + (1 - s) y_b
    CutMix: x = x_b inside of a box, else x_a    y = s y_a + (1 - s) y_b, with s the share outside of the box

As in both authors' code, a batch has one share and one box, and the images b are a permutation of the images
a. So all labels of a batch together stay the same. If both are used, each batch has one of them, with equal
chances, as in timm and torchvision. A batch of one image stays as it is.

Nothing leaves a batch, which has images of a single user. Shares, pairs and boxes are drawn where batches are
made, as functions of (seed, round, user, step), and are passed on with the crops, as further columns. A pair
is written as the distance between two places in the batch. So it remains valid when batches of several users
are joined, and where a batch is filled up at its end.

Shape letters: B images of a batch, S the side of the network's input, K labels.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dataset.arrays import Float32Array
from pfl_ext.data.transforms import CROP_COLUMNS, KEY_COLUMNS, AugmentConfig

KEYED_COLUMNS = CROP_COLUMNS + KEY_COLUMNS + 1
"""Columns of crops with keys and levels, which those of `mix` follow."""


def mix(
    targets: Tensor, crops: Float32Array, rng: np.random.Generator, input_size: int, augment: AugmentConfig
) -> tuple[Tensor, Float32Array]:
    """Draw how a batch is mixed, and mix its targets; `mixed` then mixes its images.

    Args:
        targets: of the batch's images, ``[B, K]``: labels, or labels times weights.
        crops: ``[B, 9]``, with keys.
        rng: the generator.
        input_size: S.
        augment: at least one of ``mixup`` and ``cutmix`` is given.

    Returns:
        Mixed targets ``[B, K]`` float32; and the crops with six more columns ``[B, 15]``: the place of the
        other image minus that of this one, this image's share of a pixel outside of the box, and the box's
        first row and column and those that follow its last ones.
    """
    assert targets.ndim == 2, "masks and boxes are not mixed"
    assert crops.shape == (len(targets), KEYED_COLUMNS), "a crop with a key for each image"
    alphas = [(alpha, cuts) for alpha, cuts in ((augment.mixup, False), (augment.cutmix, True)) if alpha]
    alpha, cuts = alphas[int(rng.integers(len(alphas)))]
    share, box = rng.beta(alpha, alpha), (0, 0, 0, 0)
    places = np.arange(len(targets))
    others = rng.permutation(len(targets))
    if cuts:
        box = _box(rng, share, input_size)
        share = 1 - (box[2] - box[0]) * (box[3] - box[1]) / input_size**2
    columns = np.empty((len(targets), 6), np.float32)
    columns[:, 0], columns[:, 1], columns[:, 2:] = others - places, 1.0 if cuts else share, box
    targets = targets.float()
    return (
        torch.lerp(targets[torch.from_numpy(others)], targets, float(np.float32(share))),
        np.concatenate([crops, columns], 1),
    )


def _box(rng: np.random.Generator, share: float, size: int) -> tuple[int, int, int, int]:
    """The authors' box, about ``1 - share`` of an image: around a uniform pixel, and cut off at the edges."""
    half = int(size * math.sqrt(1 - share)) // 2
    row, column = rng.integers(size, size=2).tolist()
    return max(row - half, 0), max(column - half, 0), min(row + half, size), min(column + half, size)


def is_mixed(crops: Tensor | None) -> bool:
    """Whether these crops say how images are mixed, as those of `mix` do."""
    return crops is not None and crops.shape[1] > KEYED_COLUMNS


def mixed(x: Tensor, crops: Tensor | None) -> Tensor:
    """A network's input with the images mixed as `mix` has drawn; without its columns, unchanged.

    Nothing here waits for the device. Images that fill a batch up have the first image's columns: they are
    mixed with each other, and no other image is mixed with them.

    Args:
        x: ``[B, 3, S, S]``, of one batch or of several, one after another.
        crops: ``[B, 15]``, or with fewer columns.
    """
    if crops is None or not is_mixed(crops):
        return x
    apart, outside, *box = crops[:, KEYED_COLUMNS:].unbind(1)
    places, pixels = (torch.arange(x.shape[axis], device=x.device) for axis in (0, 2))
    others = (places + apart.to(torch.int64)).clamp_(0, len(x) - 1)
    top, left, bottom, right = (edge[:, None] for edge in box)
    rows, columns = ((low <= pixels) & (pixels < high) for low, high in ((top, bottom), (left, right)))
    if x.is_contiguous():
        return x[others].lerp_(x, _own(rows, columns, outside, x.dtype)[:, None])
    # with channels last, a share for each channel of a pixel: a CPU is slow at numbers that are read twice
    lines = x.permute(0, 2, 3, 1).flatten(2)
    own = _own(rows, columns.repeat_interleave(x.shape[1], 1), outside, x.dtype)
    return lines[others].lerp_(lines, own).view(-1, *x.shape[2:], x.shape[1]).permute(0, 3, 1, 2)


def _own(rows: Tensor, columns: Tensor, outside: Tensor, dtype: torch.dtype) -> Tensor:
    """Each image's share of its own pixels, ``[B, n, m]``: 0 in the box, which has these rows and columns."""
    inside, outside = rows[:, :, None].to(dtype) * columns[:, None].to(dtype), outside[:, None, None]
    return inside.mul_(-outside).add_(outside)
