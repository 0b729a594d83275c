"""A task's own scores: what it declares of them is obeyed, and readers find a benchmark of one's own."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare.__main__ import main as compare
from benchmarks.predict.__main__ import main as predict
from benchmarks.sweep.space import Metric, Sweep
from dataset.cli import run
from dataset.flair.mini import write_mini
from tests.benchmarks.compare.conftest import no_pictures as no_pictures
from tests.benchmarks.compare.conftest import page_alone as page_alone
from tests.benchmarks.core import regression, rotation
from tests.benchmarks.core.test_rotation import SPEC
from tests.benchmarks.run_files import error_line, lines, results
from tests.benchmarks.sparing import run_into

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.xdist_group("own scores")  # `folder` takes seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of the regression, by ``evaluation.best_by``, and one of rotation."""
    top = tmp_path_factory.mktemp("own")
    write_mini(top / "images.hdf5", SPEC)
    for name, words in RUNS.items():
        _train(regression.main, top, top / "runs" / name, *QUICK, *words)
    _train(rotation.main, top, top / "rotation", *QUICK, "--federated.num_rounds=1")
    return top


RUNS = {name: ("--federated.num_rounds=4", f"--evaluation.best_by={name}") for name in ("MAE", "last")}
QUICK = (
    "--runtime.progress=false",
    "--runtime.threads=1",
    "--model.arch=lenet",
    "--local.learning_rate=0.02",
)


def _train(main: object, top: Path, directory: Path, *argv: str, code: int = 0) -> None:
    run_into(main, directory, f"--data_path={top / 'images.hdf5'}", *argv, code=code)  # type: ignore[arg-type]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_IMPORT", "tests.benchmarks.core.regression")
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_the_best_model_has_the_lowest_error(folder: Path) -> None:
    said = results(folder / "runs" / "MAE")
    tracked = {line["round"]: line["val"]["MAE"] for line in lines(folder / "runs" / "MAE") if "val" in line}
    assert len(set(tracked.values())) > 1
    assert said["val"]["MAE"] == pytest.approx(min(tracked.values()))
    assert said["best_step"] == min(tracked, key=lambda step: tracked[step])
    assert said["score_kinds"] == {"lower_is_better": ["MAE"], "units": {"R2": "", "MAE": "turns"}}


def test_a_task_that_declares_nothing_writes_nothing(folder: Path) -> None:
    assert "score_kinds" not in results(folder / "rotation")


def test_the_final_table_has_units_and_enough_decimals(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(regression.main, folder, folder / "runs" / "MAE", *QUICK, *RUNS["MAE"])
    text = capsys.readouterr().out
    assert "MAE (turns)" in text
    (row,) = re.findall(r"^test, best model +(\S+) +(\S+)$", text, re.MULTILINE)
    exact = [results(folder / "runs" / "MAE")["test"][name] for name in ("R2", "MAE")]
    assert [float(cell) for cell in row] == pytest.approx(exact, abs=5e-4)


def test_compare_ranks_and_labels_as_the_task_declares(
    folder: Path, tmp_path: Path, own: None, no_pictures: None
) -> None:
    out = tmp_path / "out"
    assert run(compare, [str(folder / "runs"), f"--output_dir={out}", "--target=0.5"]) == 0
    table = (out / "table.tex").read_text()
    assert "MAE on test (turns)" in table
    assert "R2 on test" in table
    assert "R2 on test (" not in table
    assert r"MAE on test (\%)" not in table
    means = {name: results(folder / "runs" / name)["test"]["MAE"] for name in RUNS}
    better = min(means, key=lambda name: means[name])
    bold = re.findall(r"\\textbf\{([\d.]+)", table)
    assert f"{means[better]:.3f}" in bold
    worse = max(means, key=lambda name: means[name])
    assert f"{means[worse]:.3f}" not in bold
    with (out / "compare.csv").open() as file:
        every = list(csv.DictReader(file))
    rows = [row for row in every if row["section"] == "test, best model"]
    assert {(row["measure"], row["unit"]) for row in rows} == {
        ("loss", "loss"),
        ("R2", "number"),
        ("MAE", "turns"),
    }
    page = (out / "compare.html").read_text()
    assert "MAE (turns)" in page
    assert "0.500 turns MAE on val, as asked for" in page
    assert "from above where lower is better (MAE)" in page
    assert "MAE (%)" not in page
    users = {row["measure"] for row in every if "users' MAE" in row["section"]}
    assert {"worst decile", "best decile"} <= users


def test_older_results_are_read_as_the_task_declares_today(
    folder: Path, tmp_path: Path, own: None, no_pictures: None
) -> None:
    for name in RUNS:
        shutil.copytree(folder / "runs" / name, tmp_path / "old" / name)
        path = tmp_path / "old" / name / "results.json"
        said = json.loads(path.read_text())
        del said["score_kinds"]
        path.write_text(json.dumps(said))
    assert run(compare, [str(tmp_path / "old"), f"--output_dir={tmp_path / 'out'}"]) == 0
    assert "MAE on test (turns)" in (tmp_path / "out" / "table.tex").read_text()


def test_the_training_curve_has_no_percent(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    from benchmarks.reporting import plots

    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "save", lambda figure, path: drawn.append(figure))
    history = lines(folder / "runs" / "MAE")
    plots.training_curve(
        history, "round", ("R2", "MAE"), "t", tmp_path / "a.png", regression.Angle().score_kinds
    )
    plots.training_curve(
        [{"round": 0, "val": {"accuracy": 3.0, "loss": 1.0}}], "round", ("accuracy",), "t", tmp_path / "b.png"
    )
    ours, usual = (figure.axes[0] for figure in drawn)
    assert (ours.get_ylabel(), usual.get_ylabel()) == ("score on val", "score on val (%)")
    assert usual.get_ylim() == (0, 100)
    assert ours.get_ylim() != (0, 100)
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels[:2] == ["R2", "MAE (turns)"]


def test_a_declaration_of_a_score_that_there_is_not_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(regression.Angle, "lower_is_better", ("mae",))
    _train(regression.main, folder, tmp_path / "run", *QUICK, code=2)
    assert "Angle.lower_is_better has 'mae', which is not one of the scores" in error_line(capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("headline, goal", [(("R2", "MAE"), "maximize"), (("MAE", "R2"), "minimize")])
def test_a_sweep_without_a_metric_ranks_by_the_headline_the_right_way_round(
    headline: Sequence[str], goal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regression.Regression, "headline", headline)
    monkeypatch.setattr(Sweep, "experiment", regression.Regression)
    sweep = Sweep("grid", ["${args}"])
    assert sweep.ranking == Metric(f"val/{headline[0]}", goal)  # type: ignore[arg-type]


def test_a_run_of_rotation_is_compared_and_predicted_as_it_is(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    no_pictures: None,
) -> None:
    """With FL_IMPORT set to its file; without, the reason says so."""
    words = [str(folder / "rotation"), f"--output_dir={tmp_path / 'out'}"]
    monkeypatch.delenv("FL_IMPORT", raising=False)
    assert run(compare, words) == 2
    said = error_line(capsys)
    assert "if it is of a benchmark of your own, set FL_IMPORT to the file of that" in said
    assert "make the run again" not in said
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("FL_IMPORT", "nothing_of_mine")
    assert run(compare, [words[0], *words]) == 2
    assert error_line(capsys).startswith("error: FL_IMPORT names nothing_of_mine, which cannot be imported")
    monkeypatch.setenv("FL_IMPORT", "tests.benchmarks.core.rotation")
    assert run(compare, words) == 0
    assert r"within a tenth on test (\%)" in (tmp_path / "out" / "table.tex").read_text()
    out = tmp_path / "predictions.csv"
    asked = ["--split=test", f"--output={out}", f"--data_path={folder / 'images.hdf5'}"]
    assert run(predict, [str(folder / "rotation"), *asked]) == 0
    head, first, *_ = out.read_text(encoding="utf-8").splitlines()
    assert head == "user,image,truth,turn", "an angle is no label, and its estimate no probability"
    truth, estimate = map(float, first.split(",")[2:])
    assert 0 < abs(truth) <= 1
    assert np.isfinite(estimate)
