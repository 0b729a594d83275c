"""Which folders are runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.reporting.folders import find_runs


def make(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.yaml").touch()
    return directory


def test_links_are_followed_once_and_never_round(tmp_path: Path) -> None:
    """A linked run below a given folder was left out in silence, although it was found if it was given."""
    first, second = make(tmp_path / "runs" / "b"), make(tmp_path / "runs" / "deep" / "c")
    away, outside = make(tmp_path / "away" / "x"), make(tmp_path / "d")
    for name, target in {
        "a": first, "link": away, "folder": away.parent, "up": tmp_path, "round": tmp_path / "runs"
    }.items():  # fmt: skip
        (tmp_path / "runs" / name).symlink_to(target)
    found = find_runs([tmp_path / "runs"])
    assert found[:2] == [first, second], "by their own names"
    assert [path.resolve() for path in found[2:]] == [away]
    assert outside not in found
    assert find_runs([tmp_path / "runs" / "link"]) == [tmp_path / "runs" / "link"]


def test_two_spellings_of_a_folder_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They counted as two seeds."""
    make(tmp_path / "runs" / "y")
    monkeypatch.chdir(tmp_path)
    assert find_runs([Path("runs"), tmp_path / "runs" / "y"]) == [Path("runs/y")]
