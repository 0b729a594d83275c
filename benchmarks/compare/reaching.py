"""Tables of what groups needed to reach a score, and of their scores after equal traffic."""

from __future__ import annotations

import numpy as np

from benchmarks.compare.groups import Comparison
from benchmarks.compare.measures import Axis
from benchmarks.compare.series import lines_of
from benchmarks.compare.tables import NONE, amount, name_of
from dataset.pages import Html, join, table, tag
from pfl_ext.tasks.multi_label_scores import shown
from pfl_ext.tasks.score_kinds import PERCENT, decimals, labelled

AXES: dict[Axis, str] = {
    "steps": "rounds or epochs",
    "minutes": "minutes",
    "virtual minutes": "virtual minutes",
    "MB": "MB",
}
ALIKE = 1.01
"""Groups whose traffic differs by no more than this factor are compared by their last scores already."""


def _followed(comparison: Comparison) -> list[tuple[str, str]]:
    """The split and the name of each score that a run may be followed by."""
    return [(split, score) for score in comparison.headline for split in ("val", "test")]


def reached(comparison: Comparison, target: float | None) -> Html:
    """How many rounds, minutes and MB a group needed to reach a score.

    Args:
        comparison: what is compared.
        target: the score; None: for each score the best that all groups with it reach, if one of them has to
            train for it.
    """
    parts = [
        each for split, score in _followed(comparison) for each in _reached(comparison, split, score, target)
    ]
    lower = [shown(score) for score in comparison.headline if comparison.is_lower_better(score)]
    below = f", from above where lower is better ({', '.join(lower)})" if lower else ""
    note = (
        f"When the mean over the seeds first reached the score{below}. Only some rounds are scored. A dash: "
        "never, or not known."
    )
    return join([tag("h3", "Until a score was reached"), tag("p", note), *parts]) if parts else Html()


def _reached(comparison: Comparison, split: str, score: str, target: float | None) -> list[Html]:
    along = {
        axis: {line.place: line for line in lines_of(comparison.groups, split, score, axis)} for axis in AXES
    }
    lines, axes = along["steps"], dict(AXES)
    if not along["virtual minutes"]:
        del axes["virtual minutes"]
    if len(lines) < 2 and target is None:
        return []
    sign = -1.0 if comparison.is_lower_better(score) else 1.0
    best = sign * min(((sign * line.mean).max() for line in lines.values()), default=0.0)
    wanted = float(best) if target is None else target
    reaching = {place: np.flatnonzero(sign * line.mean >= sign * wanted) for place, line in lines.items()}
    if target is None and all(lines[place].x[at[0]] == 0 for place, at in reaching.items()):
        return []
    rows = []
    for place, at in reaching.items():
        line = lines[place]
        cells = [
            amount(float(each.x[at[0]]))
            if each is not None and len(at) and each.is_of_runs_of(line)
            else NONE
            for each in (along[axis].get(place) for axis in axes)
        ]
        rows.append([name_of(comparison, comparison.groups[place]), str(line.n), *cells])
    why = "as asked for" if target is not None else "which all groups reach"
    unit = comparison.unit(score)
    number = f"{wanted:.{2 if unit == PERCENT else decimals([wanted])}f}"
    caption = " ".join(filter(None, [number, unit, f"{shown(score)} on {split}, {why}"]))
    return [table(caption, ["group", "n", *axes.values()], rows)] if rows else []


def at_megabytes(comparison: Comparison, megabytes: float | None) -> Html:
    """The last score of each group that was seen before its traffic was more than so many MB.

    Args:
        comparison: what is compared.
        megabytes: between the server and its users, both ways, since the first round; None: the most that
            every group has used by its last score, if these differ.
    """
    parts = [
        each
        for split, score in _followed(comparison)
        for each in _at_megabytes(comparison, split, score, megabytes)
    ]
    note = (
        "The last score of each group within this traffic, both ways: mean, least and greatest over the "
        "seeds. Only some rounds are scored."
    )
    return join([tag("h3", "After the same traffic"), tag("p", note), *parts]) if parts else Html()


def _at_megabytes(comparison: Comparison, split: str, score: str, megabytes: float | None) -> list[Html]:
    lines = lines_of(comparison.groups, split, score, "MB")
    ends = [float(line.x[-1]) for line in lines]
    if not lines or (megabytes is None and max(ends) <= ALIKE * min(ends)):
        return []
    limit = min(ends) if megabytes is None else megabytes
    steps = {line.place: line for line in lines_of(comparison.groups, split, score, "steps")}
    rows, unit = [], comparison.unit(score)
    for line in lines:
        at = int(np.searchsorted(line.x, limit, side="right")) - 1
        cells = [NONE] * 4
        if at >= 0:
            found = [float(values[at]) for values in (line.mean, line.low, line.high)]
            digits = 2 if unit == PERCENT else decimals(found)
            mean, low, high = (f"{value:.{digits}f}" for value in found)
            round_of = steps[line.place]
            step = amount(float(round_of.x[at])) if round_of.is_of_runs_of(line) else NONE
            cells = [mean, f"{low} to {high}", amount(float(line.x[at])), step]
        rows.append([name_of(comparison, comparison.groups[line.place]), str(line.n), *cells])
    why = "as asked for" if megabytes is not None else "which all groups used"
    caption = f"{labelled(f'{shown(score)} on {split}', unit)} after {amount(limit)} MB, {why}"
    return [table(caption, ["group", "n", "mean", "least to greatest", "MB", "rounds or epochs"], rows)]
