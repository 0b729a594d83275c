"""Where a run's files lie if the command does not say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.core.run_directory import directory_of
from benchmarks.flair.config import parse
from benchmarks.flair.train import main
from dataset.cli import run
from tests.benchmarks.conftest import SMALL
from tests.benchmarks.made_runs import make_run
from tests.benchmarks.sparing import sparingly


def test_each_config_has_a_folder_of_its_own_where_none_is_named(
    mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--config=fl-r-17", f"--data_path={mini_file}", *SMALL]
    for _ in range(2):
        for more in ([], ["--local.learning_rate=0.07"]):
            with sparingly():
                assert run(main, [*words, *more]) == 0
    plain, other = sorted((tmp_path / "runs").iterdir())
    assert plain.name == "fl-r-17-tiny-seed0"
    assert re.fullmatch(rf"{plain.name}-[0-9a-f]+", other.name)
    assert "learning_rate: 0.07" in (other / "config.yaml").read_text()
    assert capsys.readouterr().out.count("this run had ended before") == 2


def test_a_folder_names_another_algorithm_than_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for a run that began when no folder did."""
    monkeypatch.chdir(tmp_path)
    data = Path("data/tiny.hdf5")

    def place(*words: str) -> str:
        return directory_of(parse(["--config=fl-r-17", *words]), data).name

    assert place() == "fl-r-17-tiny-seed0"
    scaffold = ["--federated.algorithm=scaffold", "--seed=3"]
    assert place(*scaffold) == "fl-r-17-scaffold-tiny-seed3"
    made = make_run(tmp_path / "runs" / "fl-r-17-tiny-seed3", "fl-r-17", scaffold[0], seed=3)
    assert place(*scaffold) == made.name
    assert place(*scaffold, "--local.learning_rate=0.07") == "fl-r-17-scaffold-tiny-seed3"
    assert re.fullmatch("fl-r-17-tiny-seed3-[0-9a-f]+", place("--seed=3"))
    (made / "config.yaml").write_text("no: [yaml")
    assert place(*scaffold) == "fl-r-17-scaffold-tiny-seed3", "FedAvg's folder is damaged, and not its own"
    assert place("--seed=3") == made.name, "where it is refused"
