"""SCAFFOLD: control variates that correct the drift of users' local steps
(Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", Algorithm 1,
arXiv 1910.06378).

The server has a control variate c, and every user i has a control variate c_i. All are 0 at first. A user
starts at the server's x and makes K steps ``y <- y - lr (g_i(y) - c_i + c)``. Its new control variate is

* option I: ``c_i+ = g_i(x)``, the gradient at x over the user's images of this round. It costs one more pass.
* option II: ``c_i+ = c_i - c + (x - y) / (K lr)``, the mean of the gradients of its steps.

It sends ``y - x`` and ``c_i+ - c_i``. The server's optimiser steps on the weighted mean of the first over the
cohort S, and ``c <- c + sum_S w_i (c_i+ - c_i) / sum_all w_i``. Where all users have the same weight, this is
the paper's ``|S| / N`` times the mean. So c is always the weighted mean of all c_i, and the optimum of
``sum_i w_i f_i / sum_i w_i`` is a fixed point of training, for weights by images and for equal weights.

If local training is more than plain SGD, there are two places for the correction ``c - c_i``:

* "gradient", the paper's equation: it is added to the loss's gradient, before clipping, weight decay and
  momentum. With momentum a gradient counts in several steps, so option II divides by ``|a|_1``, the total
  weight of the K gradients (`pfl_ext.algorithms.fednova`), instead of K.
* "step", as in NIID-Bench (Li et al. 2022, arXiv 2102.02079): ``y <- y - lr (c - c_i)`` after every step of
  the optimiser. Option II divides by K. With momentum rho this makes c_i about ``1 / (1 - rho)`` gradients,
  which is right for a correction that momentum does not amplify.

The SCAFFOLD of pfl 0.6.0 is wrong: it keeps minus the gradient as c_i but still adds ``c - c_i`` to the
gradient, so drift is doubled. With its option I all users share one buffer for c_i.

With slow or unreliable devices (`pfl_ext.devices.turnout`) S is the users who report, all other c_i stay
unchanged, and K is the number of steps that a user made. Option I is refused there.

Private training is refused: c_i outlives the round, and with it what c_i discloses about the user.

Letters: P parameters that are trained, U users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pfl.algorithm.base import NNAlgorithmParams
from pfl.context import CentralContext
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass as checked_dataclass
from torch import Tensor, nn

from pfl_ext.algorithms.algorithm import Setup, Traffic, register
from pfl_ext.algorithms.fednova import coefficient_sum
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.algorithms.on_pfl import OnPfl, local_steps
from pfl_ext.algorithms.user_vectors import UserVectors
from pfl_ext.configs import STRICT
from pfl_ext.rules import Correction as Correction
from pfl_ext.rules import Refusals, Rule

CHANGE = "pfl_ext.algorithms.scaffold/"
"""Prefix of a variable's name in the key of ``c_i+ - c_i`` in a user's statistics."""
Option = Literal["I", "II"]
CONTROLS = "control_variates.f32"
"""Name of the file with the users' c_i, beside a run's checkpoints."""

ONLY_WEIGHTED = (
    "SCAFFOLD's users send control variates besides their updates, for which no privacy and no other "
    "postprocessor but a weighting is made: choose algorithm fedavg or fedprox"
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
    """Most disk, in GB, for the c_i, each of the size of a model, of all users that have taken part."""


@dataclass(frozen=True)
class ScaffoldParams(NNAlgorithmParams):
    """pfl's parameters and SCAFFOLD's own.

    ``total_weight`` is the sum of the weights of all users of the run; U where every user has the weight 1.
    ``option`` and ``correction``: see the module.
    """

    total_weight: float
    option: Option = "II"
    correction: Correction = "gradient"


class Controls(FlatVariables):
    """c and every c_i, as vectors ``[P]`` in the order of the model's trained parameters.

    Args:
        module: the model, whose parameters are not changed here.
        user_ids: the ids of the U users, as in their data sets.
        path: the file of the users' vectors (`UserVectors`); None: a temporary file.
    """

    def __init__(self, module: nn.Module, user_ids: Sequence[str], path: Path | None = None) -> None:
        super().__init__(module, [name for name, p in module.named_parameters() if p.requires_grad])
        self.server = torch.zeros(self.length, device=self.device)
        self._numbers = {user: number for number, user in enumerate(user_ids)}
        self._users = UserVectors(len(user_ids), len(self.server), path)

    def number(self, user_id: str | None) -> int:
        """The number of the user with this id, 0 to U - 1."""
        assert user_id is not None, "SCAFFOLD needs data sets with a user_id"
        return self._numbers[user_id]

    def control(self, user: int) -> Tensor:
        """A user's c_i ``[P]`` at the start of the round."""
        found = self._users.read(user)
        if found is None:
            return torch.zeros_like(self.server)
        return torch.tensor(found, device=self.server.device)

    def correction(self, control: Tensor) -> dict[str, Tensor]:
        """``c - c_i`` by variable."""
        return self.named(self.server - control)

    def sent(self, vector: Tensor) -> dict[str, Tensor]:
        """The parts of a vector ``[P]`` of changes, by their keys in pfl's statistics."""
        return {CHANGE + name: part for name, part in self.named(vector).items()}

    def rates(self, rate: float, factors: Sequence[float]) -> float | Tensor:
        """A learning rate times each variable's factor, ``[P]``; the rate itself without factors."""
        if not factors:
            return rate
        sizes = torch.tensor(self.sizes)
        return (rate * torch.tensor(factors)).repeat_interleave(sizes).to(self.server.device)

    def renew(self, user: int, control: Tensor, change: Tensor) -> None:
        """Store ``c_i + change``, which is the user's c_i from the next round on."""
        self._users.write(user, (control + change).cpu().numpy())

    def end_round(self, change: Tensor) -> None:
        """Add ``change`` ``[P]`` to c, and make the users' new c_i current."""
        self.server += change
        self._users.end_round()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint; the users' vectors stay in their file."""
        return {"c": self.server, **self._users.tensors()}

    def saved(self) -> None:
        """Is called once the checkpoint with the last `tensors` has its final name."""
        self._users.saved()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint's `tensors`. Raises ValueError as `UserVectors.load` does."""
        self._users.load(tensors)
        self.server.copy_(tensors["c"])


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

    def __init__(self, controls: Controls, form: Renewal, user: int) -> None:
        self._controls, self._form, self._user = controls, form, user
        self._own = controls.control(user)

    @property
    def correction(self) -> Mapping[str, Tensor]:
        """``c - c_i`` by variable."""
        return self._controls.correction(self._own)

    def finish(
        self, update: Mapping[str, Tensor], num_steps: int, gradient: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """Store c_i+, and return ``c_i+ - c_i``, which the user sends besides its update."""
        controls = self._controls
        whole = None if gradient is None else controls.flat(gradient)
        change = self._form.change(controls.server, self._own, controls.flat(update), num_steps, whole)
        controls.renew(self._user, self._own, change)
        return controls.sent(change)


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
        return self._controls.sent(torch.zeros_like(self._controls.server))


@register("scaffold")
class Scaffold(OnPfl):
    """SCAFFOLD on pfl's loop, with parameters `ScaffoldParams`."""

    options = ScaffoldOptions
    tunes_engine = False  # what it keeps of a user changes whenever that user trains
    files = (CONTROLS,)
    refusals: ClassVar[Refusals] = {
        "workers": "scaffold's state of each user lies in one process: start it without a launcher, NP=1",
        "privacy": ONLY_WEIGHTED,
        "postprocessors": ONLY_WEIGHTED,
        "replacement": "SCAFFOLD keeps one control variate for each user, who must come once in a cohort: "
        "draw cohorts without replacement, set federated.replacement to false",
        "proportional": "SCAFFOLD's mean control variate is of users drawn alike: set federated.sampling "
        "to uniform",
    }
    takes: ClassVar[tuple[str, ...]] = ("devices",)

    def __init__(self, controls: Controls) -> None:
        super().__init__()
        self.controls = self.user_state = controls

    @classmethod
    def resolved(cls, options: ScaffoldOptions) -> dict[str, Any]:
        """The defaults of `option` and of the place of the correction."""
        return {
            "scaffold_option": options.scaffold_option or "II",
            "scaffold_correction": options.scaffold_correction or "gradient",
        }

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse users' states that need more disk than allowed, and option I with a virtual clock.

        Raises:
            ValueError: one line with the reason.
        """
        if setup.devices is not None and setup.options.scaffold_option == "I":
            raise ValueError(
                "SCAFFOLD's option I takes one more pass, which devices have no time for: set "
                "federated.scaffold_option to II, or devices to none"
            )
        state, most = cls.state_bytes(setup) / 1e9, setup.options.max_state_gb
        if state > most:
            raise ValueError(
                f"SCAFFOLD keeps a copy of the model for each of {setup.touched:,} users, {state:,.1f} GB, "
                f"above federated.max_state_gb = {most:g}: raise it, or choose fedavg or fedprox"
            )

    @classmethod
    def state_bytes(cls, setup: Setup) -> int:
        """See `Choice.state_bytes`."""
        return setup.touched * sum(p.numel() for p in setup.module.parameters() if p.requires_grad) * 4

    @classmethod
    def build(cls, setup: Setup, **common: Any) -> tuple[OnPfl, NNAlgorithmParams]:
        """The algorithm, with its file in the checkpoints' folder, and its parameters."""
        users, chosen = setup.users, cls.resolved(setup.options)
        path = None if setup.folder is None else setup.folder / CONTROLS
        params = ScaffoldParams(
            **common,
            total_weight=users.total_images if setup.by_images else users.num_users,
            option=chosen["scaffold_option"],
            correction=chosen["scaffold_correction"],
        )
        return cls(Controls(setup.module, users.partition.user_ids, path)), params

    def bytes(self, model: PyTorchModel) -> Traffic:
        """The model and c go down; the update and ``c_i+ - c_i`` go up."""
        down, up = super().bytes(model)
        return Traffic(2 * down, 2 * up)

    def rule(self, model: PyTorchModel, context: CentralContext) -> CorrectedRule:
        """Local SGD with the correction.

        Raises:
            ValueError: when the local optimiser is not SGD with momentum.
        """
        local, params = context.model_train_params, context.algorithm_params
        steps = local_steps(model, context, "SCAFFOLD")
        other_steps = local.grad_accumulation_steps != 1 or local.get("local_num_steps")
        if model.grad_scaler is not None or other_steps:
            raise ValueError(
                "SCAFFOLD has no gradient scaling, accumulation or local_num_steps: leave them out"
            )
        rate = self.controls.rates(steps.rate, steps.factors)
        return CorrectedRule(self.controls, Renewal(params.option, params.correction, rate, steps.momentum))

    def average(self, statistics: MappedVectorStatistics, context: CentralContext) -> None:
        """Add the cohort's weighted change, over the weight of all users, to c; average the updates."""
        share = float(statistics.weight) / context.algorithm_params.total_weight
        statistics.average()
        keys = [key for key in statistics if key.startswith(CHANGE)]
        changes = {key.removeprefix(CHANGE): statistics.pop(key)[0] for key in keys}
        self.controls.end_round(share * self.controls.flat(changes).float())
