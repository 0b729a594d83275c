"""Local SGD of one user: its config, its form as the engine computes it, and its batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from pfl.context import CentralContext
from pfl.hyperparam.base import get_param_value
from pfl.model.pytorch import PyTorchModel
from pydantic import NonNegativeFloat, PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor
from torch.optim.optimizer import ParamsT

from pfl_ext.configs import STRICT, Fraction
from pfl_ext.data.transfer import pinned
from pfl_ext.models.classifier import RATE_FACTOR
from pfl_ext.rules import Correction, Rule
from pfl_ext.schedules import DecayConfig, LayerDecayConfig
from pfl_ext.tasks.task import Task

LocalClipping = Literal["none", "variable", "global"]


@checked_dataclass(frozen=True, config=STRICT)
class LocalSGDConfig(LayerDecayConfig, DecayConfig):
    """Gradient descent on one user's images."""

    learning_rate: PositiveFloat = 0.1
    """Learning rate of a user's steps, without unit."""
    head_rate_factor: PositiveFloat = 1.0
    """Learning rate of the head (last layer, bottleneck, decoder) divided by that of the other layers."""
    max_grad_norm: PositiveFloat | None = None
    """Gradients with a larger L2 norm are scaled down to this norm; none: no limit."""
    clip_by: Literal["variable", "global"] = "global"
    """Whether `max_grad_norm` limits the gradient of each variable, or of all variables together."""
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    """Optimiser of a user's steps. It begins in every round without anything kept from earlier rounds."""
    momentum: Fraction = 0.0
    """Share of the last step's direction that a step of sgd keeps."""
    beta1: Fraction = 0.9
    """Decay of the mean gradient (adam, adamw)."""
    beta2: Fraction = 0.999
    """Decay of the mean squared gradient (adam, adamw)."""
    epsilon: PositiveFloat = 1e-8
    """Constant added to the root of the mean squared gradient (adam, adamw)."""
    weight_decay: NonNegativeFloat = 0.0
    """Multiple of the parameters added to their clipped gradient; with adamw, to the step itself."""

    def new_optimizer(self, params: ParamsT, lr: float) -> torch.optim.Optimizer:
        """A new optimiser with this learning rate. The caller clips by the norm of all gradients together.

        The groups of ``params`` already contain `head_rate_factor` and `layer_decay`, see
        `ImageClassifier.rate_groups`.
        """
        kind: Any = torch.optim.SGD
        more: dict[str, Any] = {"momentum": self.momentum}
        if self.optimizer != "sgd":
            betas, decoupled = (self.beta1, self.beta2), self.optimizer == "adamw"
            kind = torch.optim.Adam
            more = {"betas": betas, "eps": self.epsilon, "decoupled_weight_decay": decoupled}
        if self.max_grad_norm is not None and self.clip_by == "variable":
            kind, more = CLIPPED[kind], more | {"max_norm": self.max_grad_norm, "foreach": True}
        return kind(params, lr=lr, weight_decay=self.weight_decay, **more)  # type: ignore[no-any-return]

    @property
    def global_max_grad_norm(self) -> float | None:
        """The norm to which all gradients together are clipped; None if they are not."""
        return self.max_grad_norm if self.clip_by == "global" else None


class _ClipsEach(torch.optim.Optimizer):
    """Scales each variable's gradient down to an L2 norm of at most ``max_norm`` before a step.

    It clips like Keras' ``clipnorm``, each variable by itself, while pfl's ``local_max_grad_norm`` bounds the
    norm of all gradients together. Gradients are scaled in place, and no norm is read back from the device.
    Weight decay is added after clipping.
    """

    def __init__(self, params: ParamsT, *, max_norm: float, **more: Any) -> None:
        super().__init__(params, **more)
        self.max_norm = max_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Clip, then make the optimiser's step. Closures are not supported."""
        assert closure is None
        for group in self.param_groups:
            clip_each([p.grad for p in group["params"] if p.grad is not None], self.max_norm)
        return super().step()


class PerVariableClippedSGD(_ClipsEach, torch.optim.SGD):
    """SGD that first clips each variable's gradient."""


class PerVariableClippedAdam(_ClipsEach, torch.optim.Adam):
    """Adam or AdamW that first clips each variable's gradient."""


CLIPPED: dict[type[torch.optim.Optimizer], type[_ClipsEach]] = {
    torch.optim.SGD: PerVariableClippedSGD,
    torch.optim.Adam: PerVariableClippedAdam,
}
"""The optimisers that the engine knows, and each as it first clips each variable's gradient."""


def clip_each(gradients: list[Tensor], max_norm: float) -> None:
    """Scale every gradient whose L2 norm exceeds ``max_norm`` down to it, in place, without a sync.

    On a CPU, where reading a norm costs nothing, gradients that need no scaling are not written.
    """
    if not gradients:
        return
    norms = torch.stack(list(torch._foreach_norm(gradients)))
    if norms.device.type == "cpu":
        gradients = [g for g, norm in zip(gradients, norms.tolist()) if not norm <= max_norm]
        norms = norms[~(norms <= max_norm)]
    if gradients:
        torch._foreach_mul_(gradients, list((max_norm / norms.clamp(min=max_norm)).unbind()))


class Adaptive(NamedTuple):
    """Adam's constants, which replace momentum, and whether weight decay is added to the step (AdamW)."""

    beta1: float
    beta2: float
    epsilon: float
    decoupled: bool


@dataclass(frozen=True)
class LocalTraining:
    """Local training in the form that the engine computes.

    ``clipping`` of a step's gradient: "variable" limits each variable's norm to ``max_norm`` (Keras'
    clipnorm), "global" that of all together (torch's clip_grad_norm_, pfl's). ``mu`` is the weight of
    ``|w - w_central|^2 / 2`` in the loss. ``amp`` is the type of autocast, or None. ``momentum`` and
    ``weight_decay`` are those of ``torch.optim.SGD``: after clipping ``g <- g + weight_decay w``,
    ``v <- momentum v + g``, ``w <- w - lr factor v``, with v starting at 0 for each user. With ``adaptive``
    steps are those of ``torch.optim.Adam``. ``factors`` has one factor for each variable (empty: all 1).
    ``correction`` says where a user's correction is added, if there is one, and ``corrects_all`` whether it
    changes all weights (`pfl_ext.rules`). ``rate_varies``: whether learning rates differ between rounds.
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
    corrects_all: bool = False
    factors: tuple[float, ...] = ()
    rate_varies: bool = False
    adaptive: Adaptive | None = None

    @property
    def form(self) -> LocalTraining:
        """This training with the rate left out where it varies, so that it is the same in every round."""
        return replace(self, learning_rate=1.0) if self.rate_varies else self

    @property
    def moves_all(self) -> bool:
        """Whether steps also change weights on which no image has an effect."""
        return self.weight_decay > 0 or self.corrects_all

    def each_factor(self, num_variables: int) -> Sequence[float]:
        """`factors`, also where all are 1."""
        return self.factors or (1.0,) * num_variables

    @property
    def is_plain(self) -> bool:
        """Whether a step is gradient descent and nothing else."""
        more = self.mu or self.momentum or self.weight_decay or self.correction or self.factors
        return not more and self.clipping == "none" and self.adaptive is None

    def autocast(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """A context in which forward runs in this precision."""
        if self.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(device.type, self.amp, cache_enabled=False)


def rate_factors(model: PyTorchModel, optimizer: torch.optim.Optimizer) -> tuple[float, ...]:
    """Each trained variable's learning rate over that of the first layers; empty where all are the same."""
    found = {
        id(parameter): group[RATE_FACTOR]
        for group in optimizer.param_groups
        if RATE_FACTOR in group
        for parameter in group["params"]
    }
    return tuple(found.get(id(p), 1.0) for p in model.variable_map.values()) if found else ()


def local_training(rule: Rule, model: PyTorchModel, context: CentralContext) -> LocalTraining | str:
    """The local training of this round, or a few words that say why the engine cannot do it."""
    params = context.model_train_params
    optimizer = model.new_local_optimizer(learning_rate=params.local_learning_rate)
    if type(optimizer) not in (*CLIPPED, *CLIPPED.values()):
        return f"local optimiser {type(optimizer).__name__}"
    group, adaptive = optimizer.param_groups[0], None
    if any(group.get(key) for key in ("nesterov", "maximize", "dampening", "amsgrad")):
        return "a local optimiser with Nesterov's momentum, dampening, ascent or AMSGrad"
    if isinstance(optimizer, torch.optim.Adam):
        beta1, beta2 = map(float, group["betas"])
        adaptive = Adaptive(beta1, beta2, float(group["eps"]), bool(group["decoupled_weight_decay"]))
    if model.grad_scaler is not None or params.grad_accumulation_steps != 1 or params.get("local_num_steps"):
        return "gradient scaling, accumulation or a number of local steps"
    clipping: LocalClipping = "none"
    max_norm = 0.0
    if isinstance(optimizer, _ClipsEach):
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
        float(group.get("momentum", 0.0)),
        float(group["weight_decay"]),
        rule.correction,
        rule.correction is not None and rule.corrects_all,
        rate_factors(model, optimizer),
        adaptive=adaptive,
    )


def clip_gradients(gradients: list[Tensor], local: LocalTraining) -> None:
    """Clip in place. Global clipping is that of torch's ``clip_grad_norm_``."""
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

    def on(self, device: torch.device) -> Batch:
        """The batch on a device, without waiting for its copy."""
        return Batch(*(t.to(device, non_blocking=True) for t in self))


def joined(batches: Sequence[Batch]) -> tuple[Batch, list[int]]:
    """The batches of several users as one batch, and their sizes."""
    if len(batches) == 1:
        return batches[0], [len(batches[0].images)]
    return Batch(*(torch.cat(parts) for parts in zip(*batches))), [len(batch.images) for batch in batches]


def settled(batches: Iterable[Any], task: Task, device: torch.device) -> Iterator[Batch]:
    """A user's batches of images, targets and crops on the CPU, ready to be copied to ``device``."""
    for images, targets, crops in batches:
        targets, shares = task.settled(targets)
        yield Batch(*(pinned(t, device) for t in (images, targets, crops, shares)))
