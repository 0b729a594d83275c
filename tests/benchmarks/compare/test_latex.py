"""The table for a paper: LaTeX can read it, and every number follows from the CSV."""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.compare import tables
from benchmarks.compare.latex import latex
from benchmarks.compare.reading import compare
from benchmarks.core.privacy_statement import rounded_up
from benchmarks.reporting.booktabs import escaped
from tests.benchmarks.compare.test_compare import hostile, whole_run
from tests.benchmarks.made_runs import LOCALLY, make_run
from tests.benchmarks.visual_classification.test_visual_classification import made_run

COMMAND = re.compile(r"\\(?:[A-Za-z]+(?![A-Za-z])|[^A-Za-z])")
MATHS = re.compile(
    r"\$(?:n|n = \d+|\^\\dagger|\\pm|-|\\varepsilon|\\delta|(?:([\d.]+) \\times )?10\^\{(-\d+)\})\$"
)


def e_form(power: re.Match[str]) -> str:
    """``8.4e-6`` for what LaTeX prints as a multiple of a power of ten."""
    return f"{power[1] or 1}e{power[2]}"


def rows_of(text: str) -> list[list[str]]:
    """The rows, of a table that has been read strictly: nothing in it could stop LaTeX."""
    assert text.replace("\n", "").isprintable()
    body = [line for line in text.splitlines() if not line.startswith("%")]
    assert all(line.isascii() for line in body)
    without = "\n".join(body).replace(r"\textbackslash{}", "")
    depth = 0
    for letter in re.sub(r"\\[{}]", "", without):
        depth += {"{": 1, "}": -1}.get(letter, 0)
        assert depth >= 0
    assert depth == 0
    assert re.findall(r"\\begin\{(\w+)\}", without) == ["table", "tabular"]
    assert re.findall(r"\\end\{(\w+)\}", without) == ["tabular", "table"]
    columns = re.search(r"\\begin\{tabular\}\{(l[r]*)\}", without)
    assert columns is not None
    first, end = body.index(r"\toprule"), body.index(r"\bottomrule")
    rows = [line for line in body[first + 1 : end] if line != r"\midrule"]
    cells = []
    for row in rows:
        assert row.endswith(r" \\")
        assert not re.match(r"\s*[\[*]", row), "an option of the row's end before it"
        inner = re.sub(MATHS, "", row.removesuffix(r" \\"))
        assert not re.search(r"[$#%&_^~\\]", re.sub(COMMAND, "", inner).replace(" & ", "")), row
        cells.append(re.split(r" & ", row.removesuffix(r" \\")))
        assert len(cells[-1]) == len(columns[1])
    return cells


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two settings with two seeds each, one of them better; a private run, and one that has not ended."""
    top = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        whole_run(top / f"a{seed}", seed=seed, shift=float(seed))
        whole_run(top / f"b_{seed}", "--local.learning_rate=0.3", seed=seed, shift=10 + 2.0 * seed)
    make_run(top / "private", "pfl-r-17")
    make_run(top / "local", "pfl-r-17", *LOCALLY)
    make_run(top / "half", "c-r-17", finished=False)
    return top


def test_every_number_follows_from_the_csv(folder: Path) -> None:
    comparison = compare([folder])
    found = list(csv.DictReader(tables.csv(comparison).splitlines()))
    text = latex(comparison, "python -m benchmarks.compare")
    assert f"the runs are of commit {'c' * 40}\n" in text
    heads, *rows = rows_of(text)

    def values(group: str, section: str, measure: str) -> list[float]:
        wanted = group, section, measure
        return [
            float(line["value"])
            for line in found
            if (line["group"], line["section"], line["measure"]) == wanted and line["state"] == "finished"
        ]

    def words(numbers: list[float]) -> str:
        deviation = f" $\\pm$ {statistics.stdev(numbers):.2f}" if len(numbers) > 1 else ""
        return f"{statistics.fmean(numbers):.2f}{deviation}" if numbers else "--"

    assert heads == [
        "setting", "$n$", r"C-AP exact on test (\%)", r"O-AP exact on test (\%)",
        r"worst decile, users' O-AP exact, seen in training (\%)",
        r"worst decile, users' O-AP exact, new (\%)",
        r"$\varepsilon$", r"$\delta$", "MB", "rounds or epochs",
    ]  # fmt: skip
    assert any(r" \times 10^{-" in row[7] for row in rows)
    groups = [group.label for group in comparison.groups]
    assert [row[0] for row in rows] == [escaped(label) for label in groups]
    for label, row in zip(groups, rows, strict=True):
        plain = [re.sub(r"\\textbf\{(.*)\}", r"\1", cell) for cell in row]
        scores = [values(label, "test, best model", name) for name in ("C-AP exact", "O-AP exact")]
        assert plain[1:4] == [str(len(scores[0])), *map(words, scores)]
        users = "users' O-AP exact"
        kinds = ", seen in training", ", new"
        assert plain[4:6] == [words(values(label, f"{users}{kind}", "worst decile")) for kind in kinds]
        of_group = [one for one in found if one["group"] == label]
        spent = [float(one["value"]) for one in of_group if one["section"] == "privacy"]
        shown = {
            float(number)
            for number in re.findall(r"\b\d[\d.e-]*", f"{plain[6]} {MATHS.sub(e_form, plain[7])}")
        }
        assert shown <= {float(rounded_up(number)) for number in spent}
        assert (len(shown) > 2) == label.startswith("PFL")
        sent = values(label, "bytes", "the whole run")
        assert plain[8] == (f"{statistics.fmean(sent) / 1e6:.3g}" if sent else "--")
        done = [float(one["value"]) for one in of_group if one["measure"].endswith("s done")]
        assert plain[9] == f"{statistics.fmean(done):.0f}"
    assert [row[2].startswith(r"\textbf") for row in rows] == [label.endswith("rate 0.3") for label in groups]
    assert not any(r"\textbf" in cell for row in rows for cell in row[4:]), "all groups have the same"


def test_one_group_has_no_best_value(folder: Path) -> None:
    text = latex(compare([folder / "a0", folder / "a1"]), "x")
    (_, row) = rows_of(text)
    assert row[2].count(r"$\pm$") == 1
    assert "textbf" not in text
    assert "varepsilon" not in text


def test_groups_of_several_kinds_are_judged_by_the_first_score_of_each(folder: Path, tmp_path: Path) -> None:
    for name, score in (("cifar10-fedavg", 40.0), ("cifar10-fedavgm", 50.0)):
        made_run(tmp_path / name, name, 0, score)
    heads, *rows = rows_of(latex(compare([folder / "a0", tmp_path]), "x"))
    assert heads[2] == r"first score on test (\%)"
    cells = {row[0]: row[2] for row in rows}
    assert cells["FL-R-17"].startswith("C-AP exact "), "and is the only one of its kind"
    assert cells["cifar10-fedavgm"] == r"accuracy \textbf{49.00}"
    assert cells["cifar10-fedavg"] == "accuracy 39.00"


def test_a_score_that_is_no_number_is_not_the_best_and_fewer_seeds_are_counted(tmp_path: Path) -> None:
    for name, rate, seed, score in (("a", 0.1, 0, math.nan), ("b", 0.2, 0, 60.0), ("c", 0.3, 0, 50.0)):
        directory = make_run(tmp_path / name, "fl-r-17", f"--local.learning_rate={rate}", seed=seed)
        path = directory / "results.json"
        content = json.loads(path.read_text())
        path.write_text(json.dumps(content | {"test": content["test"] | {"C-AP": score}}))
    whole_run(tmp_path / "more", "--local.learning_rate=0.2", seed=1)
    make_run(tmp_path / "more_of_c", "fl-r-17", "--local.learning_rate=0.3", seed=1)
    _, *rows = rows_of(latex(compare([tmp_path]), "x"))
    cells = {row[0].rpartition(" ")[2]: row for row in rows}
    assert [cells[rate][2].startswith(r"\textbf") for rate in ("0.1", "0.2", "0.3")] == [False, True, False]
    assert cells["0.2"][1] == "2"
    assert cells["0.2"][4].endswith(" ($n = 1$)"), "of one seed users were not scored"


BETTER = 5.0
OTHERS = {
    "images held out from training": ["--federated.algorithm=ditto"],
    "size of the images": ["--data.image_size=288"],
    "size of the network": ["--model.input_size=192"],
    "partition": ["--data.partition=iid-clients-10-seed-0"],
}


@pytest.mark.parametrize("argv", OTHERS.values(), ids=OTHERS)
def test_bold_is_the_best_of_equal_images_alone(argv: list[str], tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    two = make_run(tmp_path / "two", "fl-r-17", *argv, shift=BETTER)
    score = json.loads((two / "results.json").read_text())["test"]["C-AP"]
    assert r"\textbf" not in latex(compare([tmp_path]), "x")
    make_run(tmp_path / "three", "fl-r-17", *argv, "--local.learning_rate=0.3")
    text = latex(compare([tmp_path]), "x")
    (best,) = [row for row in rows_of(text)[1:] if r"\textbf" in row[2]]
    assert best[2] == rf"\textbf{{{score:.2f}}}"
    assert "Bold: the best mean of those with the same data, classes, partition, image sizes, " in text


def test_users_are_held_out_alike_where_none_of_their_images_is(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    none = ("--federated.algorithm=ditto", "--federated.options.held_out=0")
    make_run(tmp_path / "two", "fl-r-17", *none, shift=BETTER)
    assert r"\textbf" in latex(compare([tmp_path]), "x")


def test_bold_is_the_best_of_as_many_seeds(tmp_path: Path) -> None:
    make_run(tmp_path / "one")
    make_run(tmp_path / "lucky", "fl-r-17", "--local.learning_rate=0.3", shift=BETTER)
    assert r"\textbf" in latex(compare([tmp_path]), "x")
    make_run(tmp_path / "again", seed=1)
    assert r"\textbf" not in latex(compare([tmp_path]), "x")


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"a_b 5% & #1 $x$ {y}", r"a\_b 5\% \& \#1 \$x\$ \{y\}"),
        (r"\input{x}~^", r"\textbackslash{}input\{x\}\textasciitilde{}\textasciicircum{}"),
        ("[1] *", "{[}1{]} {*}"),
        ("Zoë Łódź ±", r"Zo\"{e} U+0141\'{o}d\'{z} $\pm$"),
        ("e\u0301 中 a\nb\u202ec", r"\'{e} U+4E2D aU+FFFDbU+FFFDc"),
    ],
)
def test_names_are_printed_as_they_are(text: str, expected: str) -> None:
    assert escaped(text) == expected


def test_a_table_of_runs_under_way_says_that_none_has_ended(folder: Path) -> None:
    assert latex(compare([folder / "half"]), "command").splitlines()[2].endswith("; no run has ended")


def test_names_can_do_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comparison = hostile(tmp_path, monkeypatch)
    text = latex(comparison, "python \n\\input{/etc/passwd}")
    assert [line for line in text.splitlines() if "passwd" in line] == [text.splitlines()[1]]
    _, *rows = rows_of(text)
    assert len(rows) == len(comparison.groups)
    assert "FL-R-17 (\\$x\\textasciicircum{}\\$)" in [row[0] for row in rows]
