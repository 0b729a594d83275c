"""The report: what it compares, what it refuses to compare, and what it says of runs that are not whole."""

from __future__ import annotations

import copy
import csv
import dataclasses
import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.core.config.digests import experiment_digest
from benchmarks.flair import report
from benchmarks.flair.config import Config, parse
from benchmarks.flair.paper import variant
from benchmarks.flair.report import collect, latex, main, markdown, table_csv
from benchmarks.flair.results import draw, final_rows, show
from benchmarks.flair.table import tolerance
from dataset.cli import run
from pfl_ext.algorithms.per_user import spreads_by_group
from pfl_ext.models.pretrained import PACKAGED
from pfl_ext.tasks.multi_label_scores import COLUMNS, EXACT, for_people, shown, summarise
from tests.benchmarks.made_runs import FLAIR, LOCALLY, make_run


def rows(text: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(line["row"], line["column"]): line for line in csv.DictReader(io.StringIO(text))}


def test_mean_std_and_difference_equal_values_by_hand(tmp_path: Path) -> None:
    """FL-R-17, C-AP: the paper has 50.1 +- 0.5; ours 49.6, 50.1, 51.2: mean 50.3, std sqrt(0.67)."""
    for seed, shift in enumerate((-0.5, 0.0, 1.1)):
        make_run(tmp_path / str(seed), seed=seed, shift=shift)
    cell = rows(table_csv(collect([tmp_path])))["FL-R-17", "C-AP"]
    assert float(cell["mean"]) == pytest.approx(50.3)
    std = math.sqrt(((-0.7) ** 2 + (-0.2) ** 2 + 0.9**2) / 2)
    assert float(cell["std"]) == pytest.approx(std)
    assert float(cell["difference"]) == pytest.approx(0.2)
    assert float(cell["difference_in_std"]) == pytest.approx(0.2 / math.sqrt(0.5**2 + std**2))
    assert float(cell["tolerance"]) == pytest.approx(1.5)
    assert (cell["verdict"], cell["seeds"], cell["scored_as"]) == ("agrees", "0 1 2", "C-AP-binned200")


def test_scores_of_single_users_stand_below_the_table(tmp_path: Path) -> None:
    assert "Single users" not in markdown(collect([make_run(tmp_path / "none")]))
    for seed, shift in enumerate((0.0, 2.0)):
        values = {"O-AP": np.array([10.0, 30.0, 50.0 + shift])}
        groups = spreads_by_group("abc", "a", np.array([2, 4, 8]), values)
        make_run(tmp_path / "runs" / str(seed), seed=seed, clients=groups)
    said = markdown(collect([tmp_path / "runs"]))
    deviation = "0.7"  # of 40 and 41
    assert f"| FL-R-17 | 2 new | 4 | 40.5 ± {deviation} | 30.0 ± 0.0 | 51.0 ± 1.4 | 10.5 ± 0.7 | - |" in said
    assert "| FL-R-17 | 1 seen in training | 2 | 10.0 ± 0.0 | " in said


def test_the_papers_ap_is_met_by_the_binned_one_and_the_exact_stands_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    cells = rows(table_csv(collect([tmp_path])))
    assert float(cells["FL-R-17", "C-AP"]["mean"]) == pytest.approx(50.1)
    assert float(cells["FL-R-17", "C-AP exact"]["mean"]) == pytest.approx(51.1)
    assert cells["FL-R-17", "C-AP exact"]["verdict"] == "not in the paper"


@pytest.mark.parametrize(
    "mean, std, expected",
    [(50.1, 0.5, 1.5), (62.0, 0.3, 1.0), (2.0, 0.1, 0.3), (0.3, 0.0, 0.15), (8.0, 0.0, 0.8)],
)  # fmt: skip
def test_the_tolerance_is_three_std_or_a_tenth_up_to_a_point(
    mean: float, std: float, expected: float
) -> None:
    assert tolerance(mean, std) == pytest.approx(expected)


@pytest.mark.parametrize(
    "shift, code, verdict", [(0.0, 0, "agrees"), (-1.4, 0, "agrees"), (-6.0, 1, "below"), (6.0, 1, "above")]
)
def test_verify_fails_where_a_full_scale_row_misses_the_paper(
    shift: float, code: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """O-AP is allowed max(0.6, 1) points, C-AP 1.5; -1.4 would miss O-AP, so it is shifted in C-AP alone."""
    directory = make_run(tmp_path / "a", shift=shift)
    if verdict == "agrees":
        results = json.loads((directory / "results.json").read_text())
        for name in results["test"]:
            results["test"][name] -= shift * (name != "C-AP-binned200")
        (directory / "results.json").write_text(json.dumps(results))
    assert rows(table_csv(collect([tmp_path])))["FL-R-17", "C-AP"]["verdict"] == verdict
    assert run(main, [str(tmp_path)]) == 0
    capsys.readouterr()
    if code:
        with pytest.raises(SystemExit) as ended:
            run(main, [str(tmp_path), "--verify"])
        assert ended.value.code == 1
        assert f"C-AP {50.1 + shift:.1f} for the paper's 50.1" in capsys.readouterr().err
    else:
        assert run(main, [str(tmp_path), "--verify"]) == 0
        assert "FL-R-17: within tolerance" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv, data, reason",
    [
        (["--scale=small"], FLAIR, "scale small"),
        ([], {**FLAIR, "source": "mini"}, "the data set is not FLAIR"),
        ([], {**FLAIR, "users": {"train": 3}}, "the data set is not FLAIR"),
        (["--federated.num_rounds=500"], FLAIR, "config differs: federated.num_rounds=500"),
        ([], {}, "not known whether it is FLAIR"),
    ],
)
def test_what_is_not_the_papers_experiment_is_never_judged(
    argv: list[str], data: dict[str, object], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a", "fl-r-17", *argv, shift=-30, data=data)
    text = markdown(collect([tmp_path]))
    assert "NOT comparable with the paper" in text
    assert reason in text
    assert "paper (FLAIR)" not in text + latex(collect([tmp_path]))
    cells = rows(table_csv(collect([tmp_path])))
    assert all(line["difference_in_std"] == "" for line in cells.values())
    assert {line["verdict"] for line in cells.values()} <= {"not comparable", "not in the paper"}
    assert run(main, [str(tmp_path), "--verify"]) == 0
    assert "nothing was compared" in capsys.readouterr().err


@pytest.mark.parametrize("argv, compared", [([], True), (["--scale=small"], False), (["--seed=3"], True)])
def test_the_papers_row_and_legend_stand_only_beside_what_can_be_compared(
    argv: list[str], compared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Issue 17.41: the paper's row stood under runs of 8 labels, 32 pixels or another epsilon."""
    directory = make_run(tmp_path / "a", "fl-r-17", *argv, seed=3 if argv == ["--seed=3"] else 0)
    config = parse(["--config=fl-r-17", *argv]).config
    results = json.loads((directory / "results.json").read_text())
    results["last"] = {"test": results["test"]}
    show(config, results)
    assert ("test, FLAIR paper" in capsys.readouterr().out) == compared
    assert ("test, FLAIR paper" in final_rows(config, results)) == compared
    drawn: list[Any] = []
    monkeypatch.setattr("benchmarks.reporting.plots.per_class_bars", lambda *args: drawn.extend(args))
    draw(config, results, "title", tmp_path)
    assert bool(drawn[3]) == compared


def test_classes_without_a_positive_on_test_are_named_with_the_ceiling_that_they_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.41. A perfect model of three classes, one of which does not occur, has a C-AP of 200 / 3."""
    scores = np.array([[0.9, 0.1, 0.2], [0.1, 0.9, 0.2]], np.float32)
    targets = np.array([[1, 0, 0], [0, 1, 0]], np.bool_)
    perfect = summarise(scores, targets)
    note = (
        "1 of 3 classes has no positive on test (fire) and counts 0: C-AP, C-P, C-R and C-F1 are at most 66.7"
    )
    assert {round(perfect[name], 1) for name in ("C-AP", "C-P", "C-R", "C-F1")} == {66.7}
    directory = make_run(tmp_path / "a", prevalence={"animal": 0.5, "food": 0.5, "fire": 0.0})
    assert markdown(collect([tmp_path])).splitlines().count(f"{note}.") == 1
    assert markdown(collect([tmp_path])).count(note) == 1
    results = json.loads((directory / "results.json").read_text())
    show(parse([]).config, {**results, "last": {"test": results["test"]}})
    assert note in capsys.readouterr().out
    assert "no positive" not in markdown(collect([make_run(tmp_path / "b")]))


def test_the_exact_ap_and_the_published_one_have_two_names() -> None:
    """Issue 17.41: what people read as C-AP is the paper's, of 200 thresholds; keys of files stay."""
    summary = summarise(np.array([[0.9], [0.4], [0.6]], np.float32), np.array([[1], [0], [0]]))
    table = for_people({"loss": 0.5, **summary})
    assert table["C-AP exact"] == summary["C-AP"]
    assert table["C-AP"] == summary["C-AP-binned200"]
    assert list(table)[:4] == ["C-AP exact", "O-AP exact", "C-AP", "C-P"]
    assert len(table) == len(summary) + 1
    assert shown("C-AP") == "C-AP exact"
    assert shown("accuracy") == "accuracy"


def test_fine_tuning_from_other_weights_is_not_the_papers_row(tmp_path: Path) -> None:
    standin = {
        "file": "s.safetensors",
        "sha256": "ab",
        "description": "STAND-IN, not ImageNet",
        "imagenet": False,
    }
    make_run(tmp_path / "a", "fl-f-17", weights=standin)
    (row,) = collect([tmp_path]).rows
    assert not row.comparable
    assert "STAND-IN, not ImageNet" in markdown(collect([tmp_path]))
    make_run(tmp_path / "b", "fl-f-17", seed=1)
    assert sorted(row.comparable for row in collect([tmp_path]).rows) == [False, True]


def test_a_variant_is_said_by_what_differs() -> None:
    def say(*argv: str) -> tuple[str, str | None]:
        made = variant(parse(argv).config)
        return made.label, made.scale

    assert say("--config=fl-r-17") == ("FL-R-17", None)
    assert say("--config=fl-r-17", "--scale=small", "--seed=4") == ("FL-R-17", "small")
    assert say("--config=fl-r-17", "--scale=small", "--data.partition=iid") == (
        "FL-R-17, data.partition=iid", "small")  # fmt: skip
    assert say("--config=fl-f-17", "--recipe=pfl") == ("FL-F-17, recipe=pfl", None)
    assert say("--config=pfl-r-17", "--scale=mini", "--privacy.epsilon=8") == (
        "PFL-R-17, privacy.epsilon=8.0", "mini")  # fmt: skip
    assert say("--config=pfl-r-17", "--privacy=none") == ("PFL-R-17, privacy=none", None)
    ditto = ["federated.algorithm=ditto", "federated.weighting=users", "federated.options.held_out=0.5"]
    assert say("--config=fl-r-17", *(f"--{key}" for key in ditto))[0] == ", ".join(["FL-R-17", *ditto])
    # What is computed beside the scores, and which noise is drawn, makes no other row.
    assert say("--config=c-r-17", "--evaluation.per_user=true", "--personal.num_epochs=2") == ("C-R-17", None)
    assert say("--config=pfl-r-17", "--seed=1") == say("--config=pfl-r-17") == ("PFL-R-17", None)


@pytest.mark.parametrize("algorithm", ["fednova", "fedprox"])
def test_runs_that_differ_in_mu_are_two_rows(algorithm: str, tmp_path: Path) -> None:
    """Issue 17.14: mu was forgotten but for fedprox, so that FedNova's runs merged as seeds of one row."""
    for seed, mu in enumerate((0.1, 0.5)):
        words = [f"--federated.algorithm={algorithm}", f"--federated.mu={mu}", "--federated.weighting=images"]
        make_run(tmp_path / str(seed), "fl-r-17", *words, seed=seed)
    found = collect([tmp_path]).rows
    assert [(row.seeds, f"federated.mu={mu}" in row.label) for row, mu in zip(found, (0.1, 0.5))] == [
        ((0,), True), ((1,), True)]  # fmt: skip


def leaves(kind: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a config's type that is no section, dotted, with its default."""
    for item in dataclasses.fields(kind):
        default = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        if dataclasses.is_dataclass(default):
            yield from leaves(type(default), f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, default


@pytest.mark.parametrize("key", [key for key, _ in leaves(Config)])
def test_only_what_is_marked_as_repetition_may_differ_among_the_seeds_of_a_row(key: str) -> None:
    """Issue 17.37: rows are distinguished by all fields. A field that is added counts without being named."""
    repeated = ("seed", "evaluation.per_user", "evaluation.few_shot_below", "personal.")
    tree = dataclasses.asdict(parse(["--config=fl-r-17"]).config)
    other = copy.deepcopy(tree)
    *sections, leaf = key.split(".")
    node = other
    for section in sections:
        node = node[section]
    node[leaf] = "another value"
    same = experiment_digest(tree, Config) == experiment_digest(other, Config)
    assert same == key.startswith(repeated)


def test_another_networks_weights_are_said_to_be_why_a_run_is_not_the_papers_row(tmp_path: Path) -> None:
    lite = {"file": "e.pth", "sha256": "57" * 32, "description": "a package's weights", "imagenet": False}
    words = ("--model.arch=efficientnet_lite0", "--model.normalisation=efficientnet_lite")
    make_run(tmp_path / "a", "fl-f-17", *words, weights=lite)
    (row,) = collect([tmp_path]).rows
    assert not row.comparable
    why = "another network, efficientnet_lite0 (a package's weights), where the paper has resnet18"
    assert why in row.reasons
    text = markdown(collect([tmp_path]))
    assert why in text
    assert "FL-F-17, model.arch=efficientnet_lite0, model.normalisation=efficientnet_lite" in text
    assert "weights are not torchvision's" not in text, "it says the same less well"
    own = {**lite, "sha256": PACKAGED["efficientnet_lite0"].sha256}
    make_run(tmp_path / "b", "fl-f-17", *words, weights=own)
    assert {row.label[-8:] for row in collect([tmp_path]).rows} == {"57575757", "net_lite"}


def test_runs_from_other_weights_or_data_are_no_seeds_of_one_row(tmp_path: Path) -> None:
    standin = {"file": "s", "sha256": "ab" * 32, "imagenet": False}
    make_run(tmp_path / "a", "fl-f-17", weights=standin)
    make_run(tmp_path / "b", "fl-f-17", seed=1, weights={**standin, "sha256": "cd" * 32})
    make_run(tmp_path / "c", "fl-f-17", seed=2, weights=standin, data={**FLAIR, "content_sha256": "else"})
    assert sorted((row.label, row.seeds) for row in collect([tmp_path]).rows) == [
        ("FL-F-17, weights abababab", (0,)), ("FL-F-17, weights abababab", (2,)),
        ("FL-F-17, weights cdcdcdcd", (1,)),
    ]  # fmt: skip


def test_rows_beyond_the_twelve_stand_beside_them(tmp_path: Path) -> None:
    small = {"users": {"train": 3}}
    for seed in (0, 1):
        make_run(tmp_path / f"fl{seed}", "fl-r-17", "--scale=small", seed=seed, data=small)
        make_run(
            tmp_path / f"iid{seed}", "fl-r-17", "--scale=small", "--data.partition=iid", seed=seed, data=small
        )
    table = collect([tmp_path])
    assert [(row.variant.label, row.seeds) for row in table.rows] == [
        ("FL-R-17", (0, 1)), ("FL-R-17, data.partition=iid", (0, 1))]  # fmt: skip
    text = markdown(table)
    assert text.count("## On ") == 1


def test_private_rows_show_epsilon_and_that_it_is_simulated(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "pfl-r-17")
    assert "epsilon 2 at delta 8.4e-06, SIMULATED; as run 4.72" in markdown(collect([tmp_path]))
    (tmp_path / "a" / "privacy.json").unlink()
    assert collect([tmp_path]).broken[0].directory == tmp_path / "a"


def test_local_privacy_is_a_row_of_its_own_and_never_stands_for_a_private_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From either config, on FLAIR, with the paper's own columns: it is held against no row of the paper."""
    make_run(tmp_path / "fl", "fl-r-17", *LOCALLY)
    make_run(tmp_path / "pfl", "pfl-r-17", *LOCALLY)
    make_run(tmp_path / "weak", "fl-r-17", *LOCALLY, "--local_privacy.epsilon=64", "--scale=small")
    table = collect([tmp_path])
    assert [(row.variant.label, row.variant.scale) for row in table.rows] == [
        ("LDP-R-17", None), ("LDP-R-17, local_privacy.epsilon=64.0", "small"),
        ("LDP-R-17, server.learning_rate=0.02", None),
    ]  # fmt: skip
    assert not any(row.comparable for row in table.rows)
    assert {cell["verdict"] for cell in rows(table_csv(table)).values()} == {"not in the paper"}
    text = markdown(table)
    spent = "epsilon 8 of one update; who took part most, in 12 rounds, spent 61.3 at delta 1e-06"
    assert f"LOCAL: {spent}" in text
    assert "local differential privacy, of which the paper has no row" in text
    assert "Missing, without a finished run as shipped: C-R-17, FL-R-17, PFL-R-17" in text
    assert "paper (FLAIR)" not in text
    assert run(main, [str(tmp_path), "--verify"]) == 0
    assert "nothing was compared" in capsys.readouterr().err
    (tmp_path / "fl" / "privacy.json").unlink()
    assert [record.directory for record in collect([tmp_path]).broken] == [tmp_path / "fl"]


def test_local_privacy_stands_between_its_sisters_and_has_all_scales(tmp_path: Path) -> None:
    for place, argv in enumerate((["c-f-17"], ["fl-r-17", *LOCALLY, "--scale=small"], ["pfl-r-17"])):
        make_run(tmp_path / str(place), *argv)
    labels = [row.variant.label for row in collect([tmp_path]).rows]
    assert labels == ["PFL-R-17", "LDP-R-17", "C-F-17"]


def test_a_variant_does_not_stand_for_the_shipped_row(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fl-r-17", "--data.partition=iid")
    assert "finished run as shipped: C-R-17, FL-R-17, PFL-R-17" in markdown(collect([tmp_path]))
    make_run(tmp_path / "b", "fl-r-17")
    assert "finished run as shipped: C-R-17, PFL-R-17" in markdown(collect([tmp_path]))
    make_run(tmp_path / "own" / "c", "fl-r-17", data={"users": {"train": 3}})
    assert "Missing" not in markdown(collect([tmp_path / "own"])), "no run is of FLAIR itself"


def test_reasons_are_said_once_for_the_rows_that_share_them(tmp_path: Path) -> None:
    small = {"users": {"train": 3}}
    standin = {"file": "s.safetensors", "sha256": "ab", "description": "STAND-IN", "imagenet": False}
    for setting, classes in (("c-r-17", 17), ("fl-f-17", 17), ("c-f-17", 17), ("c-r-1628", 68)):
        ap = {f"c{k}": 5.0 for k in range(classes)}
        weights = standin if "-f-" in setting else None
        make_run(tmp_path / setting, setting, data=small, per_class_ap=ap, weights=weights)
    lines = [line for line in markdown(collect([tmp_path])).splitlines() if line.startswith("* ")]
    assert lines == [
        "* C-F-17, weights ab | FL-F-17, weights ab: weights are not torchvision's ImageNet ones (STAND-IN)",
        "* C-R-1628: 68 labels for 1,628",
    ]


def test_a_private_row_may_beat_the_paper_but_not_with_the_papers_noise(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "pfl-r-17", shift=5)
    assert collect([tmp_path]).misses() == []
    make_run(tmp_path / "b", "pfl-r-17", "--privacy.noise=paper_bug", shift=5)
    make_run(tmp_path / "c", "pfl-f-17", shift=-5)
    labels = {line.split(":")[0] for line in collect([tmp_path]).misses()}
    assert "PFL-F-17" in labels
    assert "PFL-R-17, privacy.noise=rounds_as_epochs" in labels
    assert "PFL-R-17" not in labels


def test_latex_and_csv_read_back_to_the_same_numbers(tmp_path: Path) -> None:
    for seed, shift in enumerate((-0.5, 0.0, 1.1)):
        make_run(tmp_path / "runs" / str(seed), seed=seed, shift=shift)
        make_run(tmp_path / "runs" / f"p{seed}", "pfl-r-1628", seed=seed, shift=shift)
    out = tmp_path / "out"
    assert run(main, [str(tmp_path / "runs"), "--output_dir", str(out)]) == 0
    table = collect([tmp_path / "runs"])
    cells = rows((out / "table1.csv").read_text())
    assert len(cells) == 2 * (len(COLUMNS) + 2)
    tex = (out / "table1.tex").read_text()
    assert tex.count("{") == tex.count("}")
    assert "\\caption{Test set of flair.hdf5, 5,142 users, percent" in tex
    assert "C-AP and O-AP are those of 200 thresholds" in tex
    for setting in ("FL-R-17", "PFL-R-1628"):
        (line,) = [line for line in tex.splitlines() if line.startswith(f"\\raggedright {setting} &")]
        assert line.endswith(r" \\")
        fields = line.removesuffix(r" \\").split(" & ")
        names = (*COLUMNS, *EXACT.values())
        assert len(fields) == 2 + len(names)
        for column, field in zip(names, fields[2:]):
            mean, std = map(float, field.split(r" $\pm$ "))
            assert mean == pytest.approx(float(cells[setting, column]["mean"]), abs=0.051)
            assert std == pytest.approx(float(cells[setting, column]["std"]), abs=0.051)
    assert (out / "table1.md").read_text() == markdown(table)
    assert latex(table) == tex


def test_only_a_comparable_table_shows_verdicts(tmp_path: Path) -> None:
    make_run(tmp_path / "full")
    assert "+0.0 (+0.0 s) agrees" in markdown(collect([tmp_path]))
    make_run(tmp_path / "lab" / "small", "fl-r-17", "--scale=small")
    assert "agrees" not in "\n".join(report.markdown(collect([tmp_path / "lab"])).split("##")[:2])
