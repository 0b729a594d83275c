"""Attackers who change the sign, the length or all of their own update, without seeing others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.attacks.attack import Attack, register
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class SignFlipOptions:
    """The size of the flipped update."""

    scale: PositiveFloat = 1.0
    """The update is multiplied by minus this."""


@dataclass(frozen=True, config=STRICT)
class BoostOptions:
    """The size of the update."""

    scale: PositiveFloat | None = None
    """The update is multiplied by this; none: by the number of users in the round, to replace the mean."""


@dataclass(frozen=True, config=STRICT)
class GaussianOptions:
    """The size of the noise."""

    scale: PositiveFloat = 1.0
    """Standard deviation of the noise, relative to that of the numbers of the attacker's own update."""


@register("sign_flip")
class SignFlip(Attack):
    """Sends ``-scale x``."""

    options: ClassVar[type] = SignFlipOptions

    def update(self, update: Sequence[Tensor], rng: np.random.Generator, cohort_size: int) -> list[Tensor]:
        """The update times ``-scale``."""
        return [-self.chosen.scale * tensor for tensor in update]


@register("boost")
class Boost(Attack):
    """Sends ``scale x`` (Bagdasaryan et al. 2020, "How To Backdoor Federated Learning", arXiv 1807.00459)."""

    options: ClassVar[type] = BoostOptions

    def update(self, update: Sequence[Tensor], rng: np.random.Generator, cohort_size: int) -> list[Tensor]:
        """The update times ``scale``, or times the cohort's size where that is None."""
        scale = cohort_size if self.chosen.scale is None else self.chosen.scale
        return [scale * tensor for tensor in update]


@register("gaussian")
class Gaussian(Attack):
    """Sends noise whose size is relative to that of the update."""

    options: ClassVar[type] = GaussianOptions

    def update(self, update: Sequence[Tensor], rng: np.random.Generator, cohort_size: int) -> list[Tensor]:
        """Independent normal numbers with mean 0."""
        deviation = self.chosen.scale * float(torch.cat([t.double().reshape(-1) for t in update]).std())
        noise = [torch.from_numpy(rng.standard_normal(tuple(t.shape), dtype=np.float32)) for t in update]
        return [deviation * n.to(t.device, t.dtype) for n, t in zip(noise, update)]
