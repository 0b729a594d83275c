"""The mean and standard deviation of each colour by which a network's input is normalised.

The network's input is ``(pixels - mean) / std`` of pixels in 0..1, in training and in evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.data.transforms import IMAGENET_MEAN, IMAGENET_STD

Normalisation = Literal["imagenet", "none", "half", "efficientnet_lite", "data"]
READ = 1024  # images that are read at once
Colours = tuple[float, float, float]


class Scale(NamedTuple):
    """Mean and standard deviation of red, green and blue."""

    mean: Colours
    std: Colours


FIXED: Mapping[Normalisation, Scale] = {
    "imagenet": Scale(IMAGENET_MEAN, IMAGENET_STD),
    "none": Scale((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
    "half": Scale((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "efficientnet_lite": Scale((127 / 255, 127 / 255, 127 / 255), (128 / 255, 128 / 255, 128 / 255)),
}
"""The scales that do not depend on the data."""


def scale_of(store: ImageStore) -> Scale:
    """The scale of all pixels of a split's images, in float64 from exact counts; nothing is drawn.

    A colour that is the same everywhere has the deviation 1.
    """
    num_images = int(store.user_offsets[-1])
    counts = np.zeros((3, 256), np.int64)
    for first in range(0, num_images, READ):
        images, _ = store.read(np.arange(first, min(first + READ, num_images)))
        for colour in range(3):
            counts[colour] += np.bincount(images[..., colour].ravel(), minlength=256)
    shares, levels = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
    mean = shares @ levels
    std = np.sqrt((shares * (levels - mean[:, None]) ** 2).sum(1))
    red, green, blue = zip(mean.tolist(), np.where(std > 0, std, 1.0).tolist())
    return Scale((red[0], green[0], blue[0]), (red[1], green[1], blue[1]))
