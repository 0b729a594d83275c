"""Scores of single users in a comparison: which share a column, and which decile is the worst."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.compare.latex import latex
from benchmarks.compare.reading import compare
from benchmarks.core.config.trees import Tree
from pfl_ext.algorithms.per_user import spreads_by_group
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
