"""Training images with a few augmented views each: a view is a crop and flips that stay as they were drawn.

What frozen layers give for a view can be computed once. The crop and the flips of a view are a function of
the seed, the image's row and the view's number. Each time that an image is trained on, one of its views is
drawn, from the generator from which a new crop would be drawn.

Shape letters: n rows, D features of an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pfl_ext.data.transforms import (
    CROP_COLUMNS,
    AugmentConfig,
    FloatArray,
    draw_crops,
    draw_crops_of,
)
from pfl_ext.randomness import stream

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class AugmentedViews:
    """The views of some images, where a store gives these in the place of images."""

    rows: IntArray
    """``[n]``."""
    num_views: int
    """Number of views of each row."""
    read: Callable[[IntArray, IntArray], FloatArray]
    """``[n, D]`` of rows and the number of a view of each, from any thread."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: IntArray) -> AugmentedViews:
        """The views of some of the images."""
        return AugmentedViews(self.rows[places], self.num_views, self.read)

    def drawn(self, rng: np.random.Generator) -> FloatArray:
        """``[n, D]``: one view of each row, all as likely, independently of each other."""
        return self.read(self.rows, self.draw(rng, len(self.rows)))

    def draw(self, rng: np.random.Generator, n: int) -> IntArray:
        """Numbers of views, ``[n]``."""
        return rng.integers(self.num_views, size=n)


def crops_of_view(
    seed: int,
    split: str,
    rows: IntArray,
    view: int,
    image_size: int,
    input_size: int,
    augment: AugmentConfig,
) -> FloatArray:
    """The crops and flips of one view of some images, ``[n, 6]`` as `draw_crops` gives them.

    Args:
        seed: of the run.
        split: in which the images are.
        rows: of the images, in this split of the data file.
        view: its number.
        image_size: of the stored images.
        input_size: of the network.
        augment: how crops and flips are drawn.
    """
    crops = np.empty((len(rows), CROP_COLUMNS), np.float32)
    for place, row in enumerate(rows.tolist()):
        rng = stream(seed, "augmented view", split, row, view)
        crops[place] = draw_crops(rng, 1, image_size, input_size, augment.crop, augment.flip)[0]
    return crops


def augmented(
    images: npt.NDArray[Any] | AugmentedViews,
    rng: np.random.Generator,
    input_size: int,
    augment: AugmentConfig,
) -> tuple[npt.NDArray[Any], FloatArray]:
    """What a step is fed: images with new crops, or the features of one view of each, with zeros."""
    if isinstance(images, AugmentedViews):
        return images.drawn(rng), np.zeros((len(images), CROP_COLUMNS), np.float32)
    return images, draw_crops_of(images, rng, input_size, augment)
