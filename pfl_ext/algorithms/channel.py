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

Letters: P numbers of an update, n users of a cohort.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pfl.context import UserContext
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.algorithms.flat_variables import FlatVariables
from pfl_ext.algorithms.personal_parts import RowsOnMain
from pfl_ext.algorithms.user_vectors import UserVectors
from pfl_ext.compression.compressor import Compressor
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.randomness import stream
from pfl_ext.stage import Stage, turn_of
from pfl_ext.workers.distributed import Workers, current, is_main, tensors_from_main

FILE = "compression_errors.f32"
"""The file of the users' compression errors, beside a run's checkpoints."""


class Errors(RowsOnMain):
    """Every user's compression error e ``[P]``, the part of its updates that was not sent so far.

    Worker 0 has them on its disk. In a round the other workers receive those of the users that they train.

    Args:
        users: the run's users.
        length: P.
        path: the file; None: a temporary file.
    """

    def __init__(self, users: FederatedImageDataset, length: int, path: Path | None) -> None:
        self._users, self._length = users, length
        self._rows = UserVectors(users.num_users, length, path) if is_main() else None
        self._cohort: IntArray | None = None
        self._workers: Workers | None = None
        self._here: dict[int, Tensor] = {}

    def begin(self, cohort: IntArray) -> None:
        """Begin a round. With several workers, each receives the errors of the users that it trains."""
        self._cohort, self._here, self._workers = cohort, {}, current()
        workers = self._workers  # kept, since `current` may be None within the round
        if workers is None:
            return
        mine = {int(cohort[p]) for p in self._users.assign(cohort, workers.world_size)[workers.global_rank]}
        for user in cohort.tolist():
            row = None if self._rows is None else self._rows.read(user)
            found = {} if row is None else {"e": torch.tensor(row)}
            sent = tensors_from_main(found if is_main() else None)
            if user in mine and "e" in sent:
                self._here[user] = sent["e"]

    def read(self, user: int) -> Tensor | None:
        """The user's e at the start of the round; None means 0."""
        if self._workers is not None:
            return self._here.get(user)
        assert self._rows is not None
        row = self._rows.read(user)
        return None if row is None else torch.tensor(row)

    def write(self, user: int, vector: Tensor) -> None:
        """Set the user's e, which `read` returns from the next round on."""
        if self._workers is not None:
            self._here[user] = vector.cpu()
        elif self._rows is not None:
            self._rows.write(user, vector.cpu().numpy())

    def end(self) -> None:
        """End a round: worker 0 receives and stores what all workers have written."""
        assert self._cohort is not None
        if self._workers is not None:
            device = torch.device(get_default_device())
            for user in self._cohort.tolist():
                vector = self._here.pop(user, None)
                known = torch.tensor([0.0 if vector is None else 1.0], device=device)
                whole = torch.zeros(self._length, device=device) if vector is None else vector.to(device)
                self._workers.all_reduce([known, whole])
                if self._rows is not None and known:
                    self._rows.write(user, whole.cpu().numpy())
        if self._rows is not None:
            self._rows.end_round()


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
        self._errors: Errors | None = None
        if getattr(compressor.chosen, "error_feedback", False):
            self._errors = Errors(users, self._variables.length, None if folder is None else folder / FILE)

    @property
    def num_bytes(self) -> int:
        """Size of a message in bytes."""
        return self._compressor.num_bytes(list(self._variables.shapes.values()))

    def begin(self, number: int, cohort: IntArray) -> None:
        """Begin round ``number`` of these users; all workers call this."""
        self._round, self._turns = number, self._users.later_turns(cohort)
        if self._errors is not None:
            self._errors.begin(cohort)

    def end(self) -> None:
        """End the round; all workers call this."""
        if self._errors is not None:
            self._errors.end()

    @torch.no_grad()
    def sent(self, update: Mapping[str, Tensor], user: int) -> dict[str, Tensor]:
        """A user's update as the server decodes it, by variable; other entries of ``update`` are unchanged.

        An update that is not finite is sent as it is, and leaves the user's error unchanged.
        """
        turn = turn_of(user, self._turns)
        tensors = [update[name].detach() for name in self._variables.shapes]
        error = None if self._errors is None else self._errors.read(user)
        if error is not None:
            parts = self._variables.named(error.to(tensors[0].device))
            tensors = [t + part for t, part in zip(tensors, parts.values())]
        if not all(bool(torch.isfinite(t).all()) for t in tensors):
            return dict(update)
        rng = stream(self._seed, "compression", self._round, user, *turn)
        decoded = self._compressor.decoded(tensors, rng)
        if self._errors is not None:
            left = [(x - y).reshape(-1) for x, y in zip(tensors, decoded)]
            self._errors.write(user, torch.cat(left))
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

    def tensors(self) -> dict[str, Tensor]:
        """The users' errors, for the checkpoint that is about to be written."""
        return {} if self._errors is None else self._errors.tensors()

    def saved(self) -> None:
        """Is called once the checkpoint with the last `tensors` has its final name."""
        if self._errors is not None:
            self._errors.saved()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint's `tensors`. Raises ValueError as `UserVectors.load` does."""
        if self._errors is not None:
            self._errors.load(tensors)
