"""Files in the making that processes left behind are deleted, and those of living processes are not."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from dataset.files import locked
from tests.dataset.store.test_hdf5 import write

DEAD = 1 << 23
"""More than the largest number of a process."""


def in_the_making(folder: Path, number: int | str) -> Path:
    path = folder / f"f.hdf5.tmp-{platform.node()}-{number}"
    path.touch()
    return path


def beside(path: Path) -> set[str]:
    return {other.name.rpartition("-")[2] for other in path.parent.iterdir() if other != path}


def test_what_dead_processes_left_is_deleted_and_nothing_of_others(tmp_path: Path) -> None:
    for owner in (DEAD, 1, "copy"):
        in_the_making(tmp_path, owner)
    assert beside(write(tmp_path / "f.hdf5", "raw")) == {"1", "copy"}


def test_a_container_with_this_machines_name_keeps_its_file(tmp_path: Path) -> None:
    """Its processes are not in our /proc, but it holds a lock on the shared disk."""
    with locked(Path(f"{in_the_making(tmp_path, DEAD)}.lock"), ""):
        assert beside(write(tmp_path / "f.hdf5", "raw")) == {f"{DEAD}", f"{DEAD}.lock"}
    assert not beside(write(tmp_path / "f.hdf5", "raw"))


def test_a_container_with_our_number_of_a_process_keeps_its_file(tmp_path: Path) -> None:
    other = in_the_making(tmp_path, os.getpid())
    with (
        locked(Path(f"{other}.lock"), ""),
        pytest.raises(ValueError, match=f"another process is writing {other}"),
    ):
        write(tmp_path / "f.hdf5", "raw")
    assert other.exists()
