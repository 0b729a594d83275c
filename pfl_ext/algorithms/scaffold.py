"""SCAFFOLD: control variates that take out the drift of users' local steps
(Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", Algorithm 1,
arXiv 1910.06378).

The server has a control variate c and every user i one of its own c_i, all 0 at first. A user starts at the
server's x and makes K steps ``y <- y - lr (g_i(y) - c_i + c)``. Its new control variate is

* option I: ``c_i+ = g_i(x)``, the gradient at x of all its images that take part, which costs one more pass;
* option II: ``c_i+ = c_i - c + (x - y) / (K lr)``, the mean of the gradients of its steps.

It sends ``y - x`` and ``c_i+ - c_i``. The server's optimiser steps on the weighted mean of the first over the
cohort S, and ``c <- c + sum_S w_i (c_i+ - c_i) / sum_all w_i``: the paper's ``|S| / N`` times the mean where
every user has the same weight. So c is the weighted mean of all c_i at any time, and the optimum of
``sum_i w_i f_i / sum_i w_i`` is where training rests, with weights by images as with weights by users.

Where the correction ``c - c_i`` goes is a choice once local training is more than plain SGD:

* "gradient", the paper's equation: it is added to the loss's gradient, so that clipping, weight decay and
  momentum come after it. Momentum lets a gradient count for more than one step; option II then divides by
  ``|a|_1``, the sum of what the K gradients count for (`pfl_ext.algorithms.fednova`), instead of K.
* "step", as in NIID-Bench (Li et al. 2022, arXiv 2102.02079): ``y <- y - lr (c - c_i)`` after every step of
  the optimiser. Option II divides by K: under momentum rho c_i is about ``1 / (1 - rho)`` gradients, as a
  correction that no momentum magnifies has to be.

pfl 0.6.0 has a SCAFFOLD too, which is wrong: it keeps minus the gradient as c_i and adds ``c - c_i`` to the
gradient all the same, so that drift is doubled. Its option I also gives all users one buffer as their c_i.

Of slow or unreliable devices (`pfl_ext.devices.turnout`) S is who reports: c_i of all others stays as it is,
and K is what a user has made of its steps. Option I is refused there.

Not for private training: c_i outlives the round, and so would what it tells of the user.

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
from pfl_ext.algorithms.on_pfl import OnPfl, local_steps
from pfl_ext.algorithms.user_vectors import UserVectors
from pfl_ext.configs import STRICT
from pfl_ext.rules import Correction as Correction
from pfl_ext.rules import Refusals, Rule

CHANGE = "pfl_ext.algorithms.scaffold/"
"""Before the name of a variable: the key of ``c_i+ - c_i`` in a user's statistics."""
Option = Literal["I", "II"]
CONTROLS = "control_variates.f32"
"""The file of the users' states, beside a run's checkpoints."""

ONLY_WEIGHTED = (
    "SCAFFOLD's users send control variates besides their updates, for which no privacy and no other "
    "postprocessor but a weighting is made: choose algorithm fedavg or fedprox"
)


@checked_dataclass(frozen=True, config=STRICT)
class ScaffoldOptions:
    """The options of SCAFFOLD (Karimireddy et al. 2020).

    Option I takes one more pass over a user's images. The correction after the step, which momentum and
    clipping do not see, is NIID-Bench's. A run whose users need more disk than `max_state_gb` is refused;
    copies that the last two checkpoints name are kept besides.
    """

    scaffold_option: Option | None = None
    """A user's new control variate: I, its gradient at the server's model; II, of its steps; none: II."""
    scaffold_correction: Correction | None = None
    """Place of SCAFFOLD's correction: in the gradient, before clipping, or after the step; none: gradient."""
    max_state_gb: PositiveFloat = 16.0
    """Most disk, in GB, for SCAFFOLD's copy of the model for every user that has taken part."""


@dataclass(frozen=True)
class ScaffoldParams(NNAlgorithmParams):
    """pfl's parameters and SCAFFOLD's own.

    ``total_weight``: the weights of all users together, of those who do not take part too; U where every user
    weighs 1. ``option`` and ``correction``: see the module.
    """

    total_weight: float
    option: Option = "II"
    correction: Correction = "gradient"


class Controls:
    """c and every c_i, as vectors ``[P]`` in the order of the model's trained parameters.

    Args:
        module: the model; its parameters are never changed here.
        user_ids: of the U users, as their data sets give them.
        path: of the file with the users' vectors (`UserVectors`); None: a temporary one.
    """

    def __init__(self, module: nn.Module, user_ids: Sequence[str], path: Path | None = None) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._shapes = {name: p.shape for name, p in named}
        self._sizes = [p.numel() for _, p in named]
        self.server = torch.zeros(sum(self._sizes), device=named[0][1].device)
        self._numbers = {user: number for number, user in enumerate(user_ids)}
        self._users = UserVectors(len(user_ids), len(self.server), path)

    def number(self, user_id: str | None) -> int:
        """The number of the user with this id, 0 to U - 1."""
        assert user_id is not None, "SCAFFOLD needs data sets with a user_id"
        return self._numbers[user_id]

    def control(self, user: int) -> Tensor:
        """c_i ``[P]`` of a user, at the start of the round."""
        found = self._users.read(user)
        if found is None:
            return torch.zeros_like(self.server)
        return torch.tensor(found, device=self.server.device)

    def correction(self, control: Tensor) -> dict[str, Tensor]:
        """``c - c_i`` by variable."""
        return self.named(self.server - control)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector ``[P]`` by variable."""
        parts = torch.split(vector, self._sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts)}

    def sent(self, vector: Tensor) -> dict[str, Tensor]:
        """A vector ``[P]`` of changes by the keys of pfl's statistics."""
        return {CHANGE + name: part for name, part in self.named(vector).items()}

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector ``[P]`` of tensors by variable."""
        return torch.cat([tensors[name].reshape(-1) for name in self._shapes])

    def rates(self, rate: float, factors: Sequence[float]) -> float | Tensor:
        """A learning rate times each variable's factor, ``[P]``; without factors as it is."""
        if not factors:
            return rate
        sizes = torch.tensor(self._sizes)
        return (rate * torch.tensor(factors)).repeat_interleave(sizes).to(self.server.device)

    def renew(self, user: int, control: Tensor, change: Tensor) -> None:
        """Keep ``c_i + change`` as the user's from the end of the round on."""
        self._users.write(user, (control + change).cpu().numpy())

    def end_round(self, change: Tensor) -> None:
        """Move c by ``change`` ``[P]``, and let the users' new c_i be theirs."""
        self.server += change
        self._users.end_round()

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds; the users' vectors stay in their file."""
        return {"c": self.server, **self._users.tensors()}

    def saved(self) -> None:
        """The checkpoint with the last `tensors` has taken its name."""
        self._users.saved()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's `tensors`; ValueError as `UserVectors.load`."""
        self._users.load(tensors)
        self.server.copy_(tensors["c"])


@dataclass(frozen=True)
class Renewal:
    """How c_i follows from a round's local training."""

    option: Option
    correction: Correction
    learning_rate: float | Tensor
    """Tensor: ``[P]``, of each parameter."""
    momentum: float

    def change(
        self, server: Tensor, control: Tensor, update: Tensor, num_steps: int, gradient: Tensor | None
    ) -> Tensor:
        """``c_i+ - c_i`` from c, c_i, ``y - x`` and option I's ``g_i(x)``, all ``[P]``; 0 without a step."""
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
        """Keep c_i+; the user sends ``c_i+ - c_i`` besides its update."""
        controls = self._controls
        whole = None if gradient is None else controls.flat(gradient)
        change = self._form.change(controls.server, self._own, controls.flat(update), num_steps, whole)
        controls.renew(self._user, self._own, change)
        return controls.sent(change)


class CorrectedRule(Rule):
    """Local SGD with SCAFFOLD's correction, for a round."""

    corrects_all = False  # c and c_i are of gradients, and of weight decay where there is some

    def __init__(self, controls: Controls, form: Renewal) -> None:
        self._controls, self._form = controls, form
        self.correction, self.whole_gradient = form.correction, form.option == "I"

    def user(self, user_id: str | None) -> CorrectedUser:
        """The part of one user."""
        return CorrectedUser(self._controls, self._form, self._controls.number(user_id))

    def zeros(self) -> dict[str, Tensor]:
        """Changes of control variates."""
        return self._controls.sent(torch.zeros_like(self._controls.server))


@register("scaffold")
class Scaffold(OnPfl):
    """pfl's algorithm; its parameters are `ScaffoldParams`."""

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
        """The option and the place of the correction."""
        return {
            "scaffold_option": options.scaffold_option or "II",
            "scaffold_correction": options.scaffold_correction or "gradient",
        }

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse a state of all users that is too large, and a pass that no virtual clock counts.

        Raises:
            ValueError: one line.
        """
        if setup.devices is not None and setup.options.scaffold_option == "I":
            raise ValueError(
                "SCAFFOLD's option I takes one more pass, which devices have no time for: set "
                "federated.scaffold_option to II, or devices to none"
            )
        touched = min(setup.users.num_users, setup.cohort_size * setup.num_rounds)
        numbers = sum(p.numel() for p in setup.module.parameters() if p.requires_grad)
        state, most = touched * numbers * 4 / 1e9, setup.options.max_state_gb
        if state > most:
            raise ValueError(
                f"SCAFFOLD keeps a copy of the model for each of {touched:,} users, {state:,.1f} GB, above "
                f"federated.max_state_gb = {most:g}: raise it, or choose fedavg or fedprox"
            )

    @classmethod
    def build(cls, setup: Setup, **common: Any) -> tuple[OnPfl, NNAlgorithmParams]:
        """The algorithm, with its state in the folder of the checkpoints, and its parameters."""
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
        """The server's control variate goes down with the model, and a change of the user's own comes up."""
        down, up = super().bytes(model)
        return Traffic(2 * down, 2 * up)

    def rule(self, model: PyTorchModel, context: CentralContext) -> CorrectedRule:
        """Corrected local steps.

        Raises:
            ValueError: for local training whose steps are not those of SGD with momentum.
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
        """Move c by the cohort's share of all weight, and leave the mean of the updates."""
        share = float(statistics.weight) / context.algorithm_params.total_weight
        statistics.average()
        keys = [key for key in statistics if key.startswith(CHANGE)]
        changes = {key.removeprefix(CHANGE): statistics.pop(key)[0] for key in keys}
        self.controls.end_round(share * self.controls.flat(changes).float())
