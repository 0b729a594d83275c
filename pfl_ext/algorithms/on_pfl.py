"""Algorithms on pfl's loop. Each says in a `Rule` what its users do, and overrides the server's step.

A cohort's users are trained by pfl's loop, one after another (`OnPfl.train_one_user`), or by the engine
(`pfl_ext.engine`); both read the same rule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx as PflFedProx
from pfl.context import CentralContext
from pfl.hyperparam.base import get_param_value
from pfl.internal.bridge import FrameworkBridgeFactory as bridges
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from pfl_ext.algorithms.algorithm import PRIVACY_NOT_ARGUED, NoOptions, Refusals, Setup, UserState
from pfl_ext.algorithms.optimizers import PerVariableClippedSGD
from pfl_ext.algorithms.rules import Rule


class StepCounter:
    """A user's data set that counts the batches it hands out."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self.num_steps = dataset, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def iter(self, batch_size: int | None) -> Iterator[Any]:
        """As the data set."""
        for batch in self._dataset.iter(batch_size):
            self.num_steps += 1
            yield batch


def rate_and_momentum(model: PyTorchModel, context: CentralContext, name: str) -> tuple[float, float]:
    """Learning rate and momentum of users' steps.

    Raises:
        ValueError: for steps that are not those of SGD with momentum; ``name`` is the algorithm's.
    """
    rate = float(get_param_value(context.model_train_params.local_learning_rate))
    optimizer = model.new_local_optimizer(learning_rate=rate)
    group = optimizer.param_groups[0]
    known = type(optimizer) in (torch.optim.SGD, PerVariableClippedSGD)
    if not known or group["nesterov"] or group["dampening"]:
        raise ValueError(f"{name} knows the steps of plain SGD or SGD with momentum: train users with that")
    return rate, float(group["momentum"])


def _gradient(model: PyTorchModel, batches: Iterable[Any], num_images: int) -> dict[str, Tensor]:
    """The gradient of the mean loss over a user's images where the model stands, by variable."""
    parameters = model.variable_map
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in batches:
        ready = model._prepare_batch(batch)
        with model.amp_context or contextlib.nullcontext():
            noted, model.pytorch_model.noted = getattr(model.pytorch_model, "noted", None), None
            loss = model.pytorch_model.loss(*ready)  # of no step
            model.pytorch_model.noted = noted
        found = torch.autograd.grad(loss, list(parameters.values()))
        for name, gradient in zip(total, found):
            total[name].add_(gradient, alpha=len(ready[0]) / num_images)
    return total


def _corrected_step(
    module: Any,
    optimizer: torch.optim.Optimizer,
    batch: Any,
    train_kwargs: Mapping[str, Any],
    arguments: Any,
    *,
    correction: Mapping[str, Tensor],
    rule: Rule,
) -> None:
    """One local step, as pfl's loop asks for it."""
    with arguments.amp_context:
        loss = module.loss(*batch, **train_kwargs)
    loss.backward()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if rule.correction == "gradient":
        for name, parameter in trained.items():
            parameter.grad += correction[name]
    if arguments.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(module.parameters(), arguments.max_grad_norm)
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    optimizer.zero_grad()
    if rule.correction == "step":
        for name, parameter in trained.items():
            parameter.data.sub_(correction[name], alpha=rate)


class OnPfl(FederatedAveraging):
    """An algorithm on pfl's loop. This one is FedAvg, and each of its methods is there to be overridden.

    The engine trains the users of such an algorithm by its `rule`, and so never calls `train_one_user`.
    """

    options: ClassVar[type] = NoOptions
    """Its frozen dataclass of options."""
    refusals: ClassVar[Refusals] = PRIVACY_NOT_ARGUED
    """What it cannot be combined with, and why."""
    files: ClassVar[tuple[str, ...]] = ()
    """Names of the files beside a run's checkpoints in which it keeps the state of users."""
    user_state: UserState | None = None
    """What a run goes on from besides the model and the server's optimiser."""

    @classmethod
    def resolved(cls, options: Any) -> dict[str, Any]:
        """Values of options that are left open, by key."""
        return {}

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what cannot be trained, before anything is written.

        Raises:
            ValueError: one line with the reason.
        """

    @classmethod
    def build(cls, setup: Setup, **common: Any) -> tuple[FederatedAveraging, NNAlgorithmParams]:
        """The algorithm and its parameters, from those that all algorithms have."""
        return cls(), NNAlgorithmParams(**common)

    def rule(self, model: PyTorchModel, context: CentralContext) -> Rule:
        """What users do in a round."""
        return Rule()

    def train_one_user(
        self,
        initial_model_state: MappedVectorStatistics,
        model: PyTorchModel,
        user_dataset: Any,
        central_context: CentralContext,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """What pfl's loop asks of each user: local steps by the rule, then what the rule sends."""
        rule, how = self.rule(model, central_context), central_context.model_train_params
        counted, finish, gradient = StepCounter(user_dataset), None, None
        if rule.correction is not None:
            assert not rule.proximal_weight
            user = rule.user(user_dataset.user_id)
            finish = user.finish
            if rule.whole_gradient:
                gradient = _gradient(model, user_dataset.once(), len(user_dataset))
            arguments = {"correction": user.correction, "rule": rule}
            model.do_multiple_epochs_of(counted, how, _corrected_step, **arguments)
        elif rule.proximal_weight:
            bridges.fedprox_bridge().do_proximal_sgd(model, counted, how, mu=rule.proximal_weight)
        else:
            bridges.sgd_bridge().do_sgd(model, counted, how)
        update = model.get_model_difference(initial_model_state)
        besides = {} if finish is None else finish(dict(update.items()), counted.num_steps, gradient)
        statistics = rule.statistics(update, counted.num_steps)
        for name, tensor in besides.items():
            statistics[name] = tensor
        return statistics, Metrics()


class ProximalRule(Rule):
    """FedAvg's, with a proximal term."""

    def __init__(self, proximal_weight: float) -> None:
        self.proximal_weight = proximal_weight


def _mu(context: CentralContext) -> float:
    return float(get_param_value(context.algorithm_params.mu))


PFLS_OWN: Mapping[type, Callable[[CentralContext], Rule]] = {
    FederatedAveraging: lambda context: Rule(),
    PflFedProx: lambda context: ProximalRule(_mu(context)),
}
"""Algorithms of pfl's own that the engine can train for."""


def rule_of(algorithm: Any, model: PyTorchModel, context: CentralContext) -> Rule | None:
    """The rule of an algorithm in a round; None for one whose users do something else than rules can say."""
    if type(algorithm) in PFLS_OWN:
        return PFLS_OWN[type(algorithm)](context)
    if getattr(type(algorithm), "train_one_user", None) is not OnPfl.train_one_user:
        return None
    rule: Rule = algorithm.rule(model, context)
    return rule
