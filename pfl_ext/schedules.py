"""Learning rates over the rounds of a run, or over the epochs of centralised training.

A rate is a pure function of the round, so a resumed run needs no scheduler. A decay continues from round to
round and does not begin again with each user.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass

from pfl_ext.configs import STRICT

Schedule = Literal["constant", "warmup_linear", "poly", "cosine", "exponential", "cyclic"]
Decay = Literal["constant", "poly", "cosine", "exponential", "cyclic"]
MOST = float(torch.finfo(torch.float32).max)
LEAST = float(torch.finfo(torch.float32).tiny)
"""The least normal float32. With a smaller rate, steps would be lost and quotients by it be infinite."""
READ_BY: Mapping[str, Sequence[Schedule]] = {
    "warmup_rounds": ("warmup_linear",),
    "final_learning_rate": ("warmup_linear", "poly", "cosine", "cyclic"),
    "schedule_power": ("poly",),
    "schedule_factor": ("exponential",),
    "schedule_cycle": ("cyclic",),
    "schedule_from": ("cyclic",),
}
"""The schedules that read each of the keys below."""


@dataclass(frozen=True, config=STRICT)
class ScheduleConfig:
    """How a learning rate changes from its first to its last value."""

    schedule: Schedule = "constant"
    """The learning rate over the rounds; warmup_linear: from 0 straight up, then straight down."""
    final_learning_rate: NonNegativeFloat = 0.0
    """Final rate of warmup_linear, poly and cosine, in the round after the last; of cyclic, of each cycle."""
    schedule_power: PositiveFloat = 1.0
    """Exponent of poly, applied to the share of rounds that is left; 1: linear."""
    schedule_factor: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor of exponential from each round to the next; exponential needs it."""
    schedule_cycle: Annotated[int, Field(ge=2)] | None = None
    """Rounds or epochs of a cycle of cyclic, in which the rate falls to the final one; cyclic needs it."""
    schedule_from: NonNegativeInt = 0
    """First round or epoch of the first cycle of cyclic; before, the rate is constant."""

    def scheduled(self, rate: float, step: int, num_steps: int) -> float:
        """The learning rate in round 0, 1, ... of ``num_steps``, from ``rate`` in round 0.

        With ``t = step / num_steps``, at most 1, and the final rate f:

        * poly: ``f + (rate - f) (1 - t)^power`` (with f = 0: DeepLab, Chen et al. 2018, arXiv 1606.00915,
          section 4.1); warmup_linear, here after its warm-up, is that with the power 1;
        * cosine: ``f + (rate - f) (1 + cos(pi t)) / 2`` (Loshchilov and Hutter 2017, arXiv 1608.03983,
          equation 5, without restarts);
        * exponential: ``rate factor^step``;
        * cyclic: ``f + (rate - f) (1 - i / c)`` in round i = 1, ..., c of each cycle of c rounds (Izmailov et
          al. 2018, arXiv 1803.05407, section 3.2, for averages of weights).
        """
        assert step >= 0
        if self.schedule == "constant":
            return rate
        if self.schedule == "exponential":
            assert self.schedule_factor is not None, "see check_schedule"
            return rate * self.schedule_factor**step
        left = max(0.0, 1 - step / num_steps)
        if self.schedule == "cyclic":
            assert self.schedule_cycle is not None, "see check_schedule"
            if step < self.schedule_from:
                return rate
            share = 1 - ((step - self.schedule_from) % self.schedule_cycle + 1) / self.schedule_cycle
        elif self.schedule == "cosine":
            share = (1 + math.cos(math.pi * (1 - left))) / 2
        else:
            share = left ** (self.schedule_power if self.schedule == "poly" else 1.0)
        return self.final_learning_rate + (rate - self.final_learning_rate) * share

    def check_schedule(self, section: str, rate: float, num_steps: int, head: float = 1.0) -> None:
        """Refuse a schedule whose values are no learning rates.

        Args:
            section: the config section.
            rate: the first learning rate.
            num_steps: number of rounds or epochs.
            head: the head's learning rate relative to the others'.

        Raises:
            ValueError: one line with the reason.
        """
        if self.schedule == "exponential" and self.schedule_factor is None:
            raise ValueError(
                f"{section}.schedule is exponential, and {section}.schedule_factor is none: give the factor "
                "of each round, at most 1"
            )
        if self.schedule == "cyclic" and self.schedule_cycle is None:
            raise ValueError(
                f"{section}.schedule is cyclic, and {section}.schedule_cycle is none: give the rounds of a "
                "cycle, at least 2"
            )
        if self.schedule_from >= num_steps:
            raise ValueError(
                f"{section}.schedule_from is {self.schedule_from}, but must be below {num_steps:,}, or no "
                "cycle would begin: lower it"
            )
        is_cyclic = self.schedule == "cyclic"
        last = self.final_learning_rate if is_cyclic else self.scheduled(rate, num_steps - 1, num_steps)
        if max(rate, last) > MOST:
            raise ValueError(
                f"a learning rate of {section} is {max(rate, last):g}, more than float32 holds: lower "
                f"{section}.{'learning_rate' if rate > MOST else 'final_learning_rate'}"
            )
        if max(rate, last) * head > MOST or last * head < LEAST <= last:
            raise ValueError(
                f"{section}.head_rate_factor is {head:g}, by which a learning rate of the head is beyond "
                "float32: choose one nearer to 1"
            )
        if self.schedule != "constant" and last < LEAST:
            length = "a cycle's" if is_cyclic else f"{num_steps:,}"
            slower = (
                f"raise {section}.final_learning_rate"
                if is_cyclic
                else "choose a schedule that falls more slowly"
            )
            raise ValueError(
                f"{section}.schedule is {self.schedule}, by which the last of {length} "
                f"learning rates is {last:g}, too small for a step: {slower}"
            )


@dataclass(frozen=True, config=STRICT)
class DecayConfig(ScheduleConfig):
    """A schedule without a warm-up."""

    schedule: Decay = "constant"
    """The learning rate over rounds or epochs: constant or falling; it does not restart with each user."""


@dataclass(frozen=True, config=STRICT)
class LayerDecayConfig:
    """Learning rates that fall from the head to the first layers (`pfl_ext.models.depths`)."""

    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Learning rate of a block divided by that of the next one, up to the head; 1: the same for all."""
