"""Users' vectors: what is read is what was written, and what a checkpoint names outlives any death."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pfl_ext.algorithms.user_vectors import UserVectors

USERS, LENGTH = 5, 3
Known = dict[int, float]


def values(number: float) -> Any:
    return np.full(LENGTH, number, np.float32)


class Lives(RuleBasedStateMachine):
    """Rounds, checkpoints and deaths in any order, beside dictionaries that say what must be read."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "vectors.f32"
        self.vectors = UserVectors(USERS, LENGTH, self.path)
        self.now: Known = {}
        self.pending: Known = {}
        self.checkpoints: list[tuple[Any, Known]] = []
        self.drawn = 0

    def teardown(self) -> None:
        self.folder.cleanup()

    @rule(user=st.integers(0, USERS - 1))
    def write(self, user: int) -> None:
        self.drawn += 1
        self.vectors.write(user, values(self.drawn))
        self.pending[user] = self.drawn

    @rule()
    def end_round(self) -> None:
        self.vectors.end_round()
        self.now |= self.pending
        self.pending = {}

    @rule(dies=st.sampled_from(["no", "before the checkpoint", "after it"]), fall_back=st.booleans())
    def checkpoint(self, dies: str, fall_back: bool) -> None:
        self.end_round()
        tensors = self.vectors.tensors()
        if dies != "before the checkpoint":
            self.checkpoints = [*self.checkpoints, (tensors, dict(self.now))][-2:]
        if dies == "no":
            self.vectors.saved()
        else:
            self.die(fall_back)

    @rule(fall_back=st.booleans())
    def die(self, fall_back: bool) -> None:
        """And go on from the last checkpoint, or from the one before where the last is damaged."""
        self.vectors, self.pending = UserVectors(USERS, LENGTH, self.path), {}
        if not self.checkpoints:
            self.now = {}
            return
        if fall_back:
            self.checkpoints = self.checkpoints[:1]
        tensors, known = self.checkpoints[-1]
        self.vectors.load(tensors)
        self.now = dict(known)

    @invariant()
    def reads_what_was_written(self) -> None:
        for user in range(USERS):
            found = self.vectors.read(user)
            if user in self.now:
                assert found is not None
                np.testing.assert_array_equal(found, values(self.now[user]))
            else:
                assert found is None

    @invariant()
    def wastes_no_room(self) -> None:
        """Rows of now, the last two checkpoints, and the round under way."""
        assert self.path.stat().st_size <= 4 * USERS * LENGTH * 4


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=40, stateful_step_count=30)


def saved(path: Path) -> tuple[UserVectors, Any]:
    vectors = UserVectors(USERS, LENGTH, path)
    for user in (3, 1):
        vectors.write(user, values(user))
    vectors.end_round()
    return vectors, vectors.tensors()


def test_rounds_of_all_users_need_room_for_three_copies(tmp_path: Path) -> None:
    """For the last checkpoint, for the one before it, and for the round under way."""
    vectors = UserVectors(USERS, LENGTH, tmp_path / "vectors.f32")
    for number in range(9):
        for user in range(USERS):
            vectors.write(user, values(number))
        vectors.end_round()
        vectors.tensors()
        vectors.saved()
    assert (tmp_path / "vectors.f32").stat().st_size == 3 * USERS * LENGTH * 4


@pytest.mark.parametrize("damage", ["changed", "short", "gone"])
def test_a_file_that_is_not_the_checkpoints_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "vectors.f32"
    tensors = saved(path)[1]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes({"changed": bytes(content), "short": bytes(content[:-8]), "gone": b""}[damage])
    with pytest.raises(ValueError, match=f"{path} is not the one that the checkpoint was written with"):
        UserVectors(USERS, LENGTH, path).load(tensors)


def test_a_full_disk_is_one_clause_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    vectors, _ = saved(tmp_path / "vectors.f32")
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match=r"vectors\.f32 cannot be written: No space left on device"):
        vectors.write(0, values(0))


def test_a_write_in_pieces_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: real(file, data[:5], offset))
    vectors, _ = saved(tmp_path / "vectors.f32")
    np.testing.assert_array_equal(vectors.read(3), values(3))


def test_without_a_path_the_file_has_no_name() -> None:
    vectors = UserVectors(USERS, LENGTH)
    vectors.write(2, values(7))
    assert vectors.read(2) is None, "before the end of the round"
    vectors.end_round()
    np.testing.assert_array_equal(vectors.read(2), values(7))
    assert not vectors._path.exists()
