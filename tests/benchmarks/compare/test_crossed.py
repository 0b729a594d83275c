"""A table with a column for each value of a key, and a row for each method."""

from __future__ import annotations

import csv
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.compare.__main__ import main
from benchmarks.compare.groups import Comparison
from benchmarks.compare.reading import compare
from tests.benchmarks.compare.test_latex import rows_of
from tests.benchmarks.made_runs import FLAIR, LOCALLY, make_run
from tests.benchmarks.visual_classification.test_visual_classification import made_run

pytestmark = pytest.mark.usefixtures("no_pictures")

RATE, SERVER = "local.learning_rate", "server.learning_rate"
BY_RATE = ("--columns", RATE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Comparison]:
    """FedAvg and SCAFFOLD at three rates, of which SCAFFOLD lacks one; two seeds, but at one place."""
    top = tmp_path_factory.mktemp("runs")
    for rate in (0.5, 0.05, 10.0):
        for seed in (0, 1):
            make_run(top / f"a{rate}{seed}", "fl-r-17", f"--{RATE}={rate}", seed=seed, shift=rate + seed)
            if (rate, seed) != (10.0, 1):
                words = f"--{RATE}={rate}", "--federated.algorithm=scaffold"
                make_run(top / f"b{rate}{seed}", "fl-r-17", *words, seed=seed, shift=2 * rate + 3 * seed)
    return top, compare([top])


@pytest.fixture
def runs(made: tuple[Path, Comparison], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of these runs, which are read once for all tests."""
    top, comparison = made
    monkeypatch.setattr("benchmarks.compare.__main__.compare", lambda _: comparison)
    return top


def written(tmp_path: Path, *argv: str) -> tuple[str, str, list[dict[str, str]]]:
    """What the command wrote: page, table, and the lines of the CSV."""
    main([*argv, "--output_dir", str(tmp_path / "out")])
    page, table, numbers = ((tmp_path / "out" / f) for f in ("compare.html", "crossed.tex", "compare.csv"))
    return page.read_text(), table.read_text(), list(csv.DictReader(numbers.read_text().splitlines()))


def test_columns_are_in_order_and_each_number_follows_from_the_csv(runs: Path, tmp_path: Path) -> None:
    page, text, lines = written(tmp_path, str(runs), *BY_RATE)
    first, *others = re.findall(r"\\begin\{table\}.*?\\end\{table\}", text, re.DOTALL)
    assert len(others) == 1, "a table for each of FLAIR's two scores"
    heads, fedavg, scaffold = rows_of(first)
    assert heads == [r"local.learning\_rate", "0.05", "0.5", "10.0"]
    assert [fedavg[0], scaffold[0]] == ["FL-R-17", "FL-R-17, algorithm scaffold"]
    for row, letter in ((fedavg, "a"), (scaffold, "b")):
        for rate, cell in zip(heads[1:], row[1:]):
            values = [
                float(line["value"])
                for line in lines
                if (line["section"], line["measure"]) == ("test, best model", "C-AP exact")
                and Path(line["run"]).name.startswith(f"{letter}{rate}")
            ]
            shown = f"{statistics.fmean(values):.2f}"
            if len(values) > 1:
                shown += rf" $\pm$ {statistics.stdev(values):.2f}"
            bold = rf"\textbf{{{shown}}}" if len(values) > 1 else f"{shown} (n = 1)"
            assert cell == (shown if letter == "a" else bold), "one seed is not compared with two"
    assert "over 2 seeds, where no other n is named" in text
    assert "local.learning_rate" in re.findall(r"C-AP exact on test \(%\) by ([\w.]+)", page)


def test_rows_of_named_keys_may_differ_in_others_and_say_so(tmp_path: Path) -> None:
    for rate, server in ((0.1, 1.0), (0.2, 0.5)):
        make_run(tmp_path / f"{rate}", "fl-r-17", f"--{RATE}={rate}", f"--{SERVER}={server}")
    _, text, _ = written(tmp_path, str(tmp_path), *BY_RATE)
    _, *rows = rows_of(text[: text.index(r"\end{table}")] + r"\end{table}")
    assert [row[1:].count("--") for row in rows] == [1, 1], "a row for each of the server's rates"
    _, text, _ = written(tmp_path, str(tmp_path), *BY_RATE, "--rows", "federated.algorithm")
    _, row = rows_of(text[: text.index(r"\end{table}")] + r"\end{table}")
    assert row[0] == "FL-R-17"
    assert "--" not in row
    assert r"What else differs along a row: server.learning\_rate." in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--columns", "local.rate"], "no run has a key local.rate that has an effect; the keys that"),
        (["--columns", "local"], "local is a section: name one of its keys, such as local.batch_size"),
        (["--columns", "seed"], "no run has a key seed that has an effect"),
        ([*BY_RATE, "--rows", RATE], f"{RATE} cannot be used for rows and columns at the same time"),
        (["--columns", "federated.algorithm", "--rows", SERVER], r"add the keys in which they differ \("),
        (["--rows", RATE], "--rows can be used only with --columns"),
    ],
)
def test_what_makes_no_table_is_refused(words: list[str], why: str, runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=why):
        written(tmp_path, str(runs), *words)
    assert not (tmp_path / "out" / "compare.html").exists()


def test_one_cell_has_one_group_and_all_are_judged_alike(tmp_path: Path) -> None:
    made_run(tmp_path / "vision", "cifar10-fedavg", 0, 40.0)
    make_run(tmp_path / "one", "fl-r-17")
    with pytest.raises(ValueError, match="--columns needs runs that have the same scores; leave the others"):
        written(tmp_path, str(tmp_path), *BY_RATE)


def table_of(tmp_path: Path, *argv: str) -> tuple[list[list[str]], str]:
    """The rows of the first table, and all that was written."""
    _, text, _ = written(tmp_path, str(tmp_path / "in"), *argv)
    return rows_of(text[: text.index(r"\end{table}")] + r"\end{table}"), text


def test_algorithms_may_be_the_columns(tmp_path: Path) -> None:
    for name in ("fedavg", "fedprox"):
        make_run(tmp_path / "in" / name, "fl-r-17", f"--federated.algorithm={name}")
    rows, _ = table_of(tmp_path, "--columns", "federated.algorithm", "--rows", "data.partition")
    assert [row[0] for row in rows] == [r"federated.algorithm", "FL-R-17"]
    assert rows[0][1:] == ["fedavg", "fedprox"]


def test_a_private_cell_says_what_its_epsilon_is(tmp_path: Path) -> None:
    """A column of asked-for epsilons is no guarantee, and one of local privacy stands under none."""
    make_run(tmp_path / "in" / "central", "pfl-r-17")
    make_run(tmp_path / "in" / "local", "pfl-r-17", *LOCALLY)
    make_run(tmp_path / "in" / "none", "fl-r-17")
    rows, text = table_of(tmp_path, "--columns", "privacy.epsilon")
    assert rows[0][1:] == ["2.0", "none"]
    said = text[: text.index(r"\label")]
    assert ", 2.0: epsilon 2 simulated, 4.72 as executed, delta 8.4e-06. " in said
    assert re.search(r"PFL-R-17, [^,.]*, none: epsilon 8 for one update; ", said)
    assert "FL-R-17, none: epsilon" not in said.replace("PFL-R-17", "")


def test_other_data_along_a_row_is_said(tmp_path: Path) -> None:
    make_run(tmp_path / "in" / "one", "fl-r-17", f"--{RATE}=0.1")
    make_run(tmp_path / "in" / "two", "fl-r-17", f"--{RATE}=0.2", data={**FLAIR, "content_sha256": "f" * 64})
    assert "What else differs along a row: the data." in table_of(tmp_path, *BY_RATE)[1]


def test_runs_that_have_not_ended_have_no_numbers(tmp_path: Path) -> None:
    make_run(tmp_path / "in" / "half", "fl-r-17", finished=False)
    rows, text = table_of(tmp_path, *BY_RATE)
    assert rows[1][1:] == ["--"]
    assert "No run has ended." in text


def test_names_take_the_place_of_labels_everywhere_and_order_the_groups(runs: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.yaml"
    names.write_text("FL-R-17, algorithm scaffold: SCAFFOLD\nFL-R-17: FedAvg\n10.0: ten\n")
    page, text, _ = written(tmp_path, str(runs), *BY_RATE, "--names", str(names))
    first = re.findall(r"\\begin\{table\}.*?\\end\{table\}", text, re.DOTALL)[0]
    heads, *rows = rows_of(first)
    assert heads[1:] == ["0.05", "0.5", "ten"]
    assert [row[0] for row in rows] == ["SCAFFOLD", "FedAvg"]
    assert r"\textbf" in rows[0][2], "cells go with their rows"
    assert "algorithm scaffold" not in page.split("<h2")[2]
    table = (tmp_path / "out" / "table.tex").read_text()
    assert table.rindex("algorithm scaffold") < table.index("FL-R-17, learning"), "as their rows"
    alone = ("FL-R-17, algorithm scaffold, learning_rate 10.0", "FL-R-17, learning_rate 0.5")
    names.write_text(f"{alone[0]}: SCAFFOLD at 10\n{alone[1]}: FedAvg at a half\n")
    _, text, lines = written(tmp_path, str(runs), *BY_RATE, "--names", str(names))
    assert text.index("FL-R-17, algorithm scaffold &") < text.index("FL-R-17 &"), "as their groups"
    groups = list(dict.fromkeys(line["group"] for line in lines))
    assert groups[:2] == ["SCAFFOLD at 10", "FedAvg at a half"]
    assert len(groups) == 6
    table = (tmp_path / "out" / "table.tex").read_text()
    assert table.index("SCAFFOLD at 10") < table.index("FedAvg at a half") < table.index("FL-R-17")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fedavg: FedAvg", "there is no group or run named 'fedavg'; there are FL-R-17,"),
        ("FL-R-17: FedAvg\nFL-R-17, algorithm scaffold: FedAvg", "--names gives the name 'FedAvg' to two"),
        ("FL-R-17: [a, b]", "the name of 'FL-R-17' is not text; put it in quotes"),
        ("FL-R-17: ''", "the name of 'FL-R-17' is not text; put it in quotes"),
        ("[", "is not valid YAML:"),
    ],
)
def test_names_that_cannot_be_are_refused(text: str, message: str, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "names.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        written(tmp_path, str(runs), *BY_RATE, "--names", str(tmp_path / "names.yaml"))
    (tmp_path / "names.yaml").unlink()
    with pytest.raises(ValueError, match=r"^--names .*names\.yaml"):
        written(tmp_path, str(runs), *BY_RATE, "--names", str(tmp_path / "names.yaml"))
    assert not (tmp_path / "out" / "compare.html").exists()
