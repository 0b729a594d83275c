"""By what a later call knows that it is the same sweep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import pytest

from benchmarks.core.config.trees import Tree
from benchmarks.flair.config import FLAIR
from benchmarks.sweep.command import main
from benchmarks.sweep.local import LocalSweep, read_values
from dataset.cli import run
from tests.benchmarks.sweep.conftest import RATES
from tests.benchmarks.sweep.test_space import COMMAND

Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(
    doubled: Callable[..., LocalSweep], mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Call:
    """The command of a sweep whose trials take no time: its exit code, and what it says."""
    config, command = tmp_path / "mine.yaml", [*COMMAND]
    config.write_text((FLAIR.directory / "fl-r-17.yaml").read_text())
    command[command.index("--config=fl-r-17")] = f"--config={config}"
    doubled(RATES, command=command)
    shutil.copy(mini_file, tmp_path / "data.hdf5")
    fixed = ("--local=true", f"--data_path={tmp_path / 'data.hdf5'}", f"--sweep_dir={tmp_path / 'found'}")

    def called(*words: str) -> tuple[int, str]:
        code = run(main, [str(tmp_path / "sweep.yaml"), *fixed, *words])
        said = capsys.readouterr()
        return code, said.out + said.err

    return called


def change(path: Path) -> None:
    """Make other data of a file, as far as its checksum says."""
    with h5py.File(path, "r+") as file:
        file.attrs["content_sha256"] = "f" * 64


def noted(folder: Path, change: Callable[[Tree], Tree]) -> None:
    """Change what a sweep's journal says of the sweep."""
    journal = folder / "found" / "study.journal"
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    for line in lines:
        if "sweep" in line.get("user_attr", {}):
            line["user_attr"]["sweep"] = change(line["user_attr"]["sweep"])
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_sweep_is_its_data_and_config_but_not_its_threads(call: Call, tmp_path: Path) -> None:
    """Trials on other data were ranked with the old ones, and more threads were another sweep."""
    assert call()[0] == 0
    code, said = call("--runtime.threads=1", "--runtime.cache_gb=1")
    assert code == 0
    assert "starts" not in said
    code, said = call("--runtime.accumulate=fp64")
    assert code == 2
    assert "has another sweep (words: " in said
    config = tmp_path / "mine.yaml"
    before = config.read_text()
    config.write_text(before.replace("cohort_size: 200", "cohort_size: 100"))
    code, said = call()
    assert code == 2
    assert "has another sweep (config.federated.cohort_size: 200 -> 100): choose another --sweep_dir" in said
    config.write_text(before)
    assert call()[0] == 0
    change(tmp_path / "data.hdf5")
    code, said = call()
    assert code == 2
    assert "has another sweep (data_sha256: " in said


def test_a_sweep_of_an_earlier_version_goes_on(call: Call, tmp_path: Path) -> None:
    """It noted no content, and all words of the runtime; its trials say which data were theirs."""

    def earlier(sweep: Tree) -> Tree:
        kept = {key: value for key, value in sweep.items() if key not in ("config", "data_sha256")}
        return {**kept, "words": [*kept["words"], "--runtime.threads=3", "--runtime.track=none"]}

    assert call()[0] == 0
    noted(tmp_path, earlier)
    code, said = call()
    assert code == 0
    assert "starts" not in said
    results = next((tmp_path / "found").glob("trials/000*/results.json"))
    tree = json.loads(results.read_text())
    noted(tmp_path, earlier)
    for sha256, wanted in (("a" * 64, 2), (None, 0)):
        results.write_text(json.dumps(tree if sha256 is None else {**tree, "data_sha256": sha256}))
        assert call()[0] == wanted
    change(tmp_path / "data.hdf5")
    assert call()[0] == 2, "noted from then on"


def test_the_files_of_an_ended_trial_are_read_once(
    doubled: Callable[..., LocalSweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were read again at the end of each other trial."""
    read: list[str] = []

    def counted(path: Path, metric: str) -> list[tuple[int, float]]:
        if metric == "seconds":
            read.append(path.parent.name)
        return read_values(path, metric)

    monkeypatch.setattr("benchmarks.sweep.local.read_values", counted)
    sweep = doubled({"local.learning_rate": {"values": [0.1, 0.2, 0.3]}})
    rows = sweep.run()
    assert sorted(read) == [sweep.run_dir(trial).name for trial in sweep.trials()]
    sweep._ended.clear()
    assert sweep.rows() == rows
