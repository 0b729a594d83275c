"""Training in which every user keeps a state of its own: its rounds, its state on disk, and its scores.

In a round the server sends its model x to the cohort. Each user i has a vector v_i, from its last round or,
in its first round, from the run's first weights. It trains (`Personalised.train_user`), keeps the new v_i,
and sends an update of the shared variables. The server's optimiser steps on the mean of these updates, with
FedAvg's weights. v_i is never sent. `pfl_ext.algorithms.cohort_vectors` stores the v_i.

Each user is scored on images of its own that it does not train on (`federated.options.scored_on`): at the end
(``clients`` in ``results.json``) and every `score_every` rounds (``clients`` in ``metrics.jsonl``). Users who
have trained (``seen``) are reported apart from those who have not (``new``). ``personal`` is the user's own
model and ``server`` the server's. A new user has only the server's model, in which the variables that stay
with users have their values from before training.

The server's model is what the run scores on val and test, and what it saves as ``model.safetensors``.

Private training is refused: a user's state outlives the round, so it would disclose more in each round, and
the accountant would have to count each user's rounds for its own model as well.

Letters: U users, n users of a cohort, P numbers of a v_i.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from dataset.arrays import IntArray
from pfl_ext.algorithms.algorithm import RunContext, Setup, Traffic, UserState
from pfl_ext.algorithms.clients import Clients, Weights, line_of
from pfl_ext.algorithms.cohort_vectors import CohortVectors
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.algorithms.own_images import OwnImages, ScoredOptions, Scores, check_scored, write_users
from pfl_ext.algorithms.personal_parts import FILE, trained_names
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from pfl_ext.configs import STRICT
from pfl_ext.engine.cpu.twin import CompiledTwin
from pfl_ext.rules import PRIVACY_NOT_ARGUED, Refusals
from pfl_ext.tasks.task import Task
from pfl_ext.workers.distributed import current, is_main

SEEN, USERS, CHANNEL = "seen", "users/", "compression/"
"""Names in a checkpoint: the users who have trained; the prefixes of their v_i and of a `Channel`."""
ONLY_OF_COHORTS = "lanes fuse tune check_engine"
"""Fields of the runtime that an algorithm does not read whose users all train in pfl's loop."""
SHOWN = ("mean", "std", "lowest decile", "highest decile")
BLOCK_BYTES = 2**28
"""Most bytes of users' vectors in memory at a time, while all users are scored."""


@dataclass(frozen=True, config=STRICT)
class KeptOptions(ScoredOptions):
    """Options of every algorithm whose users keep a state."""

    max_state_gb: PositiveFloat = 16.0
    """Most disk space, in GB, for the users' states, without old rows that the last two checkpoints need."""


class Personalised(ServerModelAlgorithm):
    """Base of algorithms whose users keep a state. Its own state is the server's model and a file of v_i."""

    options: ClassVar[type] = KeptOptions
    refusals: ClassVar[Refusals] = {
        **PRIVACY_NOT_ARGUED,
        "replacement": (
            "each user keeps its own state, so a user must not be drawn twice in a cohort: set "
            "federated.replacement to false"
        ),
    }
    idle: ClassVar[str] = "federated.reweight federated.max_importance augment.views"
    files: ClassVar[tuple[str, ...]] = (FILE,)
    has_server_model: ClassVar[bool] = False
    has_user_models: ClassVar[bool] = True

    def __init__(self, context: RunContext) -> None:
        self.images = OwnImages.of(context.users, context.options, context.own)
        super().__init__(replace(context, users=self.images.users))
        self.clients, module = Clients(self.context), context.model.pytorch_model
        self.twin = CompiledTwin(context.model, context.kernels if self.in_loop else None)
        self.layout = FlatVariables(module, self.kept_names(module, context.options))
        shared = set(self.shared_names(module, context.options))
        self.shared = [name for name in trained_names(module) if name in shared]
        self.channel = self.context.channel(self.shared)
        path = None if context.folder is None else context.folder / FILE
        self.parts = CohortVectors(context.users.num_users, self.layout.length, path)
        self.seen = torch.zeros(context.users.num_users, dtype=torch.bool)
        self._kept_finite = True

    @classmethod
    def kept_names(cls, module: Any, options: Any) -> Sequence[str]:
        """Names of the variables that v_i holds, here all that are trained. May raise ValueError."""
        return trained_names(module)

    @classmethod
    def shared_names(cls, module: Any, options: Any) -> Sequence[str]:
        """Names of the variables whose updates are sent, here all that are trained."""
        return trained_names(module)

    @classmethod
    def keeps_parts(cls, options: Any) -> bool:
        """Where a class says which variables are shared, others are not."""
        return next(kind for kind in cls.__mro__ if "shared_names" in vars(kind)) is not Personalised

    @abstractmethod
    def train_user(self, x: Weights, kept: Tensor, user: int, number: int) -> tuple[Weights, Tensor, Tensor]:
        """Train one user in a round.

        Args:
            x: the server's model.
            kept: v_i, ``[P]``.
            user: the user's number.
            number: the round.

        Returns:
            The update, which has the shared variables and may have others; the new v_i ``[P]``; and the
            counts ``[3]`` of `Clients.train_alone`.
        """

    @property
    def in_loop(self) -> bool:
        """Whether pfl's loop, and not the engine, makes any of the users' steps."""
        return True

    @property
    def tunes(self) -> bool:
        """Whether a user that never trained still has a model of its own, to be scored."""
        return False

    def own_model(self, x: Weights, kept: Tensor, user: int, number: int) -> Weights:
        """The user's own model, to be scored. Here it is x with the user's values in place."""
        return {**x, **self.layout.named(kept)}

    def model_of(self, state: PyTorchModel, user: int, number: int) -> PyTorchModel:
        """See `Algorithm.model_of`."""
        if not self.tunes and not (self.layout.length and self.seen[user]):
            nothing = "keeps nothing, as federated.options.personal is none"
            raise ValueError("took part in no round" if self.layout.length else nothing)
        x, users = self.clients.weights(), np.array([user], np.int64)
        self.parts.begin(users)
        with self.clients.dealt(users, number):
            kept = self.vector_of(user, self.layout.flat(x))
            return self.clients.model(self.own_model(x, kept, user, number))

    def vector_of(self, user: int, first: Tensor) -> Tensor:
        """v_i ``[P]``; ``first`` for a user without one. The user must be of the last ``parts.begin``."""
        found = self.parts.read(user)
        return first if found is None else found.to(first.device)

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse a network without variables to keep, scores of no images, and states that need more disk
        than is allowed.
        """
        check_scored(setup.options, setup.own)
        state, most = cls.state_bytes(setup), setup.options.max_state_gb
        if state / 1e9 > most:
            numbers = state // (4 * setup.touched)
            raise ValueError(
                f"{cls.__name__} keeps {numbers:,} numbers for each of {setup.touched:,} users, which "
                f"is {state / 1e9:,.1f} GB on disk, above federated.options.max_state_gb = {most:g}: raise "
                "this limit, or make fewer variables personal"
            )

    @classmethod
    def state_bytes(cls, setup: Setup) -> int:
        """See `Choice.state_bytes`."""
        layout = FlatVariables(setup.module, cls.kept_names(setup.module, setup.options))
        return setup.touched * layout.length * 4

    def init(self, seed: int) -> PyTorchModel:
        """See `ServerModelAlgorithm.init`; no user has trained."""
        self.first = self.layout.flat(self.clients.weights())
        return super().init(seed)

    def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
        """Train the cohort, and make a step of the server's optimiser on the mean of the shared updates."""
        x, users = self.clients.weights(), self.clients.cohort(number)
        seen = self.clients.unseen(users)
        not_finite = seen.new_zeros(1)
        self.parts.begin(users)
        total = {name: torch.zeros_like(x[name], dtype=self.context.accumulate) for name in self.shared}
        if self.channel is not None:
            self.channel.begin(number, users)
        with self.clients.dealt(users, number) as mine:
            for place in mine:
                user = int(users[place])
                before = self.vector_of(user, self.first)
                update, after, seen[place] = self.train_user(x, before, user, number)
                self.parts.write(user, after)
                not_finite += not after.isfinite().all()
                if self.channel is not None and seen[place, 0]:
                    update = self.channel.sent(update, user)
                weight = float(seen[place, 0]) if self.context.by_images else 1.0
                for name, tensor in total.items():
                    tensor.add_(update[name].to(tensor.dtype), alpha=weight)
        if (workers := current()) is not None:
            workers.sum_model([seen, not_finite], list(total.values()))
        if self.channel is not None:
            self.channel.end()
        self._kept_finite = not not_finite.any()  # the same on every worker
        self.parts.end()
        self.seen[users] = True
        weight = float(seen[:, 0].double().sum()) if self.context.by_images else float(len(users))
        weight = weight or 1.0  # nobody has an image: all sums are 0
        mean = {name: torch.zeros_like(w) for name, w in x.items()}
        for name, tensor in total.items():
            mean[name] = (tensor / weight).to(mean[name].dtype)
        rate = self.clients.server_step(x, mean, number)
        line = {**line_of(seen), "learning_rate": rate}
        every = self.context.options.score_every
        if every and (number + 1) % every == 0:
            line["clients"] = self.scores(number + 1)
        return state, line

    def is_finite(self, state: PyTorchModel) -> bool:
        """Whether the server's model and the new v_i of the round's users are finite."""
        return self._kept_finite and super().is_finite(state)

    def arithmetic(self, precision: torch.dtype | None) -> str:
        """See `Algorithm.arithmetic`. Without an engine it is that of the compiled layers, if any."""
        compiled = self.twin.arithmetic if self.engine is None else None
        return super().arithmetic(precision) if compiled is None else compiled

    def scores(self, number: int, rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """Users' scores after ``number`` rounds, by group (``seen``, ``new``); empty if none is scored.

        ``rows`` gets those of each user. All workers call this. The run's model has the server's weights,
        before the call and after it.
        """
        x, scored, found = self.clients.weights(), self.images.scored, {}
        groups = {"seen": scored[self.seen[scored].numpy()], "new": scored[~self.seen[scored].numpy()]}
        for group, users in groups.items():
            if len(users):
                self.clients.model(x)
                scores, kinds = self._scores_of(x, users, number, group == "seen" or self.tunes)
                found[group] = scores.summary(kinds)
                if rows is not None:
                    rows += scores.each(group, self.images.training_images(users))
        self.clients.model(x)
        return found

    def _scores_of(
        self, x: Weights, users: IntArray, number: int, personal: bool
    ) -> tuple[Scores, Sequence[str]]:
        """Scores of one group, and their kinds. ``personal``: whether users' own models are scored, too."""
        scores = Scores(self.images.split, users, self.context.model)
        with self.clients.dealt(users, number) as mine:
            scores.add("server", mine)
        if not personal:
            return scores, ["server"]
        block = max(1, BLOCK_BYTES // (4 * self.layout.length + 1))
        newcomer = self.layout.flat(x)
        for first in range(0, len(users), block):
            part = users[first : first + block]
            self.parts.begin(part)
            with self.clients.dealt(part, number) as mine:
                for place in mine:
                    user = int(part[place])
                    self.clients.model(self.own_model(x, self.vector_of(user, newcomer), user, number))
                    scores.add("personal", [first + place])
        return scores, ["personal", "server"]

    def findings(self, state: PyTorchModel) -> dict[str, Any]:
        """The scores on users' own images after the last round.

        Without any, nothing is said if users have the server's model, which the run then scores for each.
        """
        rows: list[dict[str, Any]] = []
        clients = self.scores(self.context.num_rounds, rows)
        if is_main() and rows and self.context.folder is not None:
            write_users(self.context.folder.parent, rows)
        if is_main():
            for group, found in clients.items():
                print(shown(self.context.model.pytorch_model.task, group, found))
        return {"clients": clients} if clients or self.keeps_parts(self.context.options) else {}

    def _kept(self) -> Mapping[str, UserState]:
        errors = self.channel and self.channel.errors
        return {USERS: self.parts} | ({} if errors is None else {CHANNEL: errors})

    def tensors(self, state: PyTorchModel) -> dict[str, Tensor]:
        """The tensors of the model, the server's optimiser and the users."""
        return {**super().tensors(state), SEEN: self.seen}

    def load(self, state: PyTorchModel, tensors: Mapping[str, Tensor]) -> PyTorchModel:
        """Restore the model, the server's optimiser and the users' states."""
        self.seen = tensors[SEEN].cpu().clone()
        return super().load(state, tensors)

    def bytes(self, state: PyTorchModel) -> Traffic:
        """The shared variables go down; their compressed update goes up."""
        size = sum(p.nbytes for n, p in state.variable_map.items() if n in self.shared)
        return Traffic(size, size if self.channel is None else self.channel.num_bytes)


def shown(task: Task, group: str, found: Mapping[str, Any]) -> str:
    """The scores of a group of users in one line."""
    column, parts = task.user_headline, []
    for kind in ("personal", "server"):
        if kind not in found:
            continue
        users = found[kind]["users"].get(column, {"n": 0})
        pooled = found[kind]["pooled"][column]
        digits = task.score_kinds.decimals(column, [pooled], 2)
        spread = ", ".join(f"{name} {value:.{digits}f}" for name, value in users.items() if name in SHOWN)
        parts.append(f"{kind} models: pooled {pooled:.{digits}f}, over users {spread}")
    images = "held-out images" if found["split"] == "train" else f"images in {found['split']}"
    return f"own {images} of {found['users']} {group} users, {column}: {'; '.join(parts)}"
