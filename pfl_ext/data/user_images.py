"""One user's images in one round, batch by batch, as a pfl ``Dataset``.

Shape letters: N images, B batch, H and W image height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pfl.data.dataset import Dataset

from dataset.arrays import ByteArray, IntArray
from pfl_ext.data.augmented_views import AugmentedViews, augmented
from pfl_ext.data.mixing import mix
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.transforms import draw_keys

Annotations = npt.NDArray[Any]
"""Annotations of some images, in the form that their task reads: `pfl_ext.tasks.task.Task.collate`."""
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Collate = Callable[[Annotations], torch.Tensor]
"""The targets of a batch from its annotations: `pfl_ext.tasks.task.Task.collate`."""


class UserImages(Dataset):
    """One user in one round: a pfl ``Dataset`` that yields (images, targets, crops) batches.

    pfl's training loop calls ``iter`` once an epoch; each call yields the batches of the next epoch.
    After ``max_steps`` batches there are no more, in any epoch, since a device had no time for them.
    ``crops`` ``[B, 6]`` says how each image is cropped and flipped, which is done on the device. Where the
    store has `AugmentedViews`, one view of each image is drawn instead. With ``sampling.keys`` it is
    ``[B, 9]``, and the last columns say which units are dropped for an image, and how strong its noise is,
    relative to others: ``level``. Where images are mixed, targets are mixed already, and crops are those of
    `pfl_ext.data.mixing.mix`, ``[B, 15]``.
    """

    def __init__(
        self,
        images: ByteArray | AugmentedViews,
        targets: Annotations,
        user_id: str | None,
        sampling: LocalSampling,
        rng: np.random.Generator,
        collate: Collate = torch.from_numpy,
        max_steps: int | None = None,
        level: float = 1.0,
    ) -> None:
        assert len(images) == len(targets)
        super().__init__(raw_data=(images, targets), user_id=user_id)
        epochs = sampling.epochs(len(images), rng)
        if max_steps is not None:
            before = np.cumsum([0, *map(len, epochs)])
            epochs = [batches[: max(max_steps - done, 0)] for batches, done in zip(epochs, before.tolist())]
        self._epochs = iter(epochs)
        self._sampling, self._rng, self._collate, self._level = sampling, rng, collate, level
        source: np.random.Philox = rng.bit_generator  # type: ignore[assignment]
        self._aside, self._keys = source.jumped(1), np.random.Generator(source.jumped(2))

    def __len__(self) -> int:
        return len(self.raw_data[0])

    @property
    def targets(self) -> torch.Tensor:
        """The targets of all its images, in the order of the store; of labels ``[N, K]``."""
        return self._collate(self.raw_data[1])

    def iter(self, batch_size: int | None) -> Iterator[Batch]:
        """The batches of the next epoch; ``batch_size`` must be the one of the sampling."""
        return (batch for _, batch in self.iter_with_places(batch_size))

    def iter_with_places(self, batch_size: int | None) -> Iterator[tuple[IntArray, Batch]]:
        """The batches of `iter`, each with the positions ``[B]`` of its images in this data set."""
        assert batch_size == self._sampling.batch_size
        for positions in next(self._epochs):
            yield positions, self._batch(positions, self._rng, self._keys)

    def once(self) -> Iterator[Batch]:
        """Every image once, in batches of the same size, with their own crops: the same ones in each call.
        `iter` and `part` are not affected.
        """
        rng, keys = np.random.Generator(self._aside.jumped(0)), np.random.Generator(self._aside.jumped(2))
        size = self._sampling.batch_size
        for first in range(0, len(self), size):
            yield self._batch(np.arange(first, min(first + size, len(self))), rng, keys)

    def part(self, positions: IntArray, number: int, num_epochs: int | None = None) -> UserImages:
        """Some of the images as a data set of their own.

        Args:
            positions: the positions of the images, each below ``len(self)``.
            number: at least 0. Parts with different numbers draw their batches independently.
            num_epochs: epochs of the part; None: as many as the whole has.
        """
        images, targets = self.raw_data
        rng = np.random.Generator(self._aside.jumped(4 * number + 3))
        sampling = self._sampling if num_epochs is None else replace(self._sampling, num_epochs=num_epochs)
        part = images[positions], targets[positions]
        return UserImages(*part, self.user_id, sampling, rng, self._collate, level=self._level)

    def _batch(self, positions: IntArray, rng: np.random.Generator, keys: np.random.Generator) -> Batch:
        images, annotations = self.raw_data
        sampling = self._sampling
        chosen, crops = augmented(images[positions], rng, sampling.input_size, sampling)
        targets = self._collate(annotations[positions])
        if sampling.keys or sampling.mixes:
            crops = draw_keys(keys, crops, self._level)
        if sampling.mixes:
            assert chosen.ndim == 4, "features are not mixed"
            targets, crops = mix(targets, crops, keys, sampling.input_size, sampling)
        return torch.from_numpy(chosen), targets, torch.from_numpy(crops)
