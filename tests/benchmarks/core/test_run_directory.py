"""Where a run's files lie if the command does not say."""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from benchmarks.core.config.digests import config_tree
from benchmarks.core.mini import CLASSES_FILE
from benchmarks.core.run_directory import RunDirectory, directory_of
from benchmarks.flair.config import parse
from benchmarks.flair.train import Flair, main
from benchmarks.visual_classification.train import VisualClassification
from dataset.cli import run
from dataset.files import write_bytes, write_json
from dataset.flair.mini import write_mini
from dataset.store.hdf5 import DataFile
from tests.benchmarks.conftest import SMALL, TINY, Train
from tests.benchmarks.made_runs import make_run
from tests.benchmarks.run_files import error_line, results
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
    assert capsys.readouterr().out.count("this run has already finished; its results, from") == 2


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


def test_the_config_of_a_run_brings_the_runs_file(
    train: Train,
    mini_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no mini set with a scale of its own where that file is gone."""
    data = tmp_path / "own.hdf5"
    data.write_bytes(mini_file.read_bytes())
    network = ("--model.dropout=true", "--model.arch=squeezenet1_1", "--federated.cohort_size=1")
    first = train(f"--data_path={data}", *network, "--federated.num_rounds=1", name="first")
    words = ["--config", str(first / "config.yaml")]

    def again(*more: str, code: int = 0) -> str:
        with sparingly():
            assert run(main, [*words, *more, "--runtime.progress=false"]) == code
        return capsys.readouterr().err

    assert "is removed (layers" not in capsys.readouterr().out
    again(f"--run_dir={tmp_path / 'second'}")
    assert results(tmp_path / "second") | {"wall_clock_s": 0} == results(first) | {"wall_clock_s": 0}
    data.rename(tmp_path / "moved.hdf5")
    assert f"the data file of its run, {data}, which is not there: give it with --data_path" in again(
        "--seed=7", code=2
    )
    again("--seed=7", f"--run_dir={tmp_path / 'third'}", f"--data_path={tmp_path / 'moved.hdf5'}")
    write_mini(data, replace(TINY, train_users=9))
    assert f"belongs to a run on other data than {data} has now" in again("--seed=8", code=2)
    said = json.loads((first / "results.json").read_text())
    (first / "results.json").unlink()
    monkeypatch.chdir(tmp_path)  # where there is no data/flair.hdf5
    assert "needs the data file of its run, data/flair.hdf5, which is not there" in again("--seed=8", code=2)
    write_json(first / "results.json", {"dataset": said["dataset"]})  # as of a public release
    (first / "checkpoint" / "data.json").unlink()
    again("--seed=8", f"--run_dir={tmp_path / 'fourth'}")


def test_the_config_of_a_run_with_another_data_set_brings_no_file(
    vision: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = vision("--federated.num_rounds=1", name="first")
    words = ["--config", str(first / "config.yaml")]
    monkeypatch.chdir(tmp_path)
    assert VisualClassification.resolve_data(words) == (words, Path(results(first)["dataset"]))
    other = [*words, "--data.dataset", "cifar100"]
    assert VisualClassification.resolve_data(other)[1] == CLASSES_FILE


def test_no_scale_is_laid_over_the_config_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that was killed names no file, which is known by its fingerprint."""
    monkeypatch.chdir(tmp_path)
    config = Flair.benchmark.parse(["--config", "fl-r-17", "--federated.cohort_size=7"]).config
    write_bytes(tmp_path / "run" / "config.yaml", yaml.safe_dump(config_tree(config)).encode())
    words = ["--config", "run/config.yaml"]
    with pytest.raises(ValueError, match=r"needs the data file of its run, data/flair.hdf5, which is not"):
        Flair.resolve_data(words)
    stand_in = Flair.source(config).mini.path
    assert Flair.resolve_data([*words, "--data_path=mini"]) == ([*words, "--data_path=mini"], stand_in)
    write_mini(stand_in, TINY)
    with DataFile(stand_in) as file:
        write_json(tmp_path / "run" / "checkpoint" / "data.json", {"sha256": file.fingerprint})
    assert Flair.resolve_data(words) == (words, stand_in)


def test_what_is_said_of_a_longer_run_can_be_typed(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = train("--runtime.keep_checkpoints=false")
    train("--federated.num_rounds=4", code=2)
    said = error_line(capsys)
    words = re.search(r"--run_dir; to start a new run from its model, add (--.*)", said)
    assert words is not None, said
    train(*words[1].split(), "--federated.num_rounds=1", name="more")
    assert results(tmp_path / "more")["weights"]["sha256"] == results(directory)["model_sha256"]


def test_what_is_said_of_a_network_with_groupnorm_can_be_typed(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors do not show the groups."""
    scratch = ("--model.arch=shufflenet_v2_x0_5", "--model.input_size=16", "--model.pretrained=false")
    words = (*scratch, "--federated.cohort_size=1", "--local.max_images=1", "--model.groups=4")
    first = train(*words, "--federated.num_rounds=1", "--runtime.keep_checkpoints=false")
    train(*words, "--federated.num_rounds=4", code=2)
    said = re.search(r"--run_dir; to start a new run from its model, add (--.*)", error_line(capsys))
    assert said is not None
    assert "--model.norm group" in said[1]
    again = (*words[:-2], *said[1].split(), "--local.max_images=1", "--federated.num_rounds=1")
    train(*again, name="more", code=2)
    assert (
        "model.groups is 32, but the weights of shufflenet_v2_x0_5 were trained with other groups: "
        "set it to 4" in error_line(capsys)
    )
    train(*again, "--model.groups=4", "--model.normalisation=half", name="more", code=2)
    assert "were trained on another input: set it to imagenet" in error_line(capsys)
    train(*again, "--model.groups=4", name="more")
    begun = results(tmp_path / "more")
    assert begun["weights"]["sha256"] == results(first)["model_sha256"]
    assert begun["start_probe"] == results(first)["model_probe"]


def test_metrics_that_cannot_be_flushed_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RunDirectory(parse(["--config=fl-r-17"]), tmp_path)
    files.append({"round": 0})

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"metrics\.jsonl cannot be written: No space left on device"):
        files.flushed()
