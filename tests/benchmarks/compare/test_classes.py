"""Scores of single classes: in the CSV, and in a table with a row for each class."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.compare import tables
from benchmarks.compare.__main__ import WRITTEN, main
from benchmarks.compare.latex import latex_classes
from benchmarks.compare.reading import compare
from tests.benchmarks.compare.test_latex import rows_of
from tests.benchmarks.made_runs import make_run
from tests.benchmarks.visual_classification.test_visual_classification import made_run

RATE = "--local.learning_rate=0.3"
SECTION = "AP of each class on test, best model"


def two_groups(folder: Path) -> None:
    """Two seeds of each of two groups, of which the second is better in one class."""
    for seed in (0, 1):
        make_run(folder / f"a{seed}", seed=seed, shift=float(seed))
        scores = {"animal": 50.0 + seed, "food": 60.0, "fire": None if seed else float("nan")}
        make_run(folder / f"b{seed}", "fl-r-17", RATE, seed=seed, per_class_ap=scores)


def test_each_class_is_a_row_of_the_csv_and_of_a_table(tmp_path: Path) -> None:
    two_groups(tmp_path)
    comparison = compare([tmp_path])
    lines = [
        line for line in csv.DictReader(tables.csv(comparison).splitlines()) if line["section"] == SECTION
    ]
    found = [(Path(line["run"]).name, line["measure"], float(line["value"])) for line in lines]
    assert found[:3] == [("a0", "animal", 40.0), ("a0", "food", 60.0), ("a0", "fire", 5.0)]
    assert [line for line in found if line[0] == "b1"] == [("b1", "animal", 51.0), ("b1", "food", 60.0)]
    assert rows_of(latex_classes(comparison, "command")) == [
        ["class", r"FL-R-17, learning\_rate 0.1", r"FL-R-17, learning\_rate 0.3"],
        ["$n$", "2", "2"],
        ["animal", r"40.50 $\pm$ 0.71", r"\textbf{50.50 $\pm$ 0.71}"],
        ["food", r"60.00 $\pm$ 0.00", r"60.00 $\pm$ 0.00"],
        ["fire", r"5.00 $\pm$ 0.00", "--"],
    ]


def test_groups_with_other_classes_have_a_table_of_their_own(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", "fl-r-17", RATE, per_class_ap={"a_b": 1.0})
    made_run(tmp_path / "three", "cifar10-fedavg", 0, 40.0)
    text = latex_classes(compare([tmp_path]), "command")
    labels = [line for line in text.splitlines() if line.startswith(r"\label")]
    assert labels == [rf"\label{{tab:classes-{name}}}" for name in ("accuracy", "ap", "ap-2")]
    assert r"a\_b & 1.00 \\" in text


def test_a_class_that_is_not_on_test_has_no_score(tmp_path: Path) -> None:
    make_run(tmp_path / "run", prevalence={"animal": 0.2, "food": 0.3, "fire": 0.0})
    assert [row[0] for row in rows_of(latex_classes(compare([tmp_path]), "x"))] == [
        "class", "$n$", "animal", "food",
    ]  # fmt: skip


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("number", "is_written"), [(40, True), (41, False)])
def test_a_table_of_many_classes_is_not_written(number: int, is_written: bool, tmp_path: Path) -> None:
    """Files of an earlier comparison do not stay beside the new tables; those that others wrote do."""
    own = [tmp_path / "out" / "charts" / "photo.png", tmp_path / "out" / "charts" / "architecture.pdf"]
    own[0].parent.mkdir(parents=True)
    for path in own:
        path.write_text("own")
    make_run(tmp_path / "before", per_class_ap={"a": 1.0, "b": 2.0})
    main([str(tmp_path / "before"), f"--output_dir={tmp_path / 'out'}", "--columns=local.learning_rate"])
    assert (tmp_path / "out" / "classes.tex").exists()
    assert (tmp_path / "out" / "crossed.tex").exists()
    make_run(tmp_path / "run", per_class_ap={f"class {place}": 1.0 for place in range(number)})
    main([str(tmp_path / "run"), f"--output_dir={tmp_path / 'out'}"])
    assert (tmp_path / "out" / "classes.tex").exists() == is_written
    assert not (tmp_path / "out" / "crossed.tex").exists()
    assert (tmp_path / "out" / "compare.csv").read_text().count(SECTION) == number
    assert [path.read_text() for path in own] == ["own", "own"]


@pytest.mark.usefixtures("no_pictures")
def test_an_edited_list_of_files_deletes_nothing_elsewhere(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "mine").write_text("own")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / WRITTEN).write_text("../mine\ncharts/../../mine\n" + str(tmp_path / "mine"))
    main([str(tmp_path / "run"), f"--output_dir={tmp_path / 'out'}"])
    assert (tmp_path / "mine").read_text() == "own"
