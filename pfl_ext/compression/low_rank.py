"""Matrices of low rank (Vogels et al. 2019, "PowerSGD", arXiv 1905.13727, Algorithm 1).

A tensor of two dimensions or more is a matrix M ``[n, m]``, n its first dimension. A user finds an
orthonormal P ``[n, r]`` by subspace iteration from a random start and sends P and ``Q = M' P``; the server
reads ``P Q'``, the projection of M on r directions.

**A simulation of bytes.** PowerSGD sums P over users before it computes Q, in two exchanges a round, so that
all users project on the same directions. Here each user factorises its own update in one exchange, and the
server adds the products. Biased, so with error feedback.

Letters: d numbers of an update, r the rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import PositiveInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.compression.compressor import FLOAT, Compressor, FeedbackOptions, register
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class LowRankOptions(FeedbackOptions):
    """Rank and accuracy of the factors."""

    rank: PositiveInt = 2
    """r, the columns of the two factors; a matrix that is no larger than its factors is sent as it is."""
    iterations: PositiveInt = 2
    """Steps of subspace iteration from a random start."""


@register("low_rank")
class LowRank(Compressor):
    """Sends two factors for each matrix if they are smaller, and all other numbers as they are."""

    options: ClassVar[type] = LowRankOptions

    def _dims(self, shape: torch.Size) -> tuple[int, int] | None:
        """n and m; None for a tensor that is sent as it is."""
        n = shape[0] if len(shape) > 1 else 0
        m = shape.numel() // n if n else 0
        return (n, m) if self.chosen.rank * (n + m) < n * m else None

    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """The update with each matrix replaced by its projection."""
        every = [(tensor, self._dims(tensor.shape)) for tensor in update]
        return [tensor if dims is None else self._projected(tensor, dims, rng) for tensor, dims in every]

    def _projected(self, tensor: Tensor, dims: tuple[int, int], rng: np.random.Generator) -> Tensor:
        matrix = tensor.reshape(dims)
        start = rng.standard_normal((dims[1], self.chosen.rank), dtype=np.float32)
        q = torch.from_numpy(start).to(tensor.device, tensor.dtype)
        for _ in range(self.chosen.iterations):
            p = torch.linalg.qr(matrix @ q).Q
            q = matrix.T @ p
        projected: Tensor = p @ q.T
        return projected.view(tensor.shape)

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """``4 r (n + m)`` for a matrix, 4 for every other number."""
        numbers = (
            shape.numel() if (dims := self._dims(shape)) is None else self.chosen.rank * sum(dims)
            for shape in shapes
        )
        return FLOAT * sum(numbers)
