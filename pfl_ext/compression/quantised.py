"""Updates of few bits a number: evenly spaced levels with stochastic rounding, or signs.

Uniform levels (Suresh et al. 2017, "Distributed Mean Estimation with Limited Communication", arXiv
1611.00429, section 2.2): for each tensor the least and the greatest value are sent, and for every number one
of ``2^b`` levels between them. A number between two levels is rounded up with the probability that makes the
result unbiased.

Signs (Bernstein et al. 2018, "signSGD", arXiv 1802.04434; scaled as by Karimireddy et al. 2019, arXiv
1901.09847, section 4): for each tensor the mean magnitude is sent, and for every number its sign. This is
biased, so it has error feedback.

Letters: d numbers of an update in L tensors, b bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.compression.compressor import FLOAT, Compressor, FeedbackOptions, count, register
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class UniformOptions:
    """The number of levels."""

    bits: Annotated[int, Field(ge=1, le=32)] = 8
    """Bits of a number."""


@register("uniform")
class Uniform(Compressor):
    """Evenly spaced levels between the least and the greatest value of each tensor."""

    options: ClassVar[type] = UniformOptions

    @property
    def _top(self) -> float:
        bits: int = self.chosen.bits
        return 2.0**bits - 1

    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """Each number rounded at random to the level below or above, without bias; computed in float64."""
        return [self._rounded(tensor, rng) for tensor in update]

    def _rounded(self, tensor: Tensor, rng: np.random.Generator) -> Tensor:
        draws = torch.from_numpy(rng.random(tensor.numel())).view(tensor.shape).to(tensor.device)
        step = (float(tensor.max()) - float(tensor.min())) / self._top if tensor.numel() else 0.0
        if not step:
            return tensor
        wide, least = tensor.double(), tensor.min().double()
        levels = (wide.sub_(least).div_(step) + draws).floor_().clamp_(max=self._top)
        return levels.mul_(step).add_(least).to(tensor.dtype)

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """``d b / 8 + 8 L``, the levels packed without gaps."""
        bits: int = self.chosen.bits
        return -(-count(shapes) * bits // 8) + 2 * FLOAT * len(shapes)


@register("sign")
class Sign(Compressor):
    """The sign of each number, times the mean magnitude of its tensor; 0 counts as positive."""

    options: ClassVar[type] = FeedbackOptions

    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """Each tensor's mean magnitude, with the signs of its numbers."""
        means = [tensor.double().abs().mean().to(tensor.dtype) for tensor in update]
        return [torch.where(tensor >= 0, mean, -mean) for tensor, mean in zip(update, means)]

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """``d / 8 + 4 L``."""
        return -(-count(shapes) // 8) + FLOAT * len(shapes)
