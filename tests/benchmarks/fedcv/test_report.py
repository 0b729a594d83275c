"""FedCV's tasks in one table: seeds together, the paper's number only where it belongs, what is left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.core.ledger import PUBLIC_RESULTS
from benchmarks.fedcv import report
from benchmarks.fedcv.classification import config, train
from benchmarks.fedcv.paper import ACCURACY, DATA
from dataset.cli import run
from tests.benchmarks.fedcv.test_classification import small_run
from tests.benchmarks.run_files import results

Made = Callable[..., Path]


def test_each_number_of_the_paper_has_a_setting_that_names_it() -> None:
    of_the_paper = {name for name in config.CLASSIFICATION.settings if name.startswith(tuple(DATA))}
    assert set(ACCURACY) == of_the_paper
    for name, accuracy in ACCURACY.items():
        text = (config.CLASSIFICATION.directory / f"{name}.yaml").read_text()
        assert f"# Expected:  {accuracy + 1e-9:.1f} % test accuracy" in text, name


def test_seeds_are_one_row_and_what_cannot_be_read_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        small_run("cifar100-efficientnet-c", tmp_path, f"seed{seed}", f"--seed={seed}")
    small_run("cifar100-efficientnet-c", tmp_path, "own", "--setting=mine")
    for name in ("other", "run\udce9"):  # the second is no UTF-8
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("setting: none\n")
    capsys.readouterr()
    assert run(report.main, [str(tmp_path), f"--output_dir={tmp_path / 'report'}"]) == 0
    said = capsys.readouterr().out
    assert "| cifar100-efficientnet-c | 0, 1 | accuracy | " in said
    assert "centralised.num_epochs: 400 -> 1" in said
    assert "| mine | 0 | accuracy | " in said
    assert "mine, row 2: a setting of its own (its config.yaml has all values)" in said
    for name in ("other", "run\ufffd"):
        assert f"{tmp_path / name} is not a complete run" in said
    assert (tmp_path / "report" / "report.csv").read_text().startswith("setting,seeds,score,")
    assert run(report.main, [str(tmp_path / "other")]) == 2
    assert "no finished run of FedCV's tasks" in capsys.readouterr().err


def test_a_public_release_has_no_minutes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = small_run("cifar100-efficientnet-c", tmp_path, "run")
    released = {name: value for name, value in results(directory).items() if name in PUBLIC_RESULTS}
    (directory / "results.json").write_text(json.dumps(released))
    assert run(report.main, [str(directory), f"--output_dir={tmp_path / 'report'}"]) == 0
    assert "| - | - | not released |" in capsys.readouterr().out


def test_the_papers_number_stands_beside_its_own_setting_and_data_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = small_run("cifar100-efficientnet-c", tmp_path, "run")
    task, found = report.task_of(directory)
    assert task is train.FederatedClassification
    assert report.cells(task, [found])[5] == "-"
    monkeypatch.setattr(report, "changes", lambda *_: [])
    assert report.cells(task, [found])[5] == "-", "other data"
    classes = len(found.outcome["per_class_accuracy"])
    monkeypatch.setitem(DATA, "cifar100", (classes, found.data["images"]["train"]))
    assert report.cells(task, [found])[5] == str(ACCURACY["cifar100-efficientnet-c"])
