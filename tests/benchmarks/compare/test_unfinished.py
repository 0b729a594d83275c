"""Runs that have not ended, or cannot be shown, are named on the screen and in the table for a paper."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compare.__main__ import main
from dataset.cli import run
from tests.benchmarks.made_runs import make_run


@pytest.mark.usefixtures("no_pictures")
def test_runs_that_have_not_ended_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, out = tmp_path / "runs", tmp_path / "out"
    make_run(runs / "whole")
    first = make_run(runs / "first", seed=1, finished=False)
    second = make_run(runs / "second", "c-r-17", finished=False)
    damaged = make_run(runs / "third", seed=2)
    (damaged / "config.yaml").write_text("")
    assert run(main, [str(runs), f"--output_dir={out}"]) == 0
    shown, warned = capsys.readouterr()
    said = f"2 of 3 runs are not finished and left out of the scores on test: {first}, {second}"
    assert [line for line in warned.splitlines() if "WARNING" in line] == [f"WARNING: {said}"]
    left_out = next(line for line in shown.splitlines() if line.startswith("left out: "))
    assert str(damaged) in left_out
    comments = [line for line in (out / "table.tex").read_text().splitlines() if line.startswith("%")]
    assert comments[-2:] == [f"% {said}", f"% {left_out}"]


@pytest.mark.usefixtures("no_pictures")
def test_of_many_runs_the_screen_names_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.compare.groups.MOST_NAMES", 1)
    runs, out = tmp_path / "runs", tmp_path / "out"
    names = [str(make_run(runs / name, seed=seed, finished=False)) for seed, name in enumerate("abc")]
    assert run(main, [str(runs), f"--output_dir={out}"]) == 0
    assert f": {names[0]} and 2 more\n" in capsys.readouterr().err
    assert ", ".join(names) in (out / "table.tex").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_runs_that_have_ended_need_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "runs")
    assert run(main, [str(tmp_path / "runs"), f"--output_dir={tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().err == ""
