"""Compression of users' updates on their way to the server, with error feedback where it is chosen.

**Order.** A user's update is compressed before it is weighted, and before a privacy mechanism clips it. The
server applies the weight, so what a user sends and keeps depends on its own update alone. (Every compressor
here maps a multiple of an update to that multiple of the message. So where a user's weight is constant,
weighting first would change only the error that the user keeps.)

**Privacy.** Clipping follows compression so that every message has a norm of at most C. The sensitivity of
the sum is then C for every compressor, and adaptive clipping measures the norms of compressed updates. If
clipping came first, the bound would be ``d / k C`` for random-k, and C plus a step of the levels times
``sqrt(d)`` for stochastic rounding. Compression draws from the public seed; no guarantee depends on it.
Private runs refuse error feedback, since its state outlives the round. Local privacy refuses any compression,
since its noise makes every message dense.

**Replacement.** A user who comes twice in a cohort has draws of its own each time, as in its local training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pfl.context import UserContext
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.algorithms.cohort_vectors import CohortVectors
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.compression.compressor import Compressor
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.randomness import stream
from pfl_ext.stage import Stage, turn_of
from pfl_ext.workers.distributed import current

FILE = "compression_errors.f32"
"""The file of the users' compression errors, beside a run's checkpoints."""


class Channel(Stage):
    """Compresses a run's updates, as the pfl postprocessor right before the weighting.

    `begin` is called before each round and `end` after it.

    Args:
        compressor: compresses one update.
        users: the run's users.
        module: the network.
        names: the variables that are sent.
        seed: the run's seed.
        folder: of the run's checkpoints; None: users' errors go to a temporary file.
    """

    def __init__(
        self,
        compressor: Compressor,
        users: FederatedImageDataset,
        module: nn.Module,
        names: Sequence[str],
        seed: int,
        folder: Path | None,
    ) -> None:
        self._variables = FlatVariables(module, names)
        self._compressor, self._seed, self._round = compressor, seed, 0
        self._users, self._turns = users, dict[int, Iterator[int]]()
        self.errors: CohortVectors | None = None
        """The users' errors, which a run needs to continue; None: none are kept."""
        if getattr(compressor.chosen, "error_feedback", False):
            path = None if folder is None else folder / FILE
            self.errors = CohortVectors(users.num_users, self._variables.length, path)

    @property
    def num_bytes(self) -> int:
        """Size of a message in bytes."""
        return self._compressor.num_bytes(list(self._variables.shapes.values()))

    def begin(self, number: int, cohort: IntArray) -> None:
        """Begin round ``number`` of these users; all workers call this."""
        super().begin(number, cohort)
        self._round, self._turns = number, self._users.later_turns(cohort)
        if self.errors is not None:
            workers = current()
            size, rank = (1, 0) if workers is None else (workers.world_size, workers.global_rank)
            self.errors.begin(cohort, {int(cohort[p]) for p in self._users.assign(cohort, size)[rank]})

    def end(self) -> None:
        """End the round; all workers call this."""
        super().end()
        if self.errors is not None:
            self.errors.end()

    @torch.no_grad()
    def sent(self, update: Mapping[str, Tensor], user: int) -> dict[str, Tensor]:
        """A user's update as the server decodes it, by variable; other entries of ``update`` are unchanged.

        An update that is not finite is sent as it is, and leaves the user's error unchanged.
        """
        self.check_open()
        turn = turn_of(user, self._turns)
        tensors = [update[name].detach() for name in self._variables.shapes]
        error = None if self.errors is None else self.errors.read(user)
        if error is not None:
            parts = self._variables.named(error.to(tensors[0].device))
            tensors = [t + part for t, part in zip(tensors, parts.values())]
        if not all(bool(torch.isfinite(t).all()) for t in tensors):
            return dict(update)
        rng = stream(self._seed, "compression", self._round, user, *turn)
        decoded = self._compressor.decoded(tensors, rng)
        if self.errors is not None:
            left = [(x - y).reshape(-1) for x, y in zip(tensors, decoded)]
            self.errors.write(user, torch.cat(left))
        return {**update, **dict(zip(self._variables.shapes, decoded))}

    def postprocess_one_user(
        self, *, stats: MappedVectorStatistics, user_context: UserContext
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Replace the user's update by `sent`; a user without images is left as it is."""
        if user_context.num_datapoints:
            sent = self.sent(dict(stats.items()), self._users.partition.numbers[str(user_context.user_id)])
            for name in self._variables.shapes:
                stats[name] = sent[name]
        return stats, Metrics()
