"""The optimisers that torch lacks, local and central, and the central schedule.

A new optimiser of the server is one file in this folder, with a class under ``@server_optimizer("name")``.
Options of its own are set as ``server.options.FIELD``, as those of a new algorithm.

pfl's central optimiser steps on ``grad = -mean update`` of the round. So a gradient here is minus the
pseudo-gradient of Reddi et al. 2021 (Adaptive Federated Optimization, arXiv 2003.00295), and steps descend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from pydantic import AfterValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from pfl_ext.configs import STRICT, Fraction, NoOptions
from pfl_ext.registry import Registry


class OptimizerBuilder(Protocol):
    """The class of an optimiser, or a function that builds one."""

    def __call__(
        self, params: Iterable[nn.Parameter], config: OptimizerConfig, options: Any, /
    ) -> torch.optim.Optimizer:
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
        name: in the config.
        reads: see `ServerOptimizer`. Where it is chosen, the keys that only others read are refused.
        options: see `ServerOptimizer`.
    """

    def decorate(build: Built) -> Built:
        SERVER_OPTIMIZERS.add(name, ServerOptimizer(build, reads, options))
        return build

    return decorate


def _known(name: str) -> str:
    SERVER_OPTIMIZERS[name]  # refuses a name that there is not
    return name


@dataclass(frozen=True, config=STRICT)
class OptimizerConfig:
    """An optimiser with one learning rate for all parameters."""

    optimizer: Annotated[str, AfterValidator(_known)] = "sgd"
    """Name of the kind of step: sgd, adam, yogi, adagrad, or any other of pfl_ext/algorithms."""
    learning_rate: PositiveFloat = 1.0
    """Factor of a step, without unit."""
    beta1: Fraction = 0.9
    """Share of the first moment that a step keeps (all but sgd)."""
    beta2: Fraction = 0.999
    """Share of the second moment that a step keeps (adam and yogi)."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment, in the unit of a gradient (all but sgd)."""
    momentum: Fraction = 0.0
    """Share of the last step's direction that a step keeps (sgd)."""

    def build(self, params: Iterable[nn.Parameter], options: Any = None) -> torch.optim.Optimizer:
        """The optimiser of this name; ``options``: its own, None for their defaults."""
        chosen = SERVER_OPTIMIZERS[self.optimizer]
        return chosen.build(params, self, chosen.options() if options is None else options)


@dataclass(frozen=True, config=STRICT)
class AdamOptions:
    """The option that adam alone has."""

    adam_form: Literal["keras", "torch"] = "torch"
    """Where adam adds epsilon: to the moment as it is (keras), or to the corrected one (torch)."""


@dataclass(frozen=True, config=STRICT)
class ServerConfig(AdamOptions, OptimizerConfig):
    """What the server does with the mean update of a round."""

    schedule: Literal["constant", "warmup_linear"] = "constant"
    """The learning rate over the rounds; warmup_linear: from 0 straight up, then straight down."""
    warmup_rounds: NonNegativeInt = 0
    """Rounds until warmup_linear reaches `learning_rate`."""
    final_learning_rate: NonNegativeFloat = 0.0
    """The learning rate of warmup_linear after the last round."""

    def rate(self, round: int, num_rounds: int) -> float:
        """The learning rate in round 0, 1, ...; a pure function, so a resumed run needs no scheduler.

        "warmup_linear" (pfl-research's benchmark): from 0 in round 0 straight up to ``learning_rate`` in
        round ``warmup_rounds``, then straight down to ``final_learning_rate`` in round ``num_rounds`` and
        after it.

        Raises:
            ValueError: when the run ends before the warm-up does.
        """
        assert round >= 0
        if self.schedule == "constant":
            return self.learning_rate
        if self.warmup_rounds >= num_rounds:
            raise ValueError(
                f"server.warmup_rounds is {self.warmup_rounds}, not below federated.num_rounds = "
                f"{num_rounds}: lower it"
            )
        if round < self.warmup_rounds:
            return self.learning_rate * round / self.warmup_rounds
        left = max(0.0, 1 - (round - self.warmup_rounds) / (num_rounds - self.warmup_rounds))
        return self.final_learning_rate + (self.learning_rate - self.final_learning_rate) * left


@dataclass(frozen=True, config=STRICT)
class LocalSGDConfig:
    """Gradient descent on one user's images."""

    learning_rate: PositiveFloat = 0.1
    """Factor of a user's step, without unit."""
    max_grad_norm: PositiveFloat | None = None
    """Greatest L2 norm of a gradient, above which it is scaled down to it; none: no limit."""
    clip_by: Literal["variable", "global"] = "global"
    """What `max_grad_norm` limits: each variable's gradient by itself, or all of them together."""
    momentum: Fraction = 0.0
    """Share of the last step's direction that a step keeps; it starts from nothing in every round."""
    weight_decay: NonNegativeFloat = 0.0
    """Multiple of the parameters that is added to their gradient, after clipping each variable."""

    def optimizer(self, params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """A new optimiser at this learning rate; clipping all gradients together is left to the caller."""
        by_variable = self.max_grad_norm if self.clip_by == "variable" else None
        if by_variable is None:
            return torch.optim.SGD(params, lr=lr, momentum=self.momentum, weight_decay=self.weight_decay)
        return PerVariableClippedSGD(params, lr, by_variable, self.momentum, self.weight_decay)

    @property
    def global_max_grad_norm(self) -> float | None:
        """What all gradients together are clipped to."""
        return self.max_grad_norm if self.clip_by == "global" else None


class PerVariableClippedSGD(torch.optim.SGD):
    """SGD that first scales each variable's gradient down to an L2 norm of at most ``max_norm``.

    The local optimiser of the paper's code (Keras' ``clipnorm``: each variable by itself, where pfl's
    ``local_max_grad_norm`` bounds the norm of all gradients together). Gradients are scaled in place, and
    no norm is ever read back from the device. Weight decay is added after clipping.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        max_norm: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ):
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm} and must be positive; leave clipping out for none")
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay, foreach=True)
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip, then take an ordinary SGD step. Closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            clip_each([p.grad for p in group["params"] if p.grad is not None], self.max_norm)
        return super().step()  # type: ignore[no-any-return]


def clip_each(gradients: list[Tensor], max_norm: float) -> None:
    """Scale every gradient whose L2 norm exceeds ``max_norm`` down to it, in place, without a sync.

    On a CPU, where looking at a norm costs nothing, gradients that need no scaling are not written again.
    """
    if not gradients:
        return
    norms = torch.stack(list(torch._foreach_norm(gradients)))
    if norms.device.type == "cpu":
        gradients = [g for g, norm in zip(gradients, norms.tolist()) if not norm <= max_norm]
        norms = norms[~(norms <= max_norm)]
    if gradients:
        torch._foreach_mul_(gradients, list((max_norm / norms.clamp(min=max_norm)).unbind()))


@server_optimizer("sgd", "momentum")
def _sgd(params: Iterable[nn.Parameter], config: OptimizerConfig, options: Any) -> torch.optim.Optimizer:
    """``v <- momentum v + g``, ``x <- x - lr v``."""
    return torch.optim.SGD(params, lr=config.learning_rate, momentum=config.momentum)


@server_optimizer("adam", "beta1", "beta2", "epsilon", options=AdamOptions)
@server_optimizer("yogi", "beta1", "beta2", "epsilon")
@server_optimizer("adagrad", "beta1", "epsilon")
class FedOpt(torch.optim.Optimizer):
    """Adaptive server optimisers by name. With gradient g, moments m and v, rate lr and step t = 1, 2, ...:

    * all: ``m <- beta1 m + (1 - beta1) g``, from 0.
    * adam, form "keras" (the paper's): ``v <- beta2 v + (1 - beta2) g^2`` from 0, and
      ``x <- x - lr sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + epsilon)``; epsilon is thus weaker late
      than early (the "epsilon hat" of Kingma and Ba).
    * adam, form "torch" (pfl-research's): both moments corrected first, then
      ``x <- x - lr m^ / (sqrt(v^) + epsilon)``; the same as ``torch.optim.Adam``.
    * yogi: ``v <- v - (1 - beta2) g^2 sign(v - g^2)``; adagrad: ``v <- v + g^2`` (beta2 has no effect); both
      from ``v = epsilon^2`` and without correction, ``x <- x - lr m / (sqrt(v) + epsilon)`` (Reddi et al.
      2021, Algorithm 2, whose tau is epsilon).

    The state of a parameter is three tensors: ``exp_avg``, ``exp_avg_sq`` and ``step`` (float32 on the CPU).
    """

    def __init__(self, params: Iterable[nn.Parameter], config: OptimizerConfig, options: Any):
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
