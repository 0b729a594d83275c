"""FedAvg whose users lower a loss of the algorithm's own, or descend along a direction of its own.

Each user still sends its update, once in a round, and pfl's loop does with it all that it does with FedAvg's:
clipping and noise, compression, attacks, aggregation rules, devices. The engine does not know these steps, so
pfl's loop over users makes them, in compiled layers on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pfl.context import CentralContext
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext
from pfl_ext.algorithms.clients import Weights
from pfl_ext.algorithms.on_pfl import OnPfl
from pfl_ext.algorithms.personal_steps import InPhases, Phase, steepest
from pfl_ext.algorithms.personalised import ONLY_OF_COHORTS
from pfl_ext.data.user_images import UserImages
from pfl_ext.engine.cpu.twin import CompiledTwin
from pfl_ext.models.classifier import ImageClassifier


class OwnSteps(OnPfl):
    """Base of algorithms that differ from FedAvg in `loss`, in `gradient`, or in both.

    With privacy: whatever a user's steps are, its update is clipped, and it enters one sum in each round. So
    a subclass may say ``refusals = {}`` if its steps depend on the user's images and the server's weights
    alone. Without that line privacy is refused.
    """

    own_steps: ClassVar[bool] = True
    tunes_engine: ClassVar[bool] = False
    idle_in_runtime: ClassVar[str] = ONLY_OF_COHORTS

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._twin = CompiledTwin(context.model, context.kernels)
        self._steps = InPhases(self._twin)

    def __init_subclass__(cls) -> None:
        """Raise TypeError for a `rule`, which nothing would call."""
        super().__init_subclass__()
        if cls.rule is not OnPfl.rule:
            raise TypeError(f"{cls.__name__} has a rule beside its own steps: remove it, or take OnPfl")

    @property
    def own_arithmetic(self) -> str | None:
        """How users' steps are computed in compiled layers; None where they are not."""
        return self._twin.arithmetic

    def begin_user(self, user: UserImages) -> None:
        """Is called before the training of each user who has images."""

    def loss(
        self, module: ImageClassifier, received: Weights, images: Tensor, targets: Tensor, crops: Tensor
    ) -> Tensor:
        """The scalar that a user's step lowers on a batch. Here it is the task's loss.

        Args:
            module: the network in training.
            received: the weights from which the user started, by variable.
            images: with ``targets`` and ``crops`` as `ImageClassifier.loss` takes them.
        """
        return module.loss(images, targets, crops)

    def gradient(self, loss: Callable[[], Tensor], variables: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """What a step descends along, for each variable. Here it is the gradient of the loss.

        Args:
            loss: computes the batch's loss at the variables' current values. Only its first value counts in
                the round's training loss.
            variables: must have their values again at the end.
        """
        return steepest(loss, variables)

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Train one user for pfl's loop. Returns its update; the model has the server's weights again."""
        if len(user_dataset):  # a worker without users has a placeholder
            self.begin_user(user_dataset)
        module = model.pytorch_model
        received = {name: p.detach().clone() for name, p in model.variable_map.items()}

        def loss(*batch: Any) -> Tensor:
            noted = len(module.noted or ())
            value = self.loss(module, received, *batch)
            if module.noted is not None and len(module.noted) == noted:  # it did not go by `module.loss`
                module.noted.append((value.detach().clone(), len(batch[0])))
            return value

        self._steps.phases = [Phase(list(received), loss=loss, gradient=self.gradient)]
        return self._steps.simulate_one_user(model, user_dataset, central_context)
