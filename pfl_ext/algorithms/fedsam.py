"""FedSAM: users' steps look for a flat minimum (Qu et al. 2022, "Generalized Federated Learning via
Sharpness Aware Minimization", arXiv 2206.02618, Algorithm 1; the step is that of Foret et al. 2021,
"Sharpness-Aware Minimization for Efficiently Improving Generalization", arXiv 2010.01412, equation 2).

With F the mean loss of a batch, a user's step from w is SGD along

    grad F(w + rho grad F(w) / |grad F(w)|),

with the L2 norm over all variables that are trained, on the same images, crops and dropped units in both
gradients. Clipping, momentum and weight decay apply to that gradient. All else is FedAvg; with ``rho 0`` this
is FedAvg. Where grad F(w) is 0, so is the perturbation.

A step costs two gradients. The training loss of a round is F(w). The engine does not know these steps, so
pfl's loop over users makes them, in compiled layers on a CPU.

With privacy: the perturbation acts on one user's local training, before its update is clipped. With central
privacy this is DP-FedSAM (Shi et al. 2023, "Make Landscape Flatter in Differentially Private Federated
Learning", arXiv 2303.11242).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.own_steps import OwnSteps
from pfl_ext.algorithms.personal_steps import steepest
from pfl_ext.configs import STRICT
from pfl_ext.rules import Refusals


@dataclass(frozen=True, config=STRICT)
class FedSamOptions:
    """The key of FedSAM."""

    rho: NonNegativeFloat = 0.05
    """L2 norm of the perturbation of the weights; Foret et al.'s default."""


@register("fedsam")
class FedSam(OwnSteps):
    """FedAvg with sharpness-aware steps."""

    options: ClassVar[type] = FedSamOptions
    refusals: ClassVar[Refusals] = {}
    takes: ClassVar[tuple[str, ...]] = ("compression", "aggregation", "attack", "devices")

    def gradient(self, loss: Callable[[], Tensor], variables: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradient at the perturbed weights."""
        first = steepest(loss, variables)
        found = [gradient for gradient in first if gradient is not None]
        norm = torch.stack(torch._foreach_norm(found)).norm()
        scale = torch.where(norm > 0, self.setup.options.rho / norm, 0.0)
        before = [w.detach().clone() for w in variables]
        with torch.no_grad():
            for w, gradient in zip(variables, first):
                if gradient is not None:
                    w.add_(gradient * scale)
        sharp = steepest(loss, variables)
        with torch.no_grad():
            torch._foreach_copy_(list(variables), before)
        return sharp
