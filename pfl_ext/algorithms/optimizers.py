"""The optimisers of the FLAIR benchmarks that torch lacks, local and central, and the central schedule.

pfl's central optimiser steps on ``grad = -mean update`` of the round. So a gradient here is minus the
pseudo-gradient of Reddi et al. 2021 (Adaptive Federated Optimization, arXiv 2003.00295), and steps descend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

AdamForm = Literal["keras", "torch"]
ServerOptimizer = Literal["adam", "yogi", "adagrad", "sgd"]
Schedule = Literal["constant", "warmup_linear"]


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

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        name: Literal["adam", "yogi", "adagrad"],
        lr: float,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 0.01,
        adam_form: AdamForm = "keras",
    ):
        if name not in ("adam", "yogi", "adagrad"):
            raise ValueError(f"the adaptive server optimiser must be adam, yogi or adagrad, not {name!r}")
        if adam_form not in get_args(AdamForm):
            raise ValueError(f"adam_form must be keras or torch, not {adam_form!r}")
        if not lr >= 0:
            raise ValueError(f"the server's learning_rate is {lr} and must not be negative")
        for key, beta in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{key} is {beta} and must lie in 0 <= {key} < 1")
        if not epsilon > 0:
            raise ValueError(f"epsilon is {epsilon} and must be positive")
        self.name, self.adam_form = name, adam_form
        super().__init__(params, {"lr": lr, "beta1": beta1, "beta2": beta2, "epsilon": epsilon})

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
            if self.adam_form == "keras":
                rate, root = rate * root, 1.0
        x.addcdiv_(m, (v.sqrt() / root).add_(epsilon), value=-rate)


def make_server_optimizer(
    params: Iterable[nn.Parameter],
    *,
    name: ServerOptimizer,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 0.01,
    adam_form: AdamForm = "keras",
    momentum: float = 0.0,
) -> torch.optim.Optimizer:
    """The central optimiser by name; defaults are the paper's.

    "sgd" is ``v <- momentum v + g``, ``x <- x - lr v`` and reads nothing but ``momentum``; the others are
    `FedOpt` and do not read ``momentum``. Raises ValueError naming the key of a value out of range.
    """
    if name not in get_args(ServerOptimizer):
        raise ValueError(f"optimizer must be one of {', '.join(get_args(ServerOptimizer))}, not {name!r}")
    if name != "sgd":
        return FedOpt(
            params,
            name=name,
            lr=learning_rate,
            beta1=beta1,
            beta2=beta2,
            epsilon=epsilon,
            adam_form=adam_form,
        )
    if not learning_rate >= 0:
        raise ValueError(f"the server's learning_rate is {learning_rate} and must not be negative")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum is {momentum} and must lie in 0 <= momentum < 1")
    return torch.optim.SGD(params, lr=learning_rate, momentum=momentum)


def server_learning_rate(
    round: int,
    *,
    schedule: Schedule,
    learning_rate: float,
    final_learning_rate: float,
    warmup_rounds: int,
    num_rounds: int,
) -> float:
    """The server's learning rate in round 0, 1, ...; a pure function, so a resumed run needs no scheduler.

    "constant" (the paper): ``learning_rate``. "warmup_linear" (pfl-research's benchmark: 30 warm-up rounds,
    0.1 to 0.02): from 0 in round 0 straight up to ``learning_rate`` in round ``warmup_rounds``, then straight
    down to ``final_learning_rate`` in round ``num_rounds`` and after it.
    """
    assert round >= 0
    if schedule == "constant":
        return learning_rate
    if schedule != "warmup_linear":
        raise ValueError(f"schedule must be one of {', '.join(get_args(Schedule))}, not {schedule!r}")
    if not 0 <= warmup_rounds < num_rounds:
        raise ValueError(
            f"warmup_rounds is {warmup_rounds} and must be at least 0 and less than the {num_rounds} rounds "
            "of the run; lower it, or use schedule: constant"
        )
    if round < warmup_rounds:
        return learning_rate * round / warmup_rounds
    left = max(0.0, 1 - (round - warmup_rounds) / (num_rounds - warmup_rounds))
    return final_learning_rate + (learning_rate - final_learning_rate) * left
