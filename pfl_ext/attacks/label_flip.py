"""Attackers who train on wrong labels: class k becomes class K - 1 - k of K.

Letters: N images, n of them are read, K classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dataset.arrays import BoolArray, IntArray
from pfl_ext.attacks.attack import Attack, register
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.data.user_images import Annotations


class FlippedLabels:
    """A store in which the images marked in ``owned`` ``[N]`` have their labels in reverse order."""

    def __init__(self, store: ImageStore, owned: BoolArray) -> None:
        self._store, self._owned = store, owned

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def _flipped(self, rows: IntArray, targets: Annotations) -> Annotations:
        return np.where(self._owned[rows][:, None], targets[:, ::-1], targets)

    def read(self, rows: IntArray) -> tuple[Any, Annotations]:
        """Images and labels of these rows."""
        images, targets = self._store.read(rows)
        return images, self._flipped(rows, targets)

    def targets(self, rows: IntArray) -> Annotations:
        """The labels of `read`."""
        return self._flipped(rows, self._store.targets(rows))


@register("label_flip")
class LabelFlip(Attack):
    """Training on wrong labels; the update itself is not changed."""

    def images(self, store: ImageStore, owned: BoolArray) -> ImageStore:
        """The store with the attackers' labels ``[n, K]`` flipped.

        Raises:
            ValueError: for masks or boxes, and for a single label, whose reverse is itself.
        """
        shape = store.targets(np.zeros(1, np.int64)).shape
        if len(shape) != 2 or shape[1] < 2:
            raise ValueError(
                "attack.kind is label_flip, which needs images with two labels or more, but this task has "
                "masks, boxes, or a single label: choose another attack"
            )
        flipped: Any = FlippedLabels(store, owned)
        return flipped  # type: ignore[no-any-return]
