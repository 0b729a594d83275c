"""FedPer: the last layers stay with the user, the others are averaged
(Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", arXiv 1912.00818, Algorithm 1).

A user loads (x, h_i), the server's shared variables and its own personal ones. It trains all of them together
by local SGD, keeps the new h_i, and sends the update of x. `federated.options.personal` says which variables
are personal. Until a user has trained, its h is that of the run's first weights. Without personal variables
this is FedAvg, and with all variables personal each user trains alone.

Users train by the engine, one after another, since each starts from weights of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import NonNegativeInt
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext, Setup, register
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.personal_parts import personal_names, trained_names
from pfl_ext.algorithms.personal_steps import InPhases, Phase
from pfl_ext.algorithms.personalised import KeptOptions, Personalised
from pfl_ext.configs import STRICT


@dataclass(frozen=True, config=STRICT)
class TunedOptions(KeptOptions):
    """Options for tuning a user before it is scored."""

    tune_epochs: NonNegativeInt = 0
    """Epochs of fine-tuning personal variables (or all, if none) before scoring a user; undone afterwards."""


@dataclass(frozen=True, config=STRICT)
class FedPerOptions(TunedOptions):
    """FedPer's options: which variables stay with the user."""

    personal: str | None = "head"
    """Variables that stay with users: head, norms, all, none, or prefixes of names, separated by commas."""


@register("fedper")
class FedPer(Personalised):
    """FedPer. A subclass may have other personal variables, or another order of local training."""

    options: ClassVar[type] = FedPerOptions
    takes: ClassVar[tuple[str, ...]] = ("compression",)

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        tuned = set(self.layout.shapes) or set(trained_names(context.model.pytorch_model))
        phase = Phase(tuned, self.context.options.tune_epochs)
        self._tuning = Clients(replace(self.context, engine=None), InPhases(self.twin, [phase]))

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what `Personalised` refuses, and users who share nothing unless ``personal`` is all."""
        super().check(setup)
        alone = getattr(setup.options, "personal", None) == "all"
        if not alone and not cls.shared_names(setup.module, setup.options):
            raise ValueError(
                f"{cls.__name__} would share nothing, because all trained variables are personal: set "
                "model.trained to all, or change federated.options.personal"
            )

    @classmethod
    def keeps_parts(cls, options: Any) -> bool:
        """With any personal variables."""
        return getattr(options, "personal", "norms") is not None

    @classmethod
    def kept_names(cls, module: Any, options: Any) -> Sequence[str]:
        """Names of the variables that `personal` selects."""
        return personal_names(module, options.personal)

    @classmethod
    def shared_names(cls, module: Any, options: Any) -> Sequence[str]:
        """Names of the trained variables that are not personal."""
        kept = set(cls.kept_names(module, options))
        return [name for name in trained_names(module) if name not in kept]

    def train_user(self, x: Weights, kept: Tensor, user: int, number: int) -> tuple[Weights, Tensor, Tensor]:
        """Train all variables together, starting from x with the user's h."""
        start = {**x, **self.layout.named(kept)}
        update, seen = self.clients.train_alone(start, user, number)
        return update, kept + self.layout.flat(update), seen

    @property
    def in_loop(self) -> bool:
        """Whether users are tuned, or there is no engine: pfl's loop does that."""
        return self.tunes or self.engine is None

    @property
    def tunes(self) -> bool:
        """Whether users are tuned before they are scored."""
        return bool(self.context.options.tune_epochs)

    def own_model(self, x: Weights, kept: Tensor, user: int, number: int) -> Weights:
        """x with the user's h, after `tune_epochs` epochs of tuning."""
        weights = super().own_model(x, kept, user, number)
        if self.tunes:
            last = max(number - 1, 0)  # whose learning rate is used, as there is none after the last round
            update, _ = self._tuning.train_alone(weights, user, last, draws=number)
            weights = {name: w + update[name] for name, w in weights.items()}
        return weights
