"""Sparse updates: the k numbers of greatest magnitude, or k at random.

Top-k (Stich et al. 2018, "Sparsified SGD with Memory", arXiv 1809.07599, definition 2.1) is biased and needs
error feedback. Random-k is scaled by ``d / k``, so that its mean over draws is the update, with a variance of
``(d / k - 1) |x|^2``. Its positions follow from a seed that server and user share, and are not sent.

Letters: d numbers of an update, k of them that are sent.
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

Share = Annotated[float, Field(gt=0, le=1)]
"""A number above 0 and at most 1."""
SEED = 8
"""Bytes of a seed."""


@dataclass(frozen=True, config=STRICT)
class RandomKOptions:
    """How much is sent."""

    share: Share = 0.01
    """Share of all numbers of an update that is sent; 1: all."""


@dataclass(frozen=True, config=STRICT)
class TopKOptions(RandomKOptions, FeedbackOptions):
    """How much is sent."""


def kept(share: float, d: int) -> int:
    """k: the nearest number to ``share * d``, at least 1."""
    return max(1, round(share * d))


def _like(flat: Tensor, update: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [t.numel() for t in update])
    return [part.view(t.shape) for part, t in zip(parts, update)]


@register("top_k")
class TopK(Compressor):
    """The k numbers of greatest magnitude of the whole update."""

    options: ClassVar[type] = TopKOptions

    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """The k numbers that are sent, and 0 for all others."""
        flat = torch.cat([t.reshape(-1) for t in update])
        places = torch.topk(flat.abs(), kept(self.chosen.share, len(flat)), sorted=False).indices
        return _like(torch.zeros_like(flat).index_copy_(0, places, flat[places]), update)

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """k numbers and their positions. A position has four bytes, or all together are a map of d bits,
        which is shorter for ``k > d / 32``. If all numbers are sent, no positions are."""
        d = count(shapes)
        k = kept(self.chosen.share, d)
        return FLOAT * k + (0 if k == d else min(FLOAT * k, -(-d // 8)))


@register("random_k")
class RandomK(Compressor):
    """k numbers at random, times ``d / k``."""

    options: ClassVar[type] = RandomKOptions

    def decoded(self, update: Sequence[Tensor], rng: np.random.Generator) -> list[Tensor]:
        """The k numbers that are sent, times ``d / k``, and 0 for all others."""
        flat = torch.cat([t.reshape(-1) for t in update])
        k = kept(self.chosen.share, len(flat))
        places = torch.from_numpy(rng.choice(len(flat), k, replace=False, shuffle=False)).to(flat.device)
        return _like(torch.zeros_like(flat).index_copy_(0, places, flat[places] * (len(flat) / k)), update)

    def num_bytes(self, shapes: Sequence[torch.Size]) -> int:
        """k numbers, and the seed of their positions."""
        return FLOAT * kept(self.chosen.share, count(shapes)) + SEED
