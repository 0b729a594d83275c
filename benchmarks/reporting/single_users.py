"""Scores of single users in tables: what ``clients`` of ``results.json`` says, of every benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from benchmarks.core.config.trees import Tree
from benchmarks.reporting.runs import DAMAGE, RunRecord
from benchmarks.reporting.tables import csv_table, markdown_table, spread
from dataset.store.index import SPLITS

GROUPS = {"seen": "seen in training", "new": "new"}
MODELS = {"server": "", "personal": ", own models"}
COLUMNS = {
    "n": "users",
    "least images": "least images",
    "mean": "mean",
    "lowest decile": "worst decile",
    "highest decile": "best decile",
    "std": "standard deviation",
    "variance without noise": "variance without noise",
}
"""What a table shows of the scores of single users, by the key of ``results.json``."""
LOWER_IS_BETTER = {"lowest decile": "best decile", "highest decile": "worst decile"}
"""The columns of scores that are the better the lower they are, where they are others than in `COLUMNS`."""
COUNTS = ("n", "least images")
HEADS = ("row", "users", *(name for key, name in COLUMNS.items() if key != "n"))
BY_CHANCE = (
    "Scores of few images vary by chance: the variance without noise, in squared percent, is that of the "
    "users' own rates, where scores are shares of images, and may be below 0."
)
NOTE = (
    "Each user is scored by itself and counts once. A decile is the mean over the tenth of users with the "
    f"lowest or highest scores. {BY_CHANCE}"
)


class UserScores(NamedTuple):
    """How one score of one model differs over users of one kind."""

    kind: str
    """Kind of users and models, in words, with the split where the images are no held-out training images."""
    score: str
    values: Tree
    """The numbers that are known, by the keys of `COLUMNS`."""


def column(key: str, lower_is_better: bool) -> str:
    """The name of the column that holds this key of a score: the worst users have the highest loss."""
    return LOWER_IS_BETTER.get(key, COLUMNS[key]) if lower_is_better else COLUMNS[key]


def of_run(run: RunRecord) -> Iterator[UserScores]:
    """The scores that ``results.json`` has; nothing where it says nothing, or something else."""
    for group, kind in GROUPS.items():
        for model, words in MODELS.items():
            with suppress(*DAMAGE):
                scored = run.outcome.get("clients", {}).get(group, {})
                split = f", of {scored['split']}" if scored.get("split") in SPLITS[1:] else ""
                found = scored.get(model, {}).get("users", {})
                for score, values in found.items():
                    known = {key: float(values[key]) for key in COLUMNS if key in values}
                    if known.get("n"):
                        yield UserScores(f"{kind}{split}{words}", score, known)


def rows(label: str, runs: Sequence[RunRecord], score: str) -> list[list[str]]:
    """A line as `HEADS` for each kind of users that all of these runs, seeds of one row, have scored."""
    of_runs = [{each.kind: each.values for each in of_run(run) if each.score == score} for run in runs]
    out = []
    for kind in of_runs[0] if of_runs else ():
        values = [found.get(kind, {}) for found in of_runs]
        cells = [
            f"{min(one[key] for one in values):,.0f}"
            if key in COUNTS and all(key in one for one in values)
            else spread([one.get(key) for one in values])
            for key in COLUMNS
        ]
        if cells[0] != "-":
            out.append([label, f"{cells[0]} {kind}", *cells[1:]])
    return out


def section(lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown section of these `rows`; nothing without any."""
    return ["## Single users", "", markdown_table(HEADS, lines), "", NOTE, ""] if lines else []


def csv(lines: Sequence[Sequence[str]]) -> str:
    """These `rows` as CSV; nothing without any."""
    return csv_table(HEADS, lines) if lines else ""
