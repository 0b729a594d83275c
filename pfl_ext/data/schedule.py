"""Divides the users of a round's cohort among workers, so that all workers end at about the same time.

Shape letters: U users of a cohort, W workers.
"""

from __future__ import annotations

import heapq

import numpy as np

from dataset.arrays import FloatArray, IntArray

PER_USER, PER_STEP, PER_IMAGE = 0.04, 0.06, 0.011
"""Seconds of local training, fitted to stock pfl's times (RESULTS.md of FLAIR, workers). Only their ratios
matter to an assignment."""


def predicted_costs(steps: IntArray, images: IntArray) -> FloatArray:
    """Predicted seconds ``[U]`` of users, from their steps and image passes (images times epochs)."""
    return PER_USER + PER_STEP * np.asarray(steps) + PER_IMAGE * np.asarray(images, np.float64)


def longest_first(costs: FloatArray, world_size: int) -> list[list[int]]:
    """Positions 0..U-1 for each of W workers. Each user, dearest first, goes to the worker with least to do.

    The slowest worker then takes at most 4/3 - 1/(3W) of the best assignment's time (Graham 1969, Theorem 2).
    With many small users it takes hardly more than the larger of the mean load and the dearest user. This is
    a pure function: every worker computes the same.
    """
    shares: list[list[int]] = [[] for _ in range(world_size)]
    loads = [(0.0, worker) for worker in range(world_size)]
    for position in np.argsort(-np.asarray(costs), kind="stable").tolist():
        load, worker = heapq.heappop(loads)
        shares[worker].append(position)
        heapq.heappush(loads, (load + float(costs[position]), worker))
    return shares
