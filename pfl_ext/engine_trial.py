"""Trains the same few users with the engine and with pfl's loop, for `pfl_ext.engine.selfcheck`."""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from pfl.context import CentralContext, UserContext
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pfl.model.pytorch import PyTorchModel
from pfl.postprocessor.base import Postprocessor
from torch import Tensor

from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.engine.card import ieee_float32
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.selfcheck import PATHS, SelfCheck, fingerprint
from pfl_ext.engine.training import LocalTraining
from pfl_ext.privacy.central import ScalesUpdates
from pfl_ext.rules import Rule, UserRule

Sent = dict[str, Tensor]
"""What users send, by variable."""
STEADY_RATE, STEADY_EPSILON = 0.01, 1.0
"""Learning rate and epsilon of Adam in a comparison: no result of a run depends on them (`steady`)."""


@contextlib.contextmanager
def steady(model: PyTorchModel, local: LocalTraining) -> Iterator[LocalTraining]:
    """In this context users train in steps that do not magnify rounding; the training as the engine does it.

    A step of Adam is about as long for a gradient that is nothing but rounding as for any other: two right
    computations of a ResNet-18's round in float32 differed by 2 %. With a large epsilon, the same code makes
    steps in proportion to gradients.
    """
    if local.adaptive is None:
        yield local
        return
    create = model.new_local_optimizer

    def created(*_: object, **__: object) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = create(learning_rate=STEADY_RATE)
        for group in optimizer.param_groups:
            group["eps"] = STEADY_EPSILON
        return optimizer

    with mock.patch.object(model, "new_local_optimizer", created):
        adaptive = local.adaptive._replace(epsilon=STEADY_EPSILON)
        yield replace(local, learning_rate=STEADY_RATE, adaptive=adaptive)


def few_of(members: Sequence[Member]) -> list[Member]:
    """The two users with the fewest steps, and one more with several steps."""
    by_steps = sorted((m for m in members if m.num_images), key=lambda m: (m.num_steps, m.num_images))
    several = [m for m in by_steps[2:] if m.num_steps > 1]
    return [*by_steps[:2], *several[:1]]


def added_up(each: Iterable[Sent]) -> Sent:
    """The sum of what users send, in new memory."""
    total: Sent = {}
    for sent in each:
        total = {name: total[name] + t if total else t.clone() for name, t in sent.items()}
    return total


class Corrected(Rule):
    """A rule with made-up corrections in the place of its own, which a trial must not renew.

    Each user's is another multiple of one update, which is 0 where no image has an effect.
    """

    def __init__(self, rule: Rule, update: Sent, learning_rate: float) -> None:
        super().__init__(rule.proximal_weight)
        self.correction, self.corrects_all = rule.correction, rule.corrects_all
        self._step = {name: t / learning_rate for name, t in update.items()}

    def user(self, user_id: str | None) -> UserRule:
        """One user's correction."""
        factor = 0.1 + 0.4 * zlib.crc32(str(user_id).encode()) / 2**32
        return _CorrectedUser({name: factor * t for name, t in self._step.items()})


@dataclass(frozen=True)
class _CorrectedUser:
    correction: Sent

    def finish(self, update: Mapping[str, Tensor], num_steps: int, gradient: object) -> Mapping[str, Tensor]:
        return {}


def with_corrections(
    algorithm: Any, rule: Rule, model: PyTorchModel, context: CentralContext[Any, Any], user: Any, rate: float
) -> tuple[Any, Rule]:
    """The algorithm and its rule as a trial has them, with `Corrected` by this user's update at this rate."""

    def ruled(rule: Rule) -> Any:
        other = copy.copy(algorithm)
        other.rule = lambda *_: rule
        return other

    stats, _ = ruled(Rule()).simulate_one_user(model, user, context)
    rule = Corrected(rule, {name: stats[name].clone() for name in model.variable_map}, rate)
    return ruled(rule), rule


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The users of the comparison, and how they are trained."""

    engine: CohortEngine
    images: FederatedImageDataset
    members: Sequence[Member]
    local: LocalTraining
    rule: Rule
    model: PyTorchModel
    algorithm: Any
    context: CentralContext[Any, Any]
    postprocessors: Sequence[Postprocessor]
    """What is done to each user's update."""
    weighting: tuple[bool, ScalesUpdates | None] | None
    """Whether users are weighted by images, and the mechanism; None: the engine trains users one by one."""

    def settled(self, check: SelfCheck) -> bool:
        """Find a path that passes and set the engine to it; the same on all workers. False if none passes."""
        private = None if self.weighting is None else self.weighting[1]
        bound = None if private is None else (type(private).__name__, private.clipping_bound)
        key = fingerprint(repr(self.model.pytorch_model), self.local.form, bound)
        exact = None if self.model.amp_context is None else self.exact
        number = check.path(key, self.ours, self.theirs, exact, len(self.members))
        if get_ops().distributed.world_size > 1:
            flags = torch.zeros(len(PATHS) + 1)
            flags[number] = 1
            get_ops().distributed.all_reduce([flags])
            number = int(flags.nonzero().max())
        if number == len(PATHS):
            return False
        self.engine.take_path(number)
        return True

    def ours(self, path: int) -> Sent:
        """The sum by a path of the engine."""
        engine, local = self.engine, self.local
        engine.take_path(path)
        if self.weighting is None:
            total = added_up(engine.train_alone(self.images.read(m), local) for m in self.members)
        else:
            by_images, private = self.weighting
            tasks = engine.tasks(self.members, local, private)
            weight = partial(Member.weight, by_images=by_images)
            total = added_up([engine.train(self.images, tasks, local, weight, private, self.rule).update])
        engine.take_losses()
        return total

    def theirs(self) -> Sent:
        """The sum by pfl's loop."""
        with ieee_float32(self.model.pytorch_model.mean.device):
            return added_up(map(self._sent, self.members))

    def exact(self) -> Sent:
        """The sum by pfl's loop, in float32."""
        with mock.patch.object(self.model, "_amp_context", None):  # pfl has no setter
            return self.theirs()

    def _sent(self, member: Member) -> Sent:
        user = self.images.read(member)
        stats, metrics = self.algorithm.simulate_one_user(self.model, user, self.context)
        about = UserContext(len(user), 0, user.user_id, metrics)
        for postprocessor in self.postprocessors:
            stats, _ = postprocessor.postprocess_one_user(stats=stats, user_context=about)
        return {name: stats[name] for name in self.model.variable_map}
