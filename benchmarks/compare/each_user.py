"""The scores of each user, such as a hospital, of runs that scored few."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from benchmarks.reporting.runs import DAMAGE, RunRecord
from pfl_ext.algorithms.own_images import FILE
from pfl_ext.tasks.multi_label_scores import shown

FEW = 40
"""Most users of a run that are shown one by one."""
MODELS = {
    ("server", "test"): ("", ""),
    ("server", "val"): ("-val", " on val"),
    ("server", "train"): ("-held-out", " on held-out images"),
    ("personal", "train"): ("-own", ", own models"),
    ("personal", "val"): ("-own-val", ", own models on val"),
    ("personal", "test"): ("-own-test", ", own models on test"),
}
"""How the label of a table and its section end, by the model that is scored and the split of the images."""
NO_SCORES = ("group", "split", "user", "images", "training_images", "model", "cluster")
"""The columns of ``clients.csv`` that are no scores."""


class Score(NamedTuple):
    """One score of one user."""

    user: str
    name: str
    value: float
    kind: str = ""
    """How its section ends, of `MODELS`."""


def section_of(score: str, kind: str) -> str:
    """The section of the measures of a score."""
    return f"each user's {shown(score)}{kind}"


def sections_of(score: str) -> dict[str, str]:
    """The sections that a score can have, with how the labels of their tables end."""
    return {end: section_of(score, kind) for end, kind in MODELS.values()}


def scores_of(run: RunRecord) -> Iterator[Score]:
    """The scores in ``per_user.json``, and those of users' own models in ``clients.csv``; without the first
    file, all in the second one."""
    with suppress(*DAMAGE):
        whole = run.single_users
        yield from _in_columns(whole)
        yield from _in_rows(run, is_alone=not whole)


def _in_columns(whole: Mapping[str, Any]) -> Iterator[Score]:
    users = whole.get("user_ids", ())
    if len(users) > FEW:
        return
    for name in whole.get("quantiles", ()):
        for user, value in zip(users, whole[name], strict=True):
            if value is not None:
                yield Score(str(user), name, float(value))


def _in_rows(run: RunRecord, is_alone: bool) -> Iterator[Score]:
    path = run.directory / FILE
    if not path.is_file():
        return
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if is_alone or row["model"] == "personal"]
    if len({row["user"] for row in rows}) > FEW:
        return
    for row in {(row["model"], row["user"]): row for row in rows}.values():
        _, kind = MODELS[row["model"], row["split"]]
        for name in row.keys() - {*NO_SCORES}:
            if row[name] and math.isfinite(float(row[name])):
                yield Score(row["user"], name, float(row[name]), kind)
