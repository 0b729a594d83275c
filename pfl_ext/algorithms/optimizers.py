"""The server's optimisers that torch lacks, and the config section of the server's step.

A new server optimiser is one file in this folder, with a class under ``@server_optimizer("name")``. Its own
options are set as ``server.options.FIELD``, like the options of a new algorithm.

pfl's central optimiser steps on ``grad = -mean update`` of the round. So a gradient here is minus the
pseudo-gradient of Reddi et al. 2021 (Adaptive Federated Optimization, arXiv 2003.00295), and steps descend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from pydantic import AfterValidator, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.optim.optimizer import ParamsT

from pfl_ext.configs import STRICT, Fraction, NoOptions
from pfl_ext.registry import Registry
from pfl_ext.schedules import ScheduleConfig


class OptimizerBuilder(Protocol):
    """The class of an optimiser, or a function that builds one."""

    def __call__(self, params: ParamsT, config: OptimizerConfig, options: Any, /) -> torch.optim.Optimizer:
        """The optimiser of these parameters; ``options``: see `ServerOptimizer`."""
        ...


class ServerOptimizer(NamedTuple):
    """What ``server.optimizer`` chooses by name."""

    build: OptimizerBuilder
    reads: Sequence[str]
    """The keys of `OptimizerConfig` that it reads, besides those that all read."""
    options: type
    """The frozen dataclass of its options."""


SERVER_OPTIMIZERS: Registry[ServerOptimizer] = Registry("pfl_ext.algorithms", "server.optimizer")
Built = TypeVar("Built", bound=OptimizerBuilder)


def server_optimizer(name: str, *reads: str, options: type = NoOptions) -> Callable[[Built], Built]:
    """Decorator of an `OptimizerBuilder`: ``server.optimizer`` chooses it by this name.

    Args:
        name: its name in the config.
        reads: see `ServerOptimizer`. Keys that only other optimisers read are refused with this one.
        options: see `ServerOptimizer`.
    """

    def decorate(build: Built) -> Built:
        SERVER_OPTIMIZERS.add(name, ServerOptimizer(build, reads, options))
        return build

    return decorate


def _known(name: str) -> str:
    SERVER_OPTIMIZERS[name]  # raises the error of an unknown name
    return name


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """An optimiser, whose learning rate may differ between the head and the other layers."""

    optimizer: Annotated[str, AfterValidator(_known)] = "sgd"
    """Name of the optimiser: sgd, adam, yogi, adagrad, or any other of pfl_ext/algorithms."""
    learning_rate: PositiveFloat = 1.0
    """Learning rate, without unit."""
    head_rate_factor: PositiveFloat = 1.0
    """Learning rate of the head (last layer, bottleneck, decoder) divided by that of the other layers."""
    beta1: Fraction = 0.9
    """Share of the first moment that a step keeps (all but sgd)."""
    beta2: Fraction = 0.999
    """Share of the second moment that a step keeps (adam and yogi)."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment, in the unit of a gradient (all but sgd)."""
    momentum: Fraction = 0.0
    """Share of the last step's direction that a step keeps (only sgd)."""

    def build(self, params: ParamsT, options: Any = None) -> torch.optim.Optimizer:
        """The optimiser `optimizer` of ``params``. ``options`` are its own options; None: their defaults.

        The groups of ``params`` already contain `head_rate_factor` (`ImageClassifier.rate_groups`).
        """
        chosen = SERVER_OPTIMIZERS[self.optimizer]
        return chosen.build(params, self, chosen.options() if options is None else options)


@dataclass(frozen=True, config=STRICT)
class AdamOptions:
    """The option that only adam has."""

    adam_form: Literal["keras", "torch"] = "torch"
    """Where adam adds epsilon: to the moment as it is (keras), or to the corrected one (torch)."""


@dataclass(frozen=True, config=STRICT)
class ServerConfig(AdamOptions, ScheduleConfig, OptimizerConfig):
    """The server's step on the mean update of a round."""

    warmup_rounds: NonNegativeInt = 0
    """Rounds until warmup_linear reaches `learning_rate`."""

    def rate(self, round: int, num_rounds: int) -> float:
        """The learning rate in round 0, 1, ..., see `pfl_ext.schedules`.

        "warmup_linear" (pfl-research's benchmark): from 0 in round 0 straight up to ``learning_rate`` in
        round ``warmup_rounds``, then straight down to ``final_learning_rate`` in round ``num_rounds`` and
        after it.

        Raises:
            ValueError: when the run ends before the warm-up does.
        """
        if self.schedule != "warmup_linear":
            return self.scheduled(self.learning_rate, round, num_rounds)
        if self.warmup_rounds >= num_rounds:
            raise ValueError(
                f"server.warmup_rounds is {self.warmup_rounds}, but must be below federated.num_rounds "
                f"= {num_rounds}: lower it"
            )
        if round < self.warmup_rounds:
            return self.learning_rate * round / self.warmup_rounds
        since = self.warmup_rounds
        return self.scheduled(self.learning_rate, round - since, num_rounds - since)


@server_optimizer("sgd", "momentum")
def _sgd(params: ParamsT, config: OptimizerConfig, options: Any) -> torch.optim.Optimizer:
    """``v <- momentum v + g``, ``x <- x - lr v``."""
    return torch.optim.SGD(params, lr=config.learning_rate, momentum=config.momentum)


@server_optimizer("adam", "beta1", "beta2", "epsilon", options=AdamOptions)
@server_optimizer("yogi", "beta1", "beta2", "epsilon")
@server_optimizer("adagrad", "beta1", "epsilon")
class FedOpt(torch.optim.Optimizer):
    """Adaptive server optimisers by name. With gradient g, moments m and v, rate lr and step t = 1, 2, ...:

    * all: ``m <- beta1 m + (1 - beta1) g``, from 0.
    * adam, form "keras" (FLAIR's, by Keras): ``v <- beta2 v + (1 - beta2) g^2`` from 0, and
      ``x <- x - lr sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)``; epsilon is thus weaker late
      than early (the "epsilon hat" of Kingma and Ba).
    * adam, form "torch" (pfl-research's): both moments corrected first, then
      ``x <- x - lr m^ / (sqrt(v^) + epsilon)``; the same as ``torch.optim.Adam``.
    * yogi: ``v <- v - (1 - beta2) g^2 sign(v - g^2)``; adagrad: ``v <- v + g^2`` (beta2 has no effect); both
      from ``v = epsilon^2`` and without correction, ``x <- x - lr m / (sqrt(v) + epsilon)`` (Reddi et al.
      2021, Algorithm 2, whose tau is epsilon).

    The state of a parameter is three tensors: ``exp_avg``, ``exp_avg_sq`` and ``step`` (float32 on the CPU).
    """

    def __init__(self, params: ParamsT, config: OptimizerConfig, options: Any):
        self.name, self._options = config.optimizer, options
        defaults = {"lr": config.learning_rate, "beta1": config.beta1}
        super().__init__(params, {**defaults, "beta2": config.beta2, "epsilon": config.epsilon})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step on every parameter that has a gradient. Closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, x: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        beta1, beta2, epsilon = group["beta1"], group["beta2"], group["epsilon"]
        state = self.state[x]
        if not state:
            first = 0.0 if self.name == "adam" else epsilon**2
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(x)
            state["exp_avg_sq"] = torch.full_like(x, first)
        m, v, square = state["exp_avg"], state["exp_avg_sq"], g * g
        state["step"] += 1
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        if self.name == "adam":
            v.mul_(beta2).add_(square, alpha=1 - beta2)
        elif self.name == "yogi":
            v.sub_(square * torch.sign(v - square), alpha=1 - beta2)
        else:
            v.add_(square)
        rate, root = group["lr"], 1.0
        if self.name == "adam":
            t = int(state["step"])
            rate, root = rate / (1 - beta1**t), math.sqrt(1 - beta2**t)
            if self._options.adam_form == "keras":
                rate, root = rate * root, 1.0
        x.addcdiv_(m, (v.sqrt() / root).add_(epsilon), value=-rate)
