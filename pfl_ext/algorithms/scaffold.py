"""SCAFFOLD: control variates that correct the drift of users' local steps
(Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", Algorithm 1,
arXiv 1910.06378).

The server has a control variate c, and every user i has a control variate c_i. All are 0 at first. A user
starts at the server's x and makes K steps ``y <- y - lr (g_i(y) - c_i + c)``. Its new control variate is

* option I: ``c_i+ = g_i(x)``, the gradient at x over the user's images of this round. It costs one more pass.
* option II: ``c_i+ = c_i - c + (x - y) / (K lr)``, the mean of the gradients of its steps.

It sends ``y - x`` and ``c_i+ - c_i``. The server's optimiser steps on the weighted mean of the first over the
cohort S, and ``c <- c + sum_S w_i (c_i+ - c_i) / sum_all w_i``. Where all users have the same weight, this is
the paper's ``|S| / N`` times the mean. So c is always the weighted mean of all c_i. With the correction in
the gradient, or without momentum, the optimum of ``sum_i w_i f_i / sum_i w_i`` is a fixed point of training,
for weights by images and for equal weights.

If local training is more than plain SGD, there are two places for the correction ``c - c_i``:

* "gradient", the paper's equation: it is added to the loss's gradient, before clipping, weight decay and
  momentum. With momentum a gradient counts in several steps, so option II divides by ``|a|_1``, the total
  weight of the K gradients (`pfl_ext.algorithms.fednova`), instead of K.
* "step", as in NIID-Bench (Li et al. 2022, arXiv 2102.02079): ``y <- y - lr (c - c_i)`` after every step of
  the optimiser. Option II divides by K. With momentum rho this makes c_i about ``1 / (1 - rho)`` gradients,
  for a correction that momentum does not amplify. That is only about right, since momentum starts at 0 in
  each round: training ends near the optimum, not at it. Option I's c_i is one gradient, which is
  ``1 - rho`` times what is needed, so it is refused with this correction and momentum.

The SCAFFOLD of pfl 0.6.0 is wrong: it keeps minus the gradient as c_i but still adds ``c - c_i`` to the
gradient, so drift is doubled. With its option I all users share one buffer for c_i.

With slow or unreliable devices (`pfl_ext.devices.turnout`) S is the users who report, all other c_i stay
unchanged, and K is the number of steps that a user made. Option I is refused there.

Private training is refused: c_i outlives the round, and with it what c_i discloses about the user.

Letters: P parameters that are trained, U users.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pfl.context import CentralContext
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import Setup, Traffic, register
from pfl_ext.algorithms.controls import Controls, WithControls, only_weighted
from pfl_ext.algorithms.fednova import coefficient_sum
from pfl_ext.algorithms.on_pfl import local_steps
from pfl_ext.configs import STRICT
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.rules import Correction as Correction
from pfl_ext.rules import Refusals, Rule

CHANGE = "pfl_ext.algorithms.scaffold/"
"""Prefix of a variable's name in the key of ``c_i+ - c_i`` in a user's statistics."""
Option = Literal["I", "II"]
CONTROLS = "control_variates.f32"
"""Name of the file with the users' c_i, beside a run's checkpoints."""

ONLY_WEIGHTED = (
    "users of SCAFFOLD also send control variates, which are not protected by privacy and not changed "
    "by postprocessors"
)


@checked_dataclass(frozen=True, config=STRICT)
class ScaffoldOptions:
    """The options of SCAFFOLD (Karimireddy et al. 2020).

    Option I makes one more pass over a user's images. The correction after the step, on which momentum and
    clipping do not act, is NIID-Bench's. A run whose users need more disk than `max_state_gb` is refused;
    old copies that the last two checkpoints still need are not counted.
    """

    scaffold_option: Option | None = None
    """A user's new control variate: I, its gradient at the server model; II, that of its steps; none: II."""
    scaffold_correction: Correction | None = None
    """Place of the correction: in the gradient, before clipping, or after the step; none: gradient."""
    max_state_gb: PositiveFloat = 16.0
    """Most disk space, in GB, for the c_i, each as large as a model, of all users that have taken part."""


def sent(controls: Controls, vector: Tensor) -> dict[str, Tensor]:
    """The parts of a vector ``[P]`` of changes, by their keys in pfl's statistics."""
    return {CHANGE + name: part for name, part in controls.named(vector).items()}


@dataclass(frozen=True)
class Renewal:
    """Computes the new c_i from a round's local training."""

    option: Option
    correction: Correction
    learning_rate: float | Tensor
    """A tensor ``[P]`` has a rate for each parameter."""
    momentum: float

    def change(
        self, server: Tensor, control: Tensor, update: Tensor, num_steps: int, gradient: Tensor | None
    ) -> Tensor:
        """``c_i+ - c_i``, given c, c_i, ``y - x`` and option I's ``g_i(x)``, all ``[P]``; 0 without steps."""
        if num_steps == 0:
            return torch.zeros_like(control)
        if self.option == "I":
            assert gradient is not None
            return gradient - control
        counted = float(num_steps)
        if self.correction == "gradient":
            counted = coefficient_sum(num_steps, self.momentum)
        return update / (-counted * self.learning_rate) - server


class CorrectedUser:
    """One user's part of a round: its correction, and its new control variate at the end."""

    def __init__(self, controls: Controls, form: Renewal, user: int | None) -> None:
        self._controls, self._form, self._user = controls, form, user
        self._control = controls.control(user)

    @property
    def correction(self) -> Mapping[str, Tensor]:
        """``c - c_i`` by variable."""
        return self._controls.named(self._controls.server - self._control)

    def finish(
        self, update: Mapping[str, Tensor], num_steps: int, gradient: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """Store c_i+, and return ``c_i+ - c_i``, which the user sends besides its update."""
        controls = self._controls
        whole = None if gradient is None else controls.flat(gradient)
        change = self._form.change(controls.server, self._control, controls.flat(update), num_steps, whole)
        controls.renew(self._user, self._control, change)
        return sent(controls, change)


class CorrectedRule(Rule):
    """Local SGD with SCAFFOLD's correction, for a round."""

    corrects_all = False  # c and c_i hold gradients, with weight decay

    def __init__(self, controls: Controls, form: Renewal) -> None:
        self._controls, self._form = controls, form
        self.correction, self.whole_gradient = form.correction, form.option == "I"

    def user(self, user_id: str | None) -> CorrectedUser:
        """One user's part of a round."""
        return CorrectedUser(self._controls, self._form, self._controls.number(user_id))

    def zeros(self) -> dict[str, Tensor]:
        """Zeros for the changes of control variates, by their keys in pfl's statistics."""
        return sent(self._controls, torch.zeros_like(self._controls.server))


@register("scaffold")
class Scaffold(WithControls):
    """SCAFFOLD on pfl's loop."""

    options = ScaffoldOptions
    title, state_key = "SCAFFOLD", "federated.max_state_gb"
    files = (CONTROLS,)
    refusals: ClassVar[Refusals] = only_weighted("SCAFFOLD", ONLY_WEIGHTED)
    takes: ClassVar[tuple[str, ...]] = ("devices",)

    @classmethod
    def resolved(cls, options: ScaffoldOptions) -> dict[str, Any]:
        """The defaults of `option` and of the place of the correction."""
        return {
            "scaffold_option": options.scaffold_option or "II",
            "scaffold_correction": options.scaffold_correction or "gradient",
        }

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse users' states that need more disk than allowed, other steps than those of SGD, and option I
        with a virtual clock, or with momentum that does not act on the correction.
        """
        if not setup.is_sgd:
            raise ValueError(
                "SCAFFOLD's control variates are gradients, which it computes from steps of sgd: set "
                "local.optimizer to sgd"
            )
        if setup.devices is not None and setup.options.scaffold_option == "I":
            raise ValueError(
                "SCAFFOLD's option I needs one more pass over the images, which simulated devices do "
                "not have: set federated.scaffold_option to II, or devices to none"
            )
        chosen = cls.resolved(setup.options)
        forms = chosen["scaffold_option"], chosen["scaffold_correction"]
        if forms == ("I", "step") and setup.momentum:
            raise ValueError(
                "SCAFFOLD's option I corrects by one gradient, too little for steps with momentum if "
                "federated.scaffold_correction is step: set federated.scaffold_option to II, "
                "federated.scaffold_correction to gradient, or local.momentum to 0"
            )
        super().check(setup)

    @classmethod
    def traffic(cls, module: ImageClassifier) -> Traffic:
        """The model and c go down; the update and ``c_i+ - c_i`` go up."""
        down, up = super().traffic(module)
        return Traffic(2 * down, 2 * up)

    def rule(self, model: PyTorchModel, context: CentralContext) -> CorrectedRule:
        """Local SGD with the correction.

        Raises:
            ValueError: when the local optimiser is not SGD with momentum.
        """
        steps, chosen = local_steps(model, context, "SCAFFOLD"), self.resolved(self.setup.options)
        self.check_steps(model, context)
        rate = self.controls.rates(steps.rate, steps.factors)
        form = Renewal(chosen["scaffold_option"], chosen["scaffold_correction"], rate, steps.momentum)
        return CorrectedRule(self.controls, form)

    def average(self, statistics: MappedVectorStatistics, context: CentralContext) -> None:
        """Add the cohort's weighted change, over the weight of all users, to c; average the updates."""
        share = float(statistics.weight) / self.total_weight
        statistics.average()
        keys = [key for key in statistics if key.startswith(CHANGE)]
        changes = {key.removeprefix(CHANGE): statistics.pop(key)[0] for key in keys}
        self.controls.end_round(share * self.controls.flat(changes).float())
