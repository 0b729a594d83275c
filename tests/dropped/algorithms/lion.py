"""Lion on the server: steps by the sign of a momentum, with a weight decay of its own
(Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, Algorithm 2).
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch.optim.optimizer import ParamsT

from pfl_ext.algorithms.optimizers import OptimizerConfig, server_optimizer
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class LionOptions:
    """The key that only Lion has."""

    weight_decay: NonNegativeFloat = 0.0
    """Multiple of the parameters that a step takes off them, times the learning rate."""


@server_optimizer("lion", "beta1", "beta2", options=LionOptions)
class Lion(torch.optim.Optimizer):
    """``x <- x - lr (sign(beta1 m + (1 - beta1) g) + decay x)``, then ``m <- beta2 m + (1 - beta2) g``."""

    def __init__(self, params: ParamsT, config: OptimizerConfig, options: LionOptions) -> None:
        super().__init__(params, {"lr": config.learning_rate})
        self.config, self.decay = config, options.weight_decay

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step on every parameter that has a gradient."""
        for group in self.param_groups:
            for x in (p for p in group["params"] if p.grad is not None):
                m = self.state[x].setdefault("exp_avg", torch.zeros_like(x))
                direction = torch.lerp(x.grad, m, self.config.beta1).sign_()
                x.sub_(direction.add_(x, alpha=self.decay), alpha=group["lr"])
                m.lerp_(x.grad, 1 - self.config.beta2)
