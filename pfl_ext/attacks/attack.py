"""The interface of every attack, the attacks by name, and the choice of attackers.

An attack is a class under ``@register("name")`` in this folder: ``attack.kind: name`` chooses it, and each
field of its ``options`` is set as ``attack.options.FIELD``. Attacks are simulated, to test aggregation rules.

Letters: U users, n users of a round, m of them attackers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from pfl.context import UserContext
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from dataset.arrays import BoolArray, IntArray
from pfl_ext.aggregation.spool import Spool
from pfl_ext.configs import NoOptions
from pfl_ext.data.federated_dataset import FederatedImageDataset, ImageStore
from pfl_ext.randomness import derive, stream
from pfl_ext.registry import Registry
from pfl_ext.stage import Stage, turn_of

HONEST = "honest"
"""The name that stands for no attack."""


class Attack:
    """Base of attacks, with its options. The base itself changes nothing."""

    options: ClassVar[type] = NoOptions
    """The frozen dataclass of its options."""
    colludes: ClassVar[bool] = False
    """Whether attackers see all honest updates of a round (`collude`)."""

    def __init__(self, options: Any) -> None:
        self.chosen = options

    def images(self, store: ImageStore, owned: BoolArray) -> ImageStore:
        """The training images after the attack; ``owned`` ``[N]`` marks those of attackers.

        Raises:
            ValueError: for annotations that the attack does not support.
        """
        return store

    def update(self, update: Sequence[Tensor], rng: np.random.Generator, cohort_size: int) -> list[Tensor]:
        """The update that an attacker sends in place of its own, tensor by tensor."""
        return list(update)

    def collude(self, spool: Spool, honest: IntArray, bad: IntArray) -> None:
        """Overwrite the attackers' rows ``bad`` of a spool; the rows of all others can be read."""


ATTACKS: Registry[type[Attack]] = Registry("pfl_ext.attacks", "attack.kind")
"""What ``attack.kind`` chooses by name."""
register = ATTACKS.register
"""Class decorator that registers an attack under a name."""
register(HONEST)(Attack)


def attackers(seed: int, num_users: int, share: float) -> BoolArray:
    """``[U]``: which users attack, in every round. Their number is ``share`` of all users, rounded.

    They are the users with the smallest draws, which are a function of (seed, user).
    """
    order = sorted(range(num_users), key=lambda user: derive(seed, "attacker", user))
    found = np.zeros(num_users, bool)
    found[order[: round(share * num_users)]] = True
    return found


class Attackers(Stage):
    """The attackers of a run, as the first of pfl's postprocessors.

    Args:
        attack: the attack.
        users: the run's users.
        share: the share of users who attack.
        names: the variables that are sent.
        seed: the run's seed.
    """

    def __init__(
        self, attack: Attack, users: FederatedImageDataset, share: float, names: Sequence[str], seed: int
    ) -> None:
        self.attack, self._seed, self._names = attack, seed, names
        self._bad = attackers(seed, users.num_users, share)
        self._users, self._turns = users, dict[int, Iterator[int]]()
        self._round = self._cohort_size = 0

    def among(self, users: IntArray) -> BoolArray:
        """Which of these users attack."""
        return self._bad[users]

    def begin(self, number: int, cohort: IntArray) -> None:
        """Begin round ``number`` of these users; all workers call this."""
        super().begin(number, cohort)
        self._round, self._cohort_size = number, len(cohort)
        self._turns = self._users.later_turns(cohort)

    @torch.no_grad()
    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Replace the update if the user is an attacker."""
        self.check_open()
        user = self._users.partition.numbers.get(str(user_context.user_id))
        if user is not None and self._bad[user] and user_context.num_datapoints:
            own = [stats[name].detach() for name in self._names]
            rng = stream(self._seed, "attack", self._round, user, *turn_of(user, self._turns))
            for name, tensor in zip(self._names, self.attack.update(own, rng, self._cohort_size)):
                stats[name] = tensor
        return stats, Metrics()
