"""Scores of single users in a comparison: which share a column, and which decile is the worst."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compare.each_user import scores_of
from benchmarks.compare.latex import latex, latex_in_use, latex_users
from benchmarks.compare.measures import curve
from benchmarks.compare.reading import compare, read_any
from benchmarks.compare.tables import facts, significance
from benchmarks.core.config.trees import Tree
from benchmarks.flair.paper import FLAIR_IMAGES, FLAIR_USERS
from pfl_ext.algorithms.per_user import quantiles, spreads_by_group
from tests.benchmarks.compare.test_latex import rows_of
from tests.benchmarks.made_runs import make_run

SCORES = {"O-AP": np.array([10.0, 90.0, 40.0]), "loss": np.array([0.1, 3.0, 1.0])}


def clients(split: str | None) -> Tree:
    """What ``results.json`` says of three new users, scored on a split or on held-out training images."""
    found = spreads_by_group("abc", "", np.array([4, 5, 6]), SCORES)
    return found if split is None else {"new": {"split": split, **found["new"]}}


def test_the_worst_decile_of_a_loss_is_the_highest(tmp_path: Path) -> None:
    make_run(tmp_path / "run", clients=clients("test"))
    comparison = compare([tmp_path])
    (group,) = comparison.groups
    ends = {
        score: [
            comparison.values(group, f"users' {score}, new, of test", f"{word} decile")[0] for word in words
        ]
        for score, words in {"loss": ("worst", "best"), "O-AP exact": ("worst", "best")}.items()
    }
    assert ends == {"loss": [3.0, 0.1], "O-AP exact": [10.0, 90.0]}


def test_users_of_test_and_training_users_share_no_column(tmp_path: Path) -> None:
    """Held-out images of users who never took part are others than test's; no best is chosen among both."""
    make_run(tmp_path / "test", clients=clients("test"))
    make_run(tmp_path / "held_out", "fl-r-17", "--local.learning_rate=0.3", clients=clients(None))
    heads, *rows = rows_of(latex(compare([tmp_path]), "command"))
    places = [place for place, head in enumerate(heads) if head.startswith("worst decile")]
    assert [heads[place] for place in places] == [
        r"worst decile, users' O-AP exact, new (\%)",
        r"worst decile, users' O-AP exact, new, of test (\%)",
    ]
    assert sorted([row[place] for place in places] for row in rows) == [["--", "10.00"], ["10.00", "--"]]


def personal(own: float, server: float) -> Tree:
    """What ``results.json`` says of users who trained: the mean of their own models and of the server's."""
    kinds = {"personal": own, "server": server}
    users = {kind: {"users": {"O-AP": {"n": 3, "mean": mean}}} for kind, mean in kinds.items()}
    return {"seen": {"users": 3, "images": 9, "least images": 1, **users}}


SHARED, OWN = (rf"mean of users' O-AP exact, seen in training{kind} (\%)" for kind in ("", ", own models"))


def test_own_models_have_their_mean_and_a_servers_model_that_nobody_uses_a_mark(tmp_path: Path) -> None:
    scores = {"fedper": (70.0, 20.0), "ditto": (60.0, 50.0)}
    for name, (own, server) in scores.items():
        for seed in (0, 1):
            found = personal(own + seed, server)
            argv = f"--federated.algorithm={name}"
            make_run(tmp_path / f"{name}{seed}", "fl-r-17", argv, seed=seed, clients=found)
    of_users = {"server": {"users": {"O-AP": {"n": 3, "mean": 40.0}}}}
    make_run(tmp_path / "fedavg", clients={"seen": {"users": 3, "images": 9, "least images": 1, **of_users}})
    text = latex(compare([tmp_path]), "command")
    heads, *rows = rows_of(text)
    cells = {row[0].rpartition(" ")[2]: dict(zip(heads, row)) for row in rows}
    assert cells["fedper"][OWN] == r"\textbf{70.50 $\pm$ 0.71}"
    assert cells["ditto"][OWN] == r"60.50 $\pm$ 0.71"
    assert cells["FL-R-17"][OWN] == "--"
    assert [cells[name][SHARED] for name in ("fedper", "ditto", "FL-R-17")] == [
        r"20.00 $\pm$ 0.00$^\dagger$", r"50.00 $\pm$ 0.00", "40.00",
    ], "users of FedPer do not have the model that has 20"  # fmt: skip
    marked = {name: r"$^\dagger$" in row[r"C-AP exact on test (\%)"] for name, row in cells.items()}
    assert marked == {"fedper": True, "ditto": False, "FL-R-17": False}
    caption = text[text.index(r"\caption") : text.index(r"\label")]
    assert "never bold. Users who trained with fedper do not all use it: they have models of" in caption


def test_chosen_scores_are_shown_over_users_by_the_models_that_they_use(tmp_path: Path) -> None:
    """A row has one number where `latex` would have one for the server's and one for the users' models."""
    scores = {"fedper": (70.0, 20.0), "ditto": (60.0, 50.0)}
    for seed in (0, 1):
        for name, (own, server) in scores.items():
            found, argv = personal(own + seed, server), f"--federated.algorithm={name}"
            make_run(tmp_path / f"{name}{seed}", "fl-r-17", argv, seed=seed, clients=found)
        seen = personal(0.0, 40.0 + seed)["seen"]
        del seen["personal"]
        make_run(tmp_path / f"fedavg{seed}", seed=seed, clients={"seen": seen})
    whole = compare([tmp_path])
    assert latex_in_use(whole, "command") == ""
    comparison = whole.showing(["O-AP"])
    heads, *rows = rows_of(latex_in_use(comparison, "command"))
    cells = {row[0].rpartition(" ")[2]: row[heads.index(r"O-AP exact, mean (\%)")] for row in rows}
    assert cells == {
        "FL-R-17": r"40.50 $\pm$ 0.71",
        "ditto": r"60.50 $\pm$ 0.71",
        "fedper": r"\textbf{70.50 $\pm$ 0.71}",
    }
    heads, *_ = rows_of(latex(comparison, "command"))
    assert r"O-AP exact on test (\%)" in heads
    assert not any("users" in head or "C-AP" in head for head in heads)
    page = str(significance(comparison))
    assert "mean of users&#x27; O-AP exact, seen in training, each user by its own model" in page
    assert "each user by its own model" not in str(significance(whole))
    with pytest.raises(ValueError, match=r"^no run has the score 'kappa' on test; there are C-AP, "):
        whole.showing(["O-AP", "kappa"])


def test_a_score_that_an_earlier_version_did_not_compute_has_no_curve(tmp_path: Path) -> None:
    """A run that it began and this one ended has the score in some lines."""
    run = make_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    del lines[0]["val"]["O-AP"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record = compare([run]).showing(["O-AP"]).runs[0]
    assert curve(record, "val", "O-AP") is None
    assert curve(record, "val", "C-AP") is not None


def test_a_group_without_a_finished_run_may_come_first(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "c-r-17", finished=False)
    make_run(tmp_path / "b")
    assert "a machine" in facts(compare([tmp_path / "a", tmp_path / "b"]))


def test_a_servers_model_that_nobody_uses_is_never_the_best(tmp_path: Path) -> None:
    for name, shift in {"fedper": 9.0, "ditto": 6.0, "pfedme": 5.0}.items():
        argv = f"--federated.algorithm={name}"
        make_run(tmp_path / name, "fl-r-17", argv, shift=shift, clients=personal(1.0, 1.0))
    heads, *rows = rows_of(latex(compare([tmp_path]), "command"))
    cells = {row[0].rpartition(" ")[2]: row[heads.index(r"C-AP exact on test (\%)")] for row in rows}
    assert [name for name, cell in cells.items() if "textbf" in cell] == ["ditto"]


def test_fedper_without_parts_of_users_has_the_servers_model(tmp_path: Path) -> None:
    nothing = ("--federated.algorithm=fedper", "--federated.options.personal=none")
    make_run(tmp_path / "run", "fl-r-17", *nothing, clients=personal(50.0, 50.0))
    make_run(tmp_path / "bn", "fl-r-17", "--federated.algorithm=fedbn", clients=personal(50.0, 50.0))
    found = {group.label.rpartition(" ")[2]: group.keeps_parts for group in compare([tmp_path]).groups}
    assert sorted(found.values()) == [False, True]
    assert found["fedbn"]


def test_users_of_other_data_are_not_those_of_a_run(tmp_path: Path) -> None:
    """As earlier versions of ``benchmarks.flair.per_user`` left them, which took any file."""
    runs = {
        name: make_run(tmp_path / name, "fl-r-17", f"--local.learning_rate={rate}")
        for name, rate in (("own", 0.1), ("other", 0.2))
    }
    count = FLAIR_USERS["test"]
    for name, total in {"own": FLAIR_IMAGES["test"], "other": count}.items():
        images = [1] * (count - 1) + [total - count + 1]
        whole = {
            "split": "test",
            "images": images,
            "quantiles": {"O-AP": quantiles(SCORES["O-AP"])},
            "O-AP": [*SCORES["O-AP"]],
        }
        (runs[name] / "per_user.json").write_text(json.dumps(whole))
    comparison = compare([tmp_path])
    sections = {name: {one.section for one in comparison.measures[path]} for name, path in runs.items()}
    assert {name: "users' O-AP exact" in found for name, found in sections.items()} == {
        "own": True,
        "other": False,
    }


@pytest.mark.parametrize(("count", "shown"), [(40, 40), (41, 0)])
def test_up_to_forty_users_are_shown_one_by_one(count: int, shown: int, tmp_path: Path) -> None:
    """As the table of classes, which a page of a paper holds."""
    run = make_run(tmp_path / "run")
    whole = {
        "user_ids": [f"cam{number}" for number in range(count)],
        "quantiles": {"O-AP": {}},
        "O-AP": [*map(float, range(count))],
    }
    (run / "per_user.json").write_text(json.dumps(whole))
    assert len([*scores_of(read_any(run)[0])]) == shown


def test_each_split_on_which_a_servers_model_was_scored_has_a_table(tmp_path: Path) -> None:
    """A score on held-out images or on val stands in no row with one on test."""
    for place, split in enumerate(("train", "val", "test")):
        run = make_run(tmp_path / split, "fl-r-17", f"--local.learning_rate=0.{place + 1}")
        rows = ["group,split,user,images,training_images,model,O-AP", f"seen,{split},cam,3,9,server,5{place}"]
        (run / "clients.csv").write_text("\n".join(rows) + "\n")
    parts = latex_users(compare([tmp_path]), "command").split(r"\begin{table}")[1:]
    found = {part.partition(r"\label{tab:")[2].partition("}")[0]: part for part in parts}
    assert {label: re.findall(r"cam & (.*) \\", part) for label, part in found.items()} == {
        "clients-o-ap-exact": ["52.00"],
        "clients-o-ap-exact-val": ["51.00"],
        "clients-o-ap-exact-held-out": ["50.00"],
    }
    assert not any("own models" in part or "its user" in part for part in parts)
