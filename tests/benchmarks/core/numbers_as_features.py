"""Stores of numbers in place of images, for runs that train a head on features."""

from __future__ import annotations

from typing import Any

import numpy as np

from dataset.arrays import IntArray
from pfl_ext.data.augmented_views import AugmentedViews
from pfl_ext.randomness import stream
from tests.pfl_ext.stores import NumberedStore

WIDTH = 192
"""Numbers that enter the last layer of cifar_cnn."""


class ViewsOfNumbers(NumberedStore):
    """For training, rows of numbers that differ by row and view, of which a user brings one an image."""

    def read(self, rows: IntArray) -> tuple[Any, Any]:
        return AugmentedViews(rows, 3, features_of), self.targets(rows)


class WholeNumbers(NumberedStore):
    """For scoring, the same without views."""

    def read(self, rows: IntArray) -> tuple[Any, Any]:
        return features_of(rows, np.zeros_like(rows)), self.targets(rows)


def features_of(rows: IntArray, views: IntArray) -> Any:
    draws = [
        stream(3, "features", *pair).standard_normal(WIDTH) for pair in zip(rows.tolist(), views.tolist())
    ]
    return np.array(draws, np.float32).reshape(-1, WIDTH)
