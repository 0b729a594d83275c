"""Norms that a clipping bound can rely on.

Letters: U users, V variables.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROW = 1024  # squares are summed in float32 within rows of so many numbers, in float64 across rows


def squared_norm(x: Tensor) -> Tensor:
    """Of all numbers of ``x``, float64, without a sync; rounding is at most 2^-15 of it."""
    flat = x.detach().reshape(-1).float()
    whole = len(flat) - len(flat) % ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    total: Tensor = rows.square().sum() + rest.square()
    return total


def squared_norms_of(variables: list[Tensor]) -> Tensor:
    """Of each of V variables: ``[V]`` float64. A GPU sums in a tree, which loses less than rows do."""
    if variables[0].device.type == "cpu":
        return torch.stack([squared_norm(v) for v in variables])
    return torch.stack(list(torch._foreach_norm(variables))).double().square()


def squared_norms(xs: Tensor) -> Tensor:
    """Of each ``xs[u]``: ``[U, ...]`` -> ``[U]`` float64. For small variables."""
    return xs.detach().flatten(1).double().square().sum(1)
