"""FedRep: users fit their own head to the shared body, then the body to their head
(Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated Learning", arXiv
2102.07078, Algorithm 1).

This is FedPer with two phases of local training, each with a new optimiser:

    h_i <- SGD on F_i(x, h_i) with x fixed, `federated.options.personal_epochs` epochs;
    x_i <- SGD on F_i(x_i, h_i) from x with h_i fixed, `local.num_epochs` epochs (the paper's: 1);

and ``x_i - x`` is sent. Gradients of the fixed variables are not computed. The first phase has batches of its
own, the second has FedAvg's, so without personal variables the algorithm is FedAvg. A round's training loss
is that of the second phase. The authors train every user's head for 10 more epochs before it is scored
(`federated.options.tune_epochs`).

The engine does not know these phases, so pfl's loop over users trains them, in compiled layers on a CPU.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from pfl_ext.algorithms.algorithm import RunContext, Setup, register
from pfl_ext.algorithms.clients import Clients
from pfl_ext.algorithms.fedper import FedPer, FedPerOptions
from pfl_ext.algorithms.personal_steps import InPhases, Phase
from pfl_ext.algorithms.personalised import ONLY_OF_COHORTS
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class FedRepOptions(FedPerOptions):
    """FedPer's options, and those of the first phase."""

    personal_epochs: PositiveInt = 10
    """Epochs on the personal variables in each round, before local.num_epochs epochs on the others."""
    personal_learning_rate: PositiveFloat | None = None
    """Learning rate of these epochs, in every round; none: that of local training."""


@register("fedrep")
class FedRep(FedPer):
    """FedPer with two phases of local training."""

    options: ClassVar[type] = FedRepOptions
    takes: ClassVar[tuple[str, ...]] = ("compression",)
    idle_in_runtime: ClassVar[str] = ONLY_OF_COHORTS

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what `FedPer` refuses, and options of the first phase without personal variables."""
        super().check(setup)
        options = setup.options
        for key in ("personal_epochs", "personal_learning_rate"):
            if options.personal is None and getattr(options, key) != getattr(FedRepOptions, key):
                raise ValueError(
                    f"federated.options.{key} has no effect if federated.options.personal is none: choose "
                    f"personal variables, or leave {key} out"
                )

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        options = self.context.options
        epochs, rate = options.personal_epochs, options.personal_learning_rate
        first = Phase(list(self.layout.shapes), epochs, rate, noted=not self.shared)
        self.clients = Clients(self.context, InPhases(self.twin, [first, Phase(self.shared)]))
