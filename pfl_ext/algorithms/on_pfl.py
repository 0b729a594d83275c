"""Algorithms on pfl's loop. Each states in a `Rule` what its users do, and may override the server's step.

A cohort is trained by pfl's loop, one user after another (`OnPfl.train_one_user`), or by the engine
(`pfl_ext.engine`). Both read the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.context import CentralContext
from pfl.hyperparam.base import get_param_value
from pfl.internal.bridge import FrameworkBridgeFactory as bridges
from pfl.metrics import Metrics, get_overall_value
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import (
    Choice,
    RunContext,
    Setup,
    Traffic,
    UserState,
    trained_bytes,
)
from pfl_ext.algorithms.channel import Channel
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from pfl_ext.algorithms.spooled import line_of_rule
from pfl_ext.backend import cohort_line, training_context
from pfl_ext.devices.turnout import Turnouts
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.training import PerVariableClippedSGD, rate_factors
from pfl_ext.evaluation import autocast_of
from pfl_ext.models.classifier import RATE_FACTOR
from pfl_ext.privacy.central import PrivateMean, noisy_mean_in
from pfl_ext.privacy.local import LocallyPrivateMean
from pfl_ext.rules import Refusals, Rule, StepCounter, not_noted

STATE, CHANNEL = "algorithm/", "compression/"
"""Prefixes of names in a checkpoint: of the users' states, and of their compression errors."""


class Steps(NamedTuple):
    """Users' SGD: learning rate, each variable's factor to it (empty: all 1), and momentum."""

    rate: float
    factors: tuple[float, ...]
    momentum: float


def local_steps(model: PyTorchModel, context: CentralContext, name: str) -> Steps:
    """The form of users' local steps. ``name`` is the algorithm's, for the error.

    Raises:
        ValueError: when the local optimiser is not SGD with momentum.
    """
    rate = float(get_param_value(context.model_train_params.local_learning_rate))
    optimizer = model.new_local_optimizer(learning_rate=rate)
    group = optimizer.param_groups[0]
    known = type(optimizer) in (torch.optim.SGD, PerVariableClippedSGD)
    if not known or group["nesterov"] or group["dampening"]:
        raise ValueError(f"{name} supports only SGD, with or without momentum, as the local optimizer")
    return Steps(rate, rate_factors(model, optimizer), float(group["momentum"]))


def _gradient(model: PyTorchModel, batches: Iterable[Any], num_images: int) -> dict[str, Tensor]:
    """The gradient, by variable, of the mean loss over a user's images at the model's weights."""
    parameters = model.variable_map
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for batch in batches:
        ready = model._prepare_batch(batch)
        with autocast_of(model), not_noted(model):
            loss = model.pytorch_model.loss(*ready)
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
    start: Mapping[str, Tensor],
) -> None:
    """Make one local step with the rule's correction and proximal term; pfl's loop calls this."""
    with arguments.amp_context:
        loss = module.loss(*batch, **train_kwargs)
    loss.backward()
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if rule.proximal_weight:
            parameter.grad.add_(parameter.detach() - start[name], alpha=rule.proximal_weight)
        if rule.correction == "gradient":
            parameter.grad += correction[name]
    if arguments.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(module.parameters(), arguments.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    if rule.correction == "step":
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in trained.items():
            parameter.data.sub_(correction[name], alpha=rates[id(parameter)])


class OnPfl(Choice, FederatedAveraging):
    """Base of algorithms on pfl's loop. It is FedAvg itself; subclasses override its methods.

    Everything that users do must be in `rule`, which the engine reads too; only `OwnSteps` replaces it. So
    `train_one_user` is final.
    """

    tunes_engine: ClassVar[bool] = True
    has_server_model: ClassVar[bool] = True
    own_steps: ClassVar[bool] = False
    """Whether users make steps that no rule expresses (`OwnSteps`), by pfl's loop."""
    user_state: UserState | None = None
    """State that a run needs to continue, besides the model and the server's optimiser."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        assert cls.train_one_user is OnPfl.train_one_user, "the engine would not call it: override rule"

    @classmethod
    def start(cls, context: RunContext) -> PflLoop:
        """The algorithm for a run, in pfl's loop."""
        return PflLoop(cls, context)

    @property
    def own_arithmetic(self) -> str | None:
        """How users' steps are computed, where neither the engine nor plain torch does it."""
        return None

    def begin(self, cohort: IntArray) -> None:
        """Begin a round of these users; all workers call this."""

    def rule(self, model: PyTorchModel, context: CentralContext) -> Rule:
        """What users do in a round."""
        return Rule()

    def average(self, statistics: MappedVectorStatistics, context: CentralContext) -> None:
        """Turn the users' sum into their mean, in place. The server's optimiser steps on it."""
        statistics.average()

    def process_aggregated_statistics(
        self,
        central_context: CentralContext,
        aggregate_metrics: Metrics,
        model: PyTorchModel,
        statistics: MappedVectorStatistics,
    ) -> tuple[PyTorchModel, Metrics]:
        """Call `average`, then make the server's step."""
        self.average(statistics, central_context)
        applied: tuple[PyTorchModel, Metrics] = model.apply_model_update(statistics)
        return applied

    def train_one_user(
        self,
        initial_model_state: MappedVectorStatistics,
        model: PyTorchModel,
        user_dataset: Any,
        central_context: CentralContext,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Train one user for pfl's loop: local steps by the rule, then the statistics that the rule sends."""
        rule, local = self.rule(model, central_context), central_context.model_train_params
        counted, finish, gradient = StepCounter(user_dataset), None, None
        if rule.correction is not None:
            user = rule.user(user_dataset.user_id)
            finish = user.finish
            if rule.whole_gradient:
                gradient = _gradient(model, user_dataset.once(), len(user_dataset))
            start = dict(initial_model_state.items())
            arguments = {"correction": user.correction, "rule": rule, "start": start}
            model.do_multiple_epochs_of(counted, local, _corrected_step, **arguments)
        elif rule.proximal_weight:
            bridges.fedprox_bridge().do_proximal_sgd(model, counted, local, mu=rule.proximal_weight)
        else:
            bridges.sgd_bridge().do_sgd(model, counted, local)
        update = model.get_model_difference(initial_model_state)
        besides = {} if finish is None else finish(dict(update.items()), counted.num_steps, gradient)
        statistics = rule.statistics(update, counted.num_steps)
        for name, tensor in besides.items():
            statistics[name] = tensor
        return statistics, Metrics()


class PflLoop(ServerModelAlgorithm):
    """Makes the rounds of pfl's ``FederatedAlgorithm.run``, through `CentrallyEvaluatedBackend`.

    The state is the model with the server's optimiser, and the users' states where the algorithm has some.
    The backend checks the algorithm's refusals in every round.
    """

    refusals: ClassVar[Refusals] = {}

    def __init__(self, kind: type[OnPfl], context: RunContext) -> None:
        super().__init__(context)
        self._algorithm = kind(context)
        self._stages = context.stages(list(context.model.variable_map))
        self._backend = context.backend(self._stages, context.tuner if kind.tunes_engine else None)
        context.applied.add("devices")
        if context.devices is not None:
            context.users.turnouts = Turnouts(
                context.devices,
                context.users,
                context.users.partition.user_ids,
                cohort_size=context.cohort_size,
                seed=context.seed,
                sent=kind.traffic(context.module),
            )

    @property
    def engine(self) -> CohortEngine | None:
        """The engine that trains users; None: pfl's own loop does (perhaps for want of their optimiser)."""
        return self._backend.engine

    def arithmetic(self, precision: torch.dtype | None) -> str:
        """See `Algorithm.arithmetic`."""
        return self._algorithm.own_arithmetic or super().arithmetic(precision)

    def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
        """Run one round of pfl's loop, with that round's learning rates."""
        for group in state._central_optimizer.param_groups:
            group["lr"] = self.context.server_rate(number) * group.get(RATE_FACTOR, 1.0)
        users = self.context.users
        users.set_round(number)
        mechanism = noisy_mean_in(self.context.postprocessors)
        if users.turnouts is not None and not isinstance(mechanism, PrivateMean):  # noise makes a step
            members = users.members(self.context.cohort_size)
            if not any(member.num_images for member in members):  # no update, no weights
                rate = self.context.server_rate(number)
                nothing = {"users": len(members), "images": 0, "learning_rate": rate, "max_local_steps": 0}
                line = nothing | users.turnouts.line(number)
                if isinstance(mechanism, LocallyPrivateMean):
                    line["privacy"] = mechanism.skip(number)
                return state, line
        cohort = users.cohort(self.context.cohort_size, number)
        for stage in self._stages:
            stage.begin(number, cohort)
        self._algorithm.begin(cohort)
        asked = training_context(number, self.context.cohort_size, self.context.local_in(number))
        sums, metrics = self._backend.gather_results(state, self._algorithm, central_context=asked)
        state, stepped = self._algorithm.process_aggregated_statistics(asked, metrics, state, sums)
        for stage in self._stages:
            stage.end()
        line = self._line(metrics | stepped)
        if users.turnouts is not None:
            turnout = users.turnouts.line(number)
            line |= turnout | {"users": turnout["reported"]}  # pfl counts the placeholder user too
        return state, line

    def _line(self, metrics: Metrics) -> dict[str, Any]:
        values = {str(name): get_overall_value(value) for name, value in metrics}
        members = self.context.users.members(self.context.cohort_size)
        line = {
            **cohort_line(metrics),
            "users": len(members),  # pfl counts the placeholder of a worker without users too
            "learning_rate": values["learning rate"],
            "max_local_steps": max((m.num_steps for m in members), default=0),
        }
        line |= line_of_rule(metrics)
        if (mechanism := noisy_mean_in(self.context.postprocessors)) is not None:
            line["privacy"] = mechanism.line(metrics)
            line["users"] = int(line["privacy"]["users"])  # pfl counts the placeholder of an empty cohort
        return line

    @property
    def _channel(self) -> Channel | None:
        return next((stage for stage in self._stages if isinstance(stage, Channel)), None)

    def _kept(self) -> dict[str, UserState]:
        parts = {STATE: self._algorithm.user_state, CHANNEL: self._channel and self._channel.errors}
        return {prefix: part for prefix, part in parts.items() if part is not None}

    def bytes(self, state: PyTorchModel) -> Traffic:
        """The algorithm's traffic, with the compressed size of the update."""
        traffic: Traffic = self._algorithm.traffic(self.context.module)
        if self._channel is None:
            return traffic
        return Traffic(
            traffic.down, traffic.up - trained_bytes(self.context.module) + self._channel.num_bytes
        )
