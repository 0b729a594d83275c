"""Local training for algorithms with a loop of their own: users train from any given weights.

Users train as in FedAvg, by the engine where it can. With several workers each trains its share of the users.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.context import CentralContext
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import RunContext
from pfl_ext.algorithms.personal_steps import Gradient, InPhases, Loss, Phase, steepest
from pfl_ext.algorithms.spooled import line_of_rule
from pfl_ext.backend import TRAIN_LOSS, cohort_line, training_context
from pfl_ext.data.user_images import UserImages
from pfl_ext.engine.cpu.twin import CompiledTwin
from pfl_ext.evaluation import autocast_of
from pfl_ext.models.classifier import RATE_FACTOR, ImageClassifier
from pfl_ext.privacy.central import is_private
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals, not_noted
from pfl_ext.stage import Stage
from pfl_ext.tasks.ranking import Diverged
from pfl_ext.workers.distributed import apart, begin_work, current

Weights = dict[str, Tensor]
"""The trained variables of a model by name."""


class Trainer(Protocol):
    """The method that pfl's backend calls where users do not train as in FedAvg."""

    refusals: Refusals

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """A user's update by variable. ``model`` has the server's weights, before the call and after it."""
        ...


UserLoss = Callable[[ImageClassifier, Weights, Tensor, Tensor, Tensor], Tensor]
"""Computes the scalar that a user's step lowers, from the network, the weights from which the user started,
and a batch's images, targets and crops, as `ImageClassifier.loss` takes them."""


class OwnSteps:
    """FedAvg's local training with another loss or gradient, in pfl's loop: no steps of the engine.

    A subclass whose loss depends on the user, such as on its class counts, overrides `begin`.
    """

    refusals: Refusals = PRIVACY_NOT_ARGUED

    def __init__(
        self, context: RunContext, loss: UserLoss | None = None, gradient: Gradient = steepest
    ) -> None:
        self._loss, self._gradient = loss, gradient
        self.twin = CompiledTwin(context.model, context.kernels)
        self._steps = InPhases(self.twin)

    def begin(self, user: UserImages) -> None:
        """Is called before the training of each user who has images."""

    def simulate_one_user(
        self, model: PyTorchModel, user_dataset: UserImages, central_context: CentralContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """See `Trainer`."""
        if len(user_dataset):  # a worker without users has a placeholder
            self.begin(user_dataset)
        loss = None if self._loss is None else self._noted(self._loss, model)
        self._steps.phases = [Phase(list(model.variable_map), loss=loss, gradient=self._gradient)]
        return self._steps.simulate_one_user(model, user_dataset, central_context)

    def _noted(self, of_user: UserLoss, model: PyTorchModel) -> Loss:
        """The user's loss of a batch, which counts in the round's training loss."""
        module = model.pytorch_model
        received = {name: p.detach().clone() for name, p in model.variable_map.items()}

        def loss(*batch: Tensor) -> Tensor:
            noted = len(module.noted or ())
            value = of_user(module, received, *batch)
            if module.noted is not None and len(module.noted) == noted:  # it did not go by `module.loss`
                module.noted.append((value.detach().clone(), len(batch[0])))
            return value

        return loss


class Clients:
    """The users of a run.

    Args:
        context: the run's.
        trainer: trains one user, and declares its ``refusals``; None: FedAvg's local training.
        loss: minimised by users' steps instead of the task's loss; all else is FedAvg's local training.
        gradient: what users' steps descend along instead of the loss's gradient, as SAM does.
        before: what is done to each update before it is weighted (`RunContext.stages`).

    Raises:
        ValueError: in a private run, since a mechanism bounds only one sum of updates in each round.
    """

    def __init__(
        self,
        context: RunContext,
        trainer: Trainer | None = None,
        loss: UserLoss | None = None,
        gradient: Gradient | None = None,
        before: Sequence[Stage] = (),
    ) -> None:
        assert trainer is None or (loss is None and gradient is None)
        if any(map(is_private, context.postprocessors)):
            raise ValueError(
                "federated.algorithm trains its users by Clients, whose sums no privacy mechanism bounds: "
                "choose fedavg or another algorithm on pfl's loop, such as one with a Rule of your own"
            )
        if loss is not None or gradient is not None:
            trainer = OwnSteps(context, loss, gradient or steepest)
        self._context, self._algorithm = context, FederatedAveraging() if trainer is None else trainer
        self._backend = context.backend(before)

    @property
    def arithmetic(self) -> str | None:
        """How users' own steps are computed in compiled layers; None where they are not."""
        return self._algorithm.twin.arithmetic if isinstance(self._algorithm, OwnSteps) else None

    def weights(self) -> Weights:
        """A copy of the run's model's current weights."""
        return {name: p.detach().clone() for name, p in self._context.model.variable_map.items()}

    @torch.no_grad()
    def model(self, weights: Mapping[str, Tensor]) -> PyTorchModel:
        """Set the run's model to these weights, and return it."""
        for name, parameter in self._context.model.variable_map.items():
            parameter.copy_(weights[name])
        return self._context.model

    def cohort(self, number: int) -> IntArray:
        """The users of a round; the same on every worker."""
        return self._context.users.cohort(self._context.cohort_size, number)

    def mean_update(
        self, weights: Mapping[str, Tensor], users: IntArray, number: int, draws: int | None = None
    ) -> tuple[Weights, dict[str, Any]]:
        """Train some users from the same weights, in a round.

        Args:
            weights: all users start from these.
            users: as `cohort` returns them.
            number: the round, which decides the learning rate.
            draws: the round from which users draw batches and crops; None: ``number``. An algorithm that
                trains a user several times in a round needs other draws each time.

        Returns:
            The weighted mean of their updates, on every worker, and what ``metrics.jsonl`` says of them:
            how many users and images, and their training loss. Without users the mean is 0.
        """
        if not len(users):
            self.model(weights)
            return {name: torch.zeros_like(w) for name, w in weights.items()}, {"users": 0, "images": 0}
        update, metrics = self._trained(weights, users, number, number if draws is None else draws)
        # pfl would also count the placeholder of a worker without users
        return update, {**cohort_line(metrics), **line_of_rule(metrics), "users": len(users)}

    def each_update(
        self, weights: Sequence[Mapping[str, Tensor]], users: IntArray, number: int
    ) -> tuple[list[Weights], dict[str, Any]]:
        """Train each user alone, from weights of its own, in a round.

        The result is that of `mean_update` for one user after another. With several workers the users are
        divided by their predicted work, and one reduction gives all updates to all workers. A user's batches
        are a function of (seed, ``number``, user), so a user that occurs twice draws the same ones. The run's
        model has unspecified weights afterwards.

        Args:
            weights: for each entry of ``users``, the weights from which that user starts.
            users: ``[n]``, as `cohort` returns them.
            number: the round.

        Returns:
            The n updates, not weighted, on every worker; and the line of ``metrics.jsonl``, as from
            `mean_update`. A user without images has an update of zeros.
        """
        assert len(weights) == len(users)
        if not len(users):
            return [], {"users": 0, "images": 0}
        updates = [{name: torch.zeros_like(w) for name, w in start.items()} for start in weights]
        seen = self.unseen(users)
        with self.dealt(users, number) as mine:
            for place in mine:
                updates[place], seen[place] = self.train_alone(weights[place], users[place], number)
        if (workers := current()) is not None:
            # exactly, whatever runtime.reduce says: these are single users' updates, and no sums
            workers.all_reduce([seen, *(update[name] for update in updates for name in update)])
        return updates, line_of(seen)

    def unseen(self, users: IntArray) -> Tensor:
        """``[n, 3]`` zeros, a row for what `train_alone` returns about each of n users."""
        return torch.zeros(len(users), 3, device=next(iter(self._context.model.variable_map.values())).device)

    @contextlib.contextmanager
    def dealt(self, users: IntArray, number: int) -> Iterator[list[int]]:
        """Positions in ``users`` of the users that this worker trains in a round, by `train_alone`.

        Users are divided by their predicted work. In this context the process is `apart` from other workers.
        """
        workers = current()
        begin_work(
            round=number, cohort=f"{zlib.crc32(users.tobytes()):08x}", config=self._context.config_hash
        )
        shares = self._context.users.assign(users, 1 if workers is None else workers.world_size)
        with apart():
            yield shares[0 if workers is None else workers.global_rank]

    def train_alone(
        self, weights: Mapping[str, Tensor], user: int, number: int, draws: int | None = None
    ) -> tuple[Weights, Tensor]:
        """Train one user from these weights, within `dealt`. ``draws``: see `mean_update`.

        Returns:
            The update, not weighted, zeros for a user without images; and ``[3]``: the number of images, the
            sum of losses, and the number of images in that sum.
        """
        alone = np.array([user], np.int64)
        update, metrics = self._trained(weights, alone, number, number if draws is None else draws)
        return update, torch.tensor(_counts(metrics))

    @torch.no_grad()
    def loss_of(self, user: int, number: int) -> tuple[float, int]:
        """A user's mean loss at the run's model's weights, and its number of images; 0 and 0 without images.

        The images are those of its training in round ``number``, each once.
        """
        (loss,), images = self.losses_of([self.weights()], user, number)
        return loss, images

    @torch.no_grad()
    def losses_of(
        self, models: Sequence[Mapping[str, Tensor]], user: int, number: int
    ) -> tuple[list[float], int]:
        """`loss_of` at the weights of each model, with one read; the run's model has the last one's."""
        self._context.users.set_round(number)
        batches, losses = list(self._context.users.user_dataset(user).once()), list[float]()
        images = sum(len(batch[0]) for batch in batches)
        for weights in models:
            model, total = self.model(weights), 0.0
            for batch in batches:
                with autocast_of(model), not_noted(model):
                    loss = model.pytorch_model.loss(*model._prepare_batch(batch))
                total += float(loss) * len(batch[0])
            losses.append(total / images if images else 0.0)
        return losses, images

    def gather(self, table: Tensor) -> None:
        """Fill a table in place from all workers; each has the rows of its own users, and zeros besides."""
        if (workers := current()) is not None:
            there = table.to(self._context.model.pytorch_model.mean.device)
            table.copy_(workers.all_reduce([there])[0])

    def gather_losses(self, table: Tensor, number: int) -> None:
        """`gather` a table of users' losses in a round.

        Raises:
            Diverged: when a loss is not finite.
        """
        self.gather(table)
        if not table.isfinite().all():
            found = f"the loss of a user in round {number} is {float(table.sum()):g}"
            raise Diverged(found, "lower local.learning_rate")

    def server_step(self, weights: Mapping[str, Tensor], mean: Mapping[str, Tensor], number: int) -> float:
        """Make a step of the server's optimiser on a mean update; the run's model has the result.

        Args:
            weights: the server's weights before the step.
            mean: the mean update by variable, in any precision.
            number: the round.

        Returns:
            The learning rate.
        """
        model, rate = self.model(weights), self._context.server_rate(number)
        for group in model._central_optimizer.param_groups:
            group["lr"] = rate * group.get(RATE_FACTOR, 1.0)
        update = {name: part.to(weights[name].dtype) for name, part in mean.items()}
        model.apply_model_update(MappedVectorStatistics(update))
        return rate

    def _trained(
        self, weights: Mapping[str, Tensor], users: IntArray, number: int, draws: int
    ) -> tuple[Weights, Metrics]:
        """The weighted mean of the updates of some users, at least one."""
        model = self.model(weights)
        context = training_context(draws, len(users), self._context.local_in(number))
        with self._context.users.only(users):
            sums, metrics = self._backend.gather_results(model, self._algorithm, central_context=context)
        if float(sums.weight):  # 0 where users weigh by their images and have none: then the sums are 0 too
            sums.average()
        return {name: sums[name].to(w.dtype, copy=True) for name, w in weights.items()}, metrics


def line_of(seen: Tensor) -> dict[str, Any]:
    """The line of ``metrics.jsonl`` for n users, from the rows ``[n, 3]`` of `Clients.train_alone`."""
    images, total, counted = seen.double().sum(0).tolist()
    line = {"users": len(seen), "images": int(images)}
    loss = total / counted if counted else math.nan
    return {**line, "train_loss": round(loss, 6)} if math.isfinite(loss) else line


def _counts(metrics: Metrics) -> tuple[float, float, float]:
    """For a user that trained alone: its images, the sum of losses, and the number of images in that sum."""
    values = {str(name): value for name, value in metrics}
    loss = values[str(TRAIN_LOSS)]
    images: float = values["train population | number of data points"].weighted_value
    return images, loss.weighted_value, loss.weight
