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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext, register
from pfl_ext.algorithms.clients import Clients
from pfl_ext.algorithms.personal_steps import steepest
from pfl_ext.algorithms.personalised import ONLY_OF_COHORTS
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class FedSamOptions:
    """The key of FedSAM."""

    rho: NonNegativeFloat = 0.05
    """L2 norm of the perturbation of the weights; Foret et al.'s default."""


@register("fedsam")
class FedSam(ServerModelAlgorithm):
    """FedAvg with sharpness-aware steps; the state is the run's model with the server's optimiser."""

    options: ClassVar[type] = FedSamOptions
    idle_in_runtime: ClassVar[str] = ONLY_OF_COHORTS

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.clients = Clients(context, gradient=self.gradient)

    def gradient(self, loss: Callable[[], Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradient at the perturbed weights."""
        first = steepest(loss, weights)
        found = [gradient for gradient in first if gradient is not None]
        norm = torch.stack(torch._foreach_norm(found)).norm()
        scale = torch.where(norm > 0, self.context.options.rho / norm, 0.0)
        before = [w.detach().clone() for w in weights]
        with torch.no_grad():
            for w, gradient in zip(weights, first):
                if gradient is not None:
                    w.add_(gradient * scale)
        sharp = steepest(loss, weights)
        with torch.no_grad():
            torch._foreach_copy_(list(weights), before)
        return sharp

    def arithmetic(self, precision: torch.dtype | None) -> str:
        """See `Algorithm.arithmetic`."""
        return self.clients.arithmetic or super().arithmetic(precision)

    def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
        """Train the cohort, and make a step of the server's optimiser on the mean update."""
        x = self.clients.weights()
        update, line = self.clients.mean_update(x, self.clients.cohort(number), number)
        return state, {**line, "learning_rate": self.clients.server_step(x, update, number)}
