"""Whole numbers that stay exact in pfl's sum over workers, which is in float32.

float32 holds every whole number below 2**24. So each number is sent as `DIGITS` digits below 2**12, which
makes the sums of up to 4,096 workers exact.
"""

from __future__ import annotations

import numpy as np

from dataset.arrays import Float32Array, FloatArray, IntArray

UNITS = 1 << 30
"""Numbers in 0..1 of single images are added up in whole numbers of 1 / UNITS, so that a sum has no order."""
DIGIT, DIGITS = 12, 5
"""Bits of a digit, and number of digits."""


def in_units(values: FloatArray | Float32Array) -> IntArray:
    """Each value as the nearest whole number of 1 / `UNITS`."""
    return np.rint(np.asarray(values, np.float64) * UNITS).astype(np.int64)


def sent(numbers: IntArray) -> Float32Array:
    """``[DIGITS n]``: the digits of the numbers ``[n]``."""
    assert numbers.max(initial=0) < 1 << DIGIT * DIGITS
    digits = [numbers >> DIGIT * place & (1 << DIGIT) - 1 for place in range(DIGITS)]
    return np.concatenate(digits).astype(np.float32)


def received(vector: Float32Array) -> IntArray:
    """The sum of the numbers, from a sum of up to 4,096 vectors of `sent`."""
    assert vector.max(initial=0) < 1 << 24, "more than 4,096 workers: sums are no longer exact"
    digits = vector.astype(np.int64).reshape(DIGITS, -1)
    return np.asarray(sum(digit << DIGIT * place for place, digit in enumerate(digits)))
