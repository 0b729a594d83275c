"""What a user does with its batches: SGD steps, clipped or not, near the central model or not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from pfl.context import CentralContext
from pfl.hyperparam.base import get_param_value
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from pfl_ext.algorithms.optimizers import PerVariableClippedSGD, clip_each
from pfl_ext.algorithms.rules import Correction, Rule
from pfl_ext.data.transfer import pinned
from pfl_ext.tasks.task import Task

LocalClipping = Literal["none", "variable", "global"]


@dataclass(frozen=True)
class LocalTraining:
    """Local SGD as the engine knows it.

    ``clipping``: of a step's gradient; "variable": each variable's norm is at most ``max_norm`` (Keras'
    clipnorm), "global": that of all together (torch's clip_grad_norm_, pfl's). ``mu``:
    the weight of ``|w - w_central|^2 / 2`` in the loss. ``amp``: type of autocast, or None.
    ``momentum`` and ``weight_decay`` are ``torch.optim.SGD``'s: after clipping ``g <- g + weight_decay w``,
    ``v <- momentum v + g``, ``w <- w - lr v``, with v from 0 for each user. ``correction``: where each
    user's is added, if there are any (`pfl_ext.algorithms.rules`).
    """

    learning_rate: float
    num_epochs: int
    batch_size: int
    clipping: LocalClipping
    max_norm: float
    mu: float
    amp: torch.dtype | None
    momentum: float = 0.0
    weight_decay: float = 0.0
    correction: Correction | None = None

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """The precision that forward runs in."""
        if self.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.amp, cache_enabled=False)


def local_training(rule: Rule, model: PyTorchModel, context: CentralContext) -> LocalTraining | str:
    """What the engine has to do in this round; or why it cannot, in a few words."""
    params = context.model_train_params
    optimizer = model.new_local_optimizer(learning_rate=params.local_learning_rate)
    if type(optimizer) not in (torch.optim.SGD, PerVariableClippedSGD):
        return f"local optimiser {type(optimizer).__name__}"
    group = optimizer.param_groups[0]
    if any(group[key] for key in ("nesterov", "maximize", "dampening")):
        return "SGD with Nesterov's momentum, dampening or ascent"
    if model.grad_scaler is not None or params.grad_accumulation_steps != 1 or params.get("local_num_steps"):
        return "gradient scaling, accumulation or a number of local steps"
    clipping: LocalClipping = "none"
    max_norm = 0.0
    if isinstance(optimizer, PerVariableClippedSGD):
        clipping, max_norm = "variable", optimizer.max_norm
        if params.local_max_grad_norm is not None:
            return "two kinds of local clipping at once"
    elif params.local_max_grad_norm is not None:
        clipping, max_norm = "global", float(params.local_max_grad_norm)
    amp = model.amp_context.fast_dtype if model.amp_context is not None else None
    return LocalTraining(
        float(get_param_value(params.local_learning_rate)),
        params.get("local_num_epochs") or 1,
        params.get("local_batch_size"),
        clipping,
        max_norm,
        rule.proximal_weight,
        amp,
        float(group["momentum"]),
        float(group["weight_decay"]),
        rule.correction,
    )


def clip_gradients(gradients: list[Tensor], local: LocalTraining) -> None:
    """In place; as torch's ``clip_grad_norm_`` where global."""
    if local.clipping == "variable":
        clip_each(gradients, local.max_norm)
    elif local.clipping == "global":
        norm = torch.linalg.vector_norm(torch.stack(list(torch._foreach_norm(gradients))))
        torch._foreach_mul_(gradients, (local.max_norm / (norm + 1e-6)).clamp(max=1.0))


class Batch(NamedTuple):
    """The B images of one step."""

    images: Tensor  # uint8 [B, H, W, 3]
    targets: Tensor  # [B, ...], settled
    crops: Tensor  # [B, 6]
    shares: Tensor  # [B], of the loss


def settled(batches: Iterable[Any], task: Task, device: torch.device) -> Iterator[Batch]:
    """A user's batches, of images, targets and crops, on the CPU, ready for the device to fetch."""
    for images, targets, crops in batches:
        targets, shares = task.settled(targets)
        yield Batch(*(pinned(t, device) for t in (images, targets, crops, shares)))
