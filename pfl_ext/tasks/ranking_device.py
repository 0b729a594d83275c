"""`pfl_ext.tasks.ranking.rank` by torch, for a GPU: the same numbers, sorted where the network ran.

Shape letters: N images, K labels, T thresholds, P positives of all labels together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pfl_ext.tasks.ranking import DECISION, Array, BoolArray, Ranking, binned_thresholds

BLOCK_ELEMENTS = 1 << 25
"""Scores ranked at a time: about 2 GB of a device's memory."""


def rank_on(device: torch.device, scores: Array, targets: BoolArray, *, overall: bool) -> Ranking:
    """As `pfl_ext.tasks.ranking.rank`, on a device that has float64. ``scores``, ``targets`` ``[N, K]``."""
    n, k = scores.shape
    thresholds = torch.from_numpy(np.append(binned_thresholds(), DECISION)).to(device)
    width = max(1, BLOCK_ELEMENTS // max(n, 1))
    ap, tp, predicted, ordered, hits = [], [], [], [], []
    for start in range(0, k, width):
        columns = torch.from_numpy(np.ascontiguousarray(scores[:, start : start + width].T)).to(device)
        masks = torch.from_numpy(np.ascontiguousarray(targets[:, start : start + width].T)).to(device)
        ascending = columns.sort(dim=1).values
        # negatives before all positives, so that positions from the end count positives
        positives = columns.masked_fill(~masks, -torch.inf).sort(dim=1).values
        ap.append(_mean_precisions(ascending, positives, masks.sum(1)))
        places = thresholds.expand(len(columns), -1).contiguous()
        predicted.append(n - torch.searchsorted(ascending.double(), places, right=True))
        tp.append(n - torch.searchsorted(positives.double(), places, right=True))
        if overall:
            ordered.append(ascending.flatten())
            hits.append(columns[masks])
    whole = 0.0
    if overall and hits:
        every, found = torch.cat(ordered).sort().values, torch.cat(hits).sort().values
        if len(found):
            whole = float(_mean_precisions(every[None], found[None], torch.tensor([len(found)]).to(device)))
    return Ranking(
        torch.cat(ap).cpu().numpy() if ap else np.zeros(0),
        whole,
        _table(tp, len(thresholds)),
        _table(predicted, len(thresholds)),
        np.count_nonzero(targets, axis=0).astype(np.int64),
    )


def _table(parts: list[Tensor], num_thresholds: int) -> Array:
    """``[T + 1, K]`` of blocks ``[K, T + 1]``."""
    return torch.cat(parts).T.cpu().numpy() if parts else np.zeros((num_thresholds, 0), np.int64)


def _mean_precisions(ascending: Tensor, positives: Tensor, counts: Tensor) -> Tensor:
    """AP of each row: the mean over its positives of TP(>= t) / N(>= t), ``[K]`` float64; 0 without any.

    ``positives``: sorted, with -inf before them where rows have fewer.
    """
    number = ascending.shape[1] - torch.searchsorted(ascending, positives)
    right = positives.shape[1] - torch.searchsorted(positives, positives)
    precision = (right.double() / number.clamp(min=1)).masked_fill(positives == -torch.inf, 0.0)
    return precision.sum(1) / counts.clamp(min=1)
