"""One vector for each user, in one memory-mapped file that is always consistent with a run's checkpoints.

A row that one of the last two checkpoints refers to is never overwritten: a changed vector goes to another
row, which becomes the user's at the end of the round. The checkpoint stores each user's row and the SHA-256
of its content (`UserVectors.tensors`). So the process may be killed at any time, also between writing the
file and the checkpoint: the rows that the checkpoint names are still there.

Letters: U users, P numbers of a vector.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataset.arrays import Float32Array
from dataset.files import written

PLACES = ("rows", "rows_before")
"""Names of the tensors in a checkpoint that say where in the file vectors lie, which interruptions change."""


class UserVectors:
    """``[U, P]`` float32. A row is absent until written; threads may use different users at the same time.

    `write` takes effect at `end_round`. A checkpoint stores `tensors`; `saved` is called once it has its
    final name. A process that resumes calls `load` first.

    Args:
        num_users: U.
        length: P.
        path: the file, little-endian float32; None: a temporary file without a name.
    """

    def __init__(self, num_users: int, length: int, path: Path | None = None) -> None:
        self._length, self._bytes = length, 4 * length
        if path is None:
            self._file, name = tempfile.mkstemp()
            self._path = Path(name)
            self._path.unlink()
        else:
            self._path = path
            with written(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, self._file)
        self._now = np.full(num_users, -1)  # [U] the row of each user; -1: none
        self._last, self._before = self._now.copy(), self._now.copy()  # at the last two checkpoints
        self._digests = np.zeros((num_users, 32), np.uint8)
        self._pending: dict[int, tuple[int, bytes]] = {}
        self._free: list[int] = []
        self._count = 0  # all rows that are referred to lie below
        self._mapped = np.empty((0, length), np.float32)
        self._lock = threading.Lock()

    def read(self, user: int) -> Float32Array | None:
        """A read-only view of the user's vector ``[P]`` at the end of the last round; None: never written."""
        row = int(self._now[user])
        return None if row < 0 else self._map()[row]

    def _map(self) -> Float32Array:
        """The file's rows, mapped again if the file has grown."""
        with self._lock:
            if len(self._mapped) < self._count:
                rows = os.fstat(self._file).st_size // self._bytes
                mapped = mmap.mmap(self._file, rows * self._bytes, access=mmap.ACCESS_READ)
                self._mapped = np.frombuffer(mapped, "<f4").reshape(rows, self._length)
            return self._mapped

    def write(self, user: int, values: npt.ArrayLike) -> None:
        """Set the user's vector ``[P]``, which `read` returns from the end of this round on.

        Raises:
            OSError: for example when the disk is full; one clause with the path.
        """
        content = np.ascontiguousarray(values, "<f4")
        assert content.shape == (self._length,)
        with self._lock:
            if user in self._pending:
                row = self._pending[user][0]
            elif self._free:
                row = self._free.pop()
            else:
                row, self._count = self._count, self._count + 1
        left, offset = content.data.cast("B"), row * self._bytes
        with written(self._path):
            while left:
                done = os.pwrite(self._file, left, offset)
                left, offset = left[done:], offset + done
        self._pending[user] = row, hashlib.sha256(content.data).digest()

    def end_round(self) -> None:
        """From here on, `read` returns what was written since the last call."""
        for user, (row, digest) in self._pending.items():
            self._now[user] = row
            self._digests[user] = np.frombuffer(digest, np.uint8)
        self._pending.clear()
        self._find_free()

    def _find_free(self) -> None:
        used = np.zeros(self._count, bool)
        for rows in (self._now, self._last, self._before):
            used[rows[rows >= 0]] = True
        self._free = np.flatnonzero(~used)[::-1].tolist()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a checkpoint between two rounds. The rows that they name are on the disk."""
        assert not self._pending, "between two rounds"
        with written(self._path):
            os.fsync(self._file)
        arrays = dict(zip((*PLACES, "digests"), (self._now, self._last, self._digests)))
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def saved(self) -> None:
        """Is called once the checkpoint with the last `tensors` has its final name."""
        self._before, self._last = self._last, self._now.copy()
        self._find_free()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore from a checkpoint's `tensors`.

        Raises:
            ValueError: when the file does not hold the vectors that the checkpoint names.
        """
        self._now, self._before, self._digests = (
            tensors[name].numpy().copy() for name in (*PLACES, "digests")
        )
        self._last = self._now.copy()
        self._count = max(int(self._now.max(initial=-1)), int(self._before.max(initial=-1))) + 1
        rows = os.fstat(self._file).st_size // self._bytes
        for user in np.flatnonzero(self._now >= 0).tolist():
            row = int(self._now[user])
            if row >= rows or hashlib.sha256(self._map()[row].data).digest() != self._digests[user].tobytes():
                raise ValueError(
                    f"{self._path} is not the one that the checkpoint was written with (the state of user "
                    f"number {user} differs)"
                )
        self._find_free()
