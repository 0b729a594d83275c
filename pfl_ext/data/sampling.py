"""How the images of one user become the batches of its local training in one round."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

import numpy as np
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from dataset.arrays import IntArray
from pfl_ext.configs import STRICT
from pfl_ext.data import fedvc
from pfl_ext.data.transforms import AugmentConfig


@dataclass(frozen=True, config=STRICT)
class BatchConfig(fedvc.VirtualOptions):
    """Which of a user's images take part, and in which batches.

    ``straddle`` is ml-flair's ``repeat(2).batch(16)``: a user with n <= B / 2 images makes one step of 2n
    images, not two of n. ``virtual_size`` replaces ``max_images``: see `pfl_ext.data.fedvc.take`.
    """

    num_epochs: PositiveInt = 1
    """Passes over a user's images in a round."""
    batch_size: PositiveInt = 32
    """Number of images in a step."""
    max_images: PositiveInt | None = None
    """Maximum number of a user's images that are used in a round; none: all."""
    cap: Literal["random", "first"] = "random"
    """Which images of a user with more are used: drawn again in every round, or always the first."""
    straddle: bool = False
    """Whether batches continue across the end of an epoch, so that only a user's last one may be smaller."""
    shuffle: bool = True
    """Whether images come in a drawn order; false: in the store's order, in every epoch of every round."""
    reshuffle: bool = True
    """Whether every epoch has a new order of the images; false: that of the first epoch."""

    def take(self, rows: IntArray, rng: np.random.Generator) -> IntArray:
        """The rows that take part, in the store's order. If all do, nothing is drawn."""
        if self.virtual_size is not None:
            return fedvc.take(rows, self.virtual_size, rng)
        if self.max_images is None or len(rows) <= self.max_images:
            return rows
        if self.cap == "first":
            return rows[: self.max_images]
        return rows[np.sort(rng.choice(len(rows), self.max_images, replace=False))]

    def epochs(self, n: int, rng: np.random.Generator) -> list[list[IntArray]]:
        """For each epoch, the batches of positions 0..n-1. With ``straddle`` all are in the first epoch."""
        first = rng.permutation(n) if self.shuffle else np.arange(n)
        again = self.shuffle and self.reshuffle
        orders = [first] + [rng.permutation(n) if again else first for _ in range(self.num_epochs - 1)]
        if self.straddle:
            orders = [np.concatenate(orders)] + [first[:0]] * (self.num_epochs - 1)
        size = self.batch_size
        return [[order[i : i + size] for i in range(0, len(order), size)] for order in orders]

    def taking_part(self, sizes: IntArray) -> IntArray:
        """Number of images that users with ``sizes`` images train on."""
        sizes = np.asarray(sizes)
        if self.virtual_size is not None:
            return fedvc.taking_part(sizes, self.virtual_size)
        return sizes if self.max_images is None else np.minimum(sizes, self.max_images)

    def num_steps(self, sizes: IntArray) -> IntArray:
        """Number of local steps of users with ``sizes`` images."""
        return self.steps_of_epochs(sizes, np.asarray(self.num_epochs))

    def steps_of_epochs(self, sizes: IntArray, epochs: IntArray) -> IntArray:
        """Number of local steps of users with ``sizes`` images, each in its own number of ``epochs``."""
        n = self.taking_part(sizes)
        if self.straddle:
            return -(-n * epochs // self.batch_size)
        return epochs * -(-n // self.batch_size)

    def images_of_steps(self, sizes: IntArray, steps: IntArray) -> IntArray:
        """Number of images in the first ``steps`` local steps, at most all, of users of these ``sizes``."""
        n = self.taking_part(sizes)
        if self.straddle:
            return np.minimum(steps * self.batch_size, n * self.num_epochs)
        epochs, rest = np.divmod(steps, np.maximum(-(-n // self.batch_size), 1))
        return np.asarray(epochs * n + rest * np.minimum(self.batch_size, n))

    def image_passes(self, sizes: IntArray) -> IntArray:
        """Number of images over all epochs for users with ``sizes`` images."""
        return self.taking_part(sizes) * self.num_epochs


@dataclass(frozen=True, config=STRICT)
class LocalSampling(BatchConfig, AugmentConfig):
    """Batches of augmented images for a network."""

    input_size: PositiveInt = 224
    """Side of the square that the network sees, in pixels."""
    keys: bool = False
    """Whether images have keys, from which `pfl_ext.models.dropout` and detectors draw."""

    @classmethod
    def of(
        cls, batches: BatchConfig, augment: AugmentConfig, input_size: int, keys: bool = False
    ) -> LocalSampling:
        """The sampling from two parts of a config and the side of the network's input."""
        parts = ((BatchConfig, batches), (AugmentConfig, augment))
        values = {item.name: getattr(part, item.name) for kind, part in parts for item in fields(kind)}
        return cls(**values, input_size=input_size, keys=keys)
