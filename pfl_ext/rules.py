"""Rules: what users do in one round of an algorithm, for both pfl's loop and the engine. Also refusals: what
an algorithm cannot be combined with.

Letter: P parameters that are trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import torch
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.context import CentralContext
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor

Correction = Literal["gradient", "step"]
"""Where a user's correction is added: to the gradient of the loss, before clipping, weight decay and
momentum; or, times minus the learning rate, to the weights after each step of the optimiser."""

Circumstance = Literal["privacy", "postprocessors", "workers", "replacement", "proportional"]
"""What an algorithm may have to refuse: private training of either kind; pfl's postprocessors other than a
weighting; several workers; users who come twice in a cohort; users drawn in proportion to their images."""
Refusals = Mapping[Circumstance, str]
"""The error message, by what is refused."""
PRIVACY_NOT_ARGUED: Refusals = {
    "privacy": "nobody has argued how much one user can change what this algorithm releases: choose "
    "algorithm fedavg or fedprox for private training"
}


class UserRule(Protocol):
    """One user's part of a rule that differs between users."""

    @property
    def correction(self) -> Mapping[str, Tensor]:
        """The correction that is added in every local step, by variable."""
        ...

    def finish(
        self, update: Mapping[str, Tensor], num_steps: int, gradient: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """Process the user's local training. Returns what the user sends besides its update.

        Args:
            update: the weights after local training minus those before, by variable.
            num_steps: the number of steps that the user made.
            gradient: the gradient of the mean loss of the user's images before the first step, if the rule
                needs it and the user has images.
        """
        ...


class Rule:
    """Local SGD, and a weighted mean of the updates: FedAvg. An algorithm overrides what differs."""

    proximal_weight: float = 0.0
    """Weight of ``|w - w_central|^2 / 2`` in every user's loss."""
    correction: Correction | None = None
    """Where each user's correction is added; None: there are no corrections, and `user` is not called."""
    corrects_all: bool = True
    """Whether a correction may differ from 0 for weights that affect no image; the engine keeps those."""
    whole_gradient: bool = False
    """Whether `UserRule.finish` needs the gradient over all images of the user, in one more pass."""

    def __init__(self, proximal_weight: float = 0.0) -> None:
        self.proximal_weight = proximal_weight

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a ``loss``, which nothing would call."""
        super().__init_subclass__()
        if hasattr(cls, "loss"):
            raise TypeError(
                f"{cls.__name__} has a loss, which is no part of a Rule: give it to a subclass of OwnSteps"
            )

    @property
    def sends_update_alone(self) -> bool:
        """Whether a user sends only its update, without scaling."""
        kind = type(self)
        return self.correction is None and kind.scale is Rule.scale and kind.counts is Rule.counts

    def scale(self, num_steps: int) -> float:
        """The factor of a user's update, in addition to its weight in the mean."""
        return 1.0

    def counts(self, num_steps: int) -> Mapping[str, float]:
        """Numbers that a user sends besides its update; they are weighted and added up like the update."""
        return {}

    def user(self, user_id: str | None) -> UserRule:
        """The part of one user, at the start of its local training."""
        raise NotImplementedError

    def zeros(self) -> dict[str, Tensor]:
        """Zeros in the form of `UserRule.finish`'s result, from which a sum over users starts."""
        return {}

    def statistics(self, update: MappedVectorStatistics, num_steps: int) -> MappedVectorStatistics:
        """Turn a user's update into the statistics that it sends, in place."""
        if (scale := self.scale(num_steps)) != 1:
            for name in update:
                update[name] *= scale
        device = next(iter(update.values())).device
        for name, count in self.counts(num_steps).items():
            update[name] = torch.tensor([count], device=device)
        return update


class StepCounter:
    """A user's data set that counts the batches it yields."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.num_steps = dataset, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def iter(self, batch_size: int | None) -> Iterator[Any]:
        """The data set's batches, counted."""
        for batch in self._dataset.iter(batch_size):
            self.num_steps += 1
            yield batch


@contextlib.contextmanager
def not_noted(model: PyTorchModel) -> Iterator[None]:
    """In this context losses do not count in the round's training loss, as they are of no step of what is
    shared."""
    module = model.pytorch_model
    noted, module.noted = getattr(module, "noted", None), None
    try:
        yield
    finally:
        module.noted = noted


def rule_of(algorithm: Any, model: PyTorchModel, context: CentralContext) -> Rule | None:
    """The rule of an algorithm in a round; None if no rule can express what its users do."""
    if type(algorithm) is FederatedAveraging:
        return Rule()
    maker: Callable[..., Rule] | None = getattr(algorithm, "rule", None)
    return None if maker is None or getattr(algorithm, "own_steps", False) else maker(model, context)


def refusals_of(algorithm: Any) -> Refusals:
    """What an algorithm, ours or another, cannot be combined with.

    pfl's FedAvg sends one update, which a mechanism clips. Any other algorithm must have
    ``refusals``, which must include privacy unless it has been argued.
    """
    refusals: Refusals = getattr(algorithm, "refusals", PRIVACY_NOT_ARGUED)
    return {} if type(algorithm) is FederatedAveraging else refusals


def refuse(refusals: Refusals, **circumstances: bool) -> None:
    """Refuse the first of these circumstances that holds and has a refusal.

    Raises:
        ValueError: with the refusal as message.
    """
    for name, reason in refusals.items():
        if circumstances.get(name):
            raise ValueError(reason)
