"""Training images with a few augmented views each. A view is a crop with flips that is drawn once.

So the output of frozen layers for a view can be computed once. The crop and flips of a view are a function of
the seed, the image's row and the view's number. Whenever an image is trained on, one of its views is drawn,
from the generator that would otherwise draw a new crop.

Shape letters: n rows, D features of an image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dataset.arrays import Float32Array, IntArray
from pfl_ext.data.transforms import CROP_COLUMNS, AugmentConfig, draw_crops, draw_crops_of
from pfl_ext.randomness import stream


@dataclass(frozen=True)
class AugmentedViews:
    """The views of some images, which a store returns in the place of images."""

    rows: IntArray
    """The images' rows ``[n]``."""
    num_views: int
    """Number of views of each row."""
    read: Callable[[IntArray, IntArray], Float32Array]
    """Returns features ``[n, D]`` for rows and a view's number of each; safe in any thread."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, places: IntArray) -> AugmentedViews:
        """The views of some of the images."""
        return AugmentedViews(self.rows[places], self.num_views, self.read)

    def drawn(self, rng: np.random.Generator) -> Float32Array:
        """``[n, D]``: one view of each row, drawn uniformly and independently."""
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
) -> Float32Array:
    """The crops and flips of one view of some images, ``[n, 6]`` as from `draw_crops`.

    Args:
        seed: the run's seed.
        split: the split of the images.
        rows: the images' rows in this split of the data file.
        view: the number of the view.
        image_size: side of the stored images, in pixels.
        input_size: side of the network's input, in pixels.
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
) -> tuple[npt.NDArray[Any], Float32Array]:
    """The input of a step: images with new crops, or the features of one view of each image with zeros."""
    if isinstance(images, AugmentedViews):
        return images.drawn(rng), np.zeros((len(images), CROP_COLUMNS), np.float32)
    return images, draw_crops_of(images, rng, input_size, augment)
