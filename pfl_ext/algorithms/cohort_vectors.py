"""One vector for each user, on the disk of worker 0, for the workers that train a round's cohort.

Letters: U users of a run, P numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path

import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from torch import Tensor

from dataset.arrays import IntArray
from pfl_ext.algorithms.user_vectors import UserVectors
from pfl_ext.workers.distributed import Workers, current, is_main, tensors_from_main


class CohortVectors:
    """Every user's vector ``[P]``, in the file of `UserVectors`.

    Only worker 0 has the file. With several workers it sends the vectors of a round's users before the round
    (`begin`), and receives those that were written after it (`end`). So a run can continue with another
    number of workers.

    Args:
        num_users: U.
        length: P; 0: there is nothing to keep, and no file.
        path: the file; None: a temporary file.
    """

    def __init__(self, num_users: int, length: int, path: Path | None) -> None:
        self._length = length
        self._rows = UserVectors(num_users, length, path) if is_main() and length else None
        self._cohort: IntArray | None = None
        self._workers: Workers | None = None
        self._received: dict[int, Tensor] = {}
        self._written: dict[int, Tensor] = {}

    def begin(self, cohort: IntArray, mine: Container[int] | None = None) -> None:
        """Begin a round; all workers call this. In one process there is no need to.

        Args:
            cohort: the numbers of the round's users.
            mine: those that this worker trains; None: it may be any of them, and receives all vectors.
        """
        self._cohort, self._received, self._written = cohort, {}, {}
        self._workers = current()  # kept, since `current` may be None within the round
        if self._workers is None:
            return
        for user in cohort.tolist():
            row = None if self._rows is None else self._rows.read(user)
            found = {} if row is None else {"vector": torch.tensor(row)}
            sent = tensors_from_main(found if is_main() else None)
            if (mine is None or user in mine) and "vector" in sent:
                self._received[user] = sent["vector"]

    def read(self, user: int) -> Tensor | None:
        """The user's vector at the start of the round; None: never written."""
        if self._workers is not None:
            return self._received.get(user)
        row = None if self._rows is None else self._rows.read(user)
        return None if row is None else torch.tensor(row)

    def write(self, user: int, vector: Tensor) -> None:
        """Set the user's vector, which `read` returns from the next round on."""
        if self._workers is not None:
            self._written[user] = vector.cpu()
        elif self._rows is not None:
            self._rows.write(user, vector.cpu().numpy())

    def end(self) -> None:
        """End a round; all workers call this. Worker 0 stores what all of them have written."""
        if self._workers is not None:
            assert self._cohort is not None
            device = torch.device(get_default_device())
            for user in self._cohort.tolist():
                vector = self._written.pop(user, None)
                known = torch.tensor([0.0 if vector is None else 1.0], device=device)
                whole = torch.zeros(self._length, device=device) if vector is None else vector.to(device)
                self._workers.all_reduce([known, whole])
                if self._rows is not None and known:
                    self._rows.write(user, whole.cpu().numpy())
        if self._rows is not None:
            self._rows.end_round()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint, on worker 0; the vectors themselves stay in their file."""
        return {} if self._rows is None else self._rows.tensors()

    def saved(self) -> None:
        """Is called once the checkpoint with the last `tensors` has its final name."""
        if self._rows is not None:
            self._rows.saved()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint's `tensors`. Raises ValueError as `UserVectors.load` does."""
        if self._rows is not None:
            self._rows.load(tensors)
