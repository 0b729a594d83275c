"""The table of a comparison for a paper, in LaTeX with booktabs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from functools import partial

from benchmarks.compare import each_user, in_use
from benchmarks.compare.charts import units
from benchmarks.compare.crossed import Crossed
from benchmarks.compare.groups import Comparison, Group
from benchmarks.compare.measures import BY_CLASS, in_words, unit_of
from benchmarks.compare.privacy import in_short, privacy_of
from benchmarks.compare.tables import NONE, TEST, amount, first_score, judged_by, named_first, on_test
from benchmarks.core.code_version import commit
from benchmarks.reporting import single_users
from benchmarks.reporting.booktabs import Column, booktabs, escaped, with_maths
from benchmarks.reporting.plots import MOST_CLASSES
from benchmarks.reporting.tables import plain_names
from dataset.pages import clean
from pfl_ext.tasks.multi_label_scores import shown
from pfl_ext.tasks.score_kinds import PERCENT, decimals, labelled

BOLD = (
    "Bold: the best mean of those with the same data, classes, partition, image sizes, images held out from "
    "training, and number of seeds."
)
WORST = ("worst decile", "worst decile ends", "worst decile begins")
"""The names of measures of the worst tenth of the users: its mean, and the score at its other edge."""
OF_A_CLASS = "score of a class"
"""Stands for a score of `BY_CLASS`, which is in percent whatever the task declares."""
DAGGER = r"$^\dagger$"


def _written(comparison: Comparison, label: str) -> str:
    """A label as LaTeX prints it, with mathematics where it is a name of the user's choice."""
    return with_maths(label) if label in comparison.names else escaped(label)


def latex(comparison: Comparison, command: str) -> str:
    """A ``table`` with the page's groups as rows, and no number that does not follow from the CSV.

    Args:
        comparison: what is compared.
        command: that made it, for a comment.
    """
    groups, columns = comparison.groups, _columns(comparison)
    said = ["Mean $\\pm$ standard deviation over $n$ seeds."]
    said += _marks_in_words(groups, columns)
    if any(map(privacy_of, groups)):
        said.append("Epsilon is the largest over the seeds, of one run by itself.")
    return _head(comparison, command) + booktabs(columns, said, "compare")


def latex_crossed(comparison: Comparison, table: Crossed, command: str) -> str:
    """A ``table`` for each score by which the runs are judged, in rows and columns as `crossed` made them.

    Args:
        comparison: what is compared.
        table: its rows and columns.
        command: that made it, for a comment.
    """
    text, written = _head(comparison, command), partial(_written, comparison)
    names = [shown(score) for score in judged_by(comparison)]
    for score, name, label in zip(judged_by(comparison), names, plain_names(names)):
        columns = [Column(escaped(table.key), [written(row) for row in table.rows])]
        for place, head in enumerate(table.columns):
            there = [(row, group) for row, group in enumerate(table.column(place)) if group is not None]
            groups = [group for _, group in there]
            cells = _on_test(groups, [comparison.values(group, TEST, name) for group in groups], score)
            texts = {row: cell + escaped(table.fewer(group)) for (row, group), cell in zip(there, cells)}
            columns.append(Column(written(head), [texts.get(row, "--") for row in range(len(table.rows))]))
        said = [escaped(f"{on_test(comparison, score)}."), table.in_words(written)]
        said += _marks_in_words(comparison.groups, columns)
        text += booktabs(columns, said, label)
    return text


def latex_classes(comparison: Comparison, command: str) -> str:
    """A ``table`` for each score of single classes, with a row for each class; empty where there is none.

    Groups with other classes are in a table of their own, and those with more than `MOST_CLASSES` in none.

    Args:
        comparison: what is compared.
        command: that made it, for a comment.
    """
    text = ""
    for key, section in BY_CLASS.items():
        alike: dict[tuple[str, ...], list[Group]] = {}
        for group in comparison.groups:
            scored = [run.outcome[key] for run in group.finished if run.outcome.get(key)]
            if scored and len(scored[0]) <= MOST_CLASSES:
                alike.setdefault(tuple(sorted(scored[0])), []).append(group)
        for number, groups in enumerate(alike.values(), 1):
            label = f"classes-{section.partition(' ')[0].lower()}{'' if number == 1 else f'-{number}'}"
            text += _of_classes(comparison, groups, section, label)
    return _head(comparison, command) + text if text else ""


def latex_users(comparison: Comparison, command: str) -> str:
    """A ``table`` for each score by which runs are judged, with a row for each user; empty where no run
    scored few users one by one.

    Args:
        comparison: what is compared.
        command: that made it, for a comment.
    """
    text = ""
    for score in comparison.headline:
        for end, section in each_user.sections_of(score).items():
            groups = [
                group
                for group in comparison.groups
                if any(
                    one.section == section
                    for run in group.finished
                    for one in comparison.measures[run.directory]
                )
            ]
            label = f"clients-{plain_names([shown(score)])[0]}{end}"
            text += _of_classes(comparison, groups, section, label, score, is_own=end.startswith("-own"))
    return _head(comparison, command) + text if text else ""


def latex_in_use(comparison: Comparison, command: str) -> str:
    """A ``table`` for each kind of users, of the scores that are given over users, each by the model that it
    uses; empty without such scores.

    Args:
        comparison: what is compared.
        command: that made it, for a comment.
    """
    kinds = dict[str, list[Column]]()
    groups = comparison.groups
    for score in [score for score in comparison.headline if score in groups[0].scores]:
        for section in in_use.sections_of(comparison, score):
            columns = kinds.setdefault(section.partition(", ")[2], [])
            worst = "highest decile" if comparison.is_lower_better(score) else "lowest decile"
            for name in ("mean", single_users.column(worst, comparison.is_lower_better(score))):
                found = [[*in_use.by_seed(comparison, each, section, name).values()] for each in groups]
                head = labelled(f"{shown(score)}, {name}", comparison.unit(score))
                columns.append(Column(escaped(head), _best(groups, found, score)))
    first = [
        Column("setting", [_written(comparison, group.label) for group in groups]),
        Column("$n$", [str(len(group.finished)) for group in groups]),
    ]
    text = ""
    for label, (kind, columns) in zip(plain_names(kinds), kinds.items()):
        said = [
            escaped(
                f"Scores over users, {kind}: each user by its own model if it has one, or else by the "
                "server's. Each user counts once; the worst decile is the mean of the tenth of users "
                "with the worst scores."
            )
        ]
        said += ["Mean $\\pm$ standard deviation over $n$ seeds.", *_marks_in_words(groups, columns)]
        text += booktabs([*first, *columns], said, f"users-{label}")
    return _head(comparison, command) + text if text else ""


def _of_classes(
    comparison: Comparison,
    groups: Sequence[Group],
    section: str,
    label: str,
    score: str = OF_A_CLASS,
    is_own: bool = False,
) -> str:
    """A table with a row for each class, or for each user with a score, and a column for each of these
    groups; empty without any score. ``is_own``: whether the scores are of users' own models."""
    names = {
        one.name: None
        for group in groups
        for run in group.finished
        for one in comparison.measures[run.directory]
        if one.section == section
    }
    if not names:
        return ""
    rows = [
        (_best if is_own else _on_test)(
            groups, [comparison.values(group, section, name) for group in groups], score
        )
        for name in names
    ]
    columns = [Column("class" if score == OF_A_CLASS else "client", ["$n$", *map(escaped, names)])]
    for group, cells in zip(groups, zip(*rows)):
        columns.append(Column(_written(comparison, group.label), [str(len(group.finished)), *cells]))
    title = section[0].upper() + section[1:]
    unit = PERCENT if score == OF_A_CLASS else comparison.unit(score)
    said = [escaped(f"{labelled(title, unit)}."), "Mean $\\pm$ standard deviation over $n$ seeds."]
    said += ["Each model is scored on images of its user that it was not trained on."] if is_own else []
    return booktabs(columns, [*said, *_marks_in_words(groups, columns)], label)


def _marks_in_words(groups: Sequence[Group], columns: Sequence[Column]) -> list[str]:
    """What bold and a dagger mean, of those that are in the cells."""
    cells = [cell for column in columns for cell in column.cells]
    said = [BOLD] if any(r"\textbf" in cell for cell in cells) else []
    if any(DAGGER in cell for cell in cells):
        names = {str(group.keys["federated.algorithm"]): None for group in groups if group.keeps_parts}
        trained = escaped(" or ".join(names))
        said.append(
            f"{DAGGER}Score of the server's model, never bold. Users who trained with {trained} do not"
        )
        said.append("all use it: they have models of their own, or of their clusters.")
    return said


def _head(comparison: Comparison, command: str) -> str:
    """What LaTeX needs, and where the numbers come from, as comments."""
    runs = [run for group in comparison.groups for run in group.finished]
    commits = {run.outcome.get("commit") or "unknown": None for run in runs}
    of_runs = (
        f"the runs are of commit {clean(', '.join(map(str, commits)))}" if commits else "no run has ended"
    )
    lines = [
        "% needs \\usepackage{booktabs}",
        f"% made by: {clean(command)}",
        f"% at commit {commit() or 'unknown'}; {of_runs}",
        *(f"% {line}" for line in [comparison.unfinished()] if line),
        *(f"% left out: {clean(line)}" for line in comparison.left_out),
    ]
    return "\n".join(lines) + "\n"


def _columns(comparison: Comparison) -> list[Column]:
    """The columns in which some group has something."""
    groups = comparison.groups
    columns = [
        Column("setting", [_written(comparison, group.label) for group in groups]),
        Column("$n$", [str(len(group.finished)) for group in groups]),
        *_of_scores(comparison),
        *([] if groups[0].scores else _of_users(comparison)),
    ]
    if any(map(privacy_of, groups)):
        deltas = [(privacy_of(group) or [NONE] * 3)[2] for group in groups]
        epsilons = [in_short(group) if group.finished else NONE for group in groups]
        columns.append(Column(r"$\varepsilon$", list(map(escaped, epsilons))))
        columns.append(Column(r"$\delta$", list(map(_power_of_ten, deltas))))
    sent = [_megabytes(comparison.values(group, "bytes", "the whole run")) for group in groups]
    done = [comparison.values(group, "cost", f"{group.runs[0].config.unit}s done") for group in groups]
    columns.append(Column("MB", list(map(escaped, sent))))
    columns.append(Column(units(groups), [escaped(in_words(values, "count")) for values in done]))
    return [column for column in columns if set(column.cells) != {escaped(NONE)}]


def _power_of_ten(number: str) -> str:
    """A number such as 8.4e-06 as a paper prints it, with a power of ten."""
    digits, _, exponent = number.partition("e")
    if not exponent.removeprefix("-").isdigit():
        return escaped(number)
    times = "" if digits == "1" else rf"{digits} \times "
    return f"${times}10^{{{int(exponent)}}}$"


def _of_scores(comparison: Comparison) -> list[Column]:
    """The scores of the page's overview: all by which runs are judged, or of each kind of run the first."""
    groups, scores = comparison.groups, judged_by(comparison)
    if scores:
        return [
            Column(
                escaped(on_test(comparison, score)),
                _on_test(groups, [comparison.values(group, TEST, shown(score)) for group in groups], score),
            )
            for score in scores
        ]
    found = [comparison.values(group, TEST, shown(group.headline[0])) for group in groups]
    cells = [
        f"{escaped(named_first(group))} {cell}" if values else cell
        for group, cell, values in zip(groups, _on_test(groups, found), found)
    ]
    return [Column(escaped(first_score(comparison)), cells)]


def _of_users(comparison: Comparison) -> list[Column]:
    """The worst tenth of each kind of users and, where some users have models of their own, the mean over
    users, by the score that chose the models, or else by which users are compared with each other.

    A run that has only quantiles of users has no mean of the worst tenth; then it is where that tenth ends.
    """
    names = dict[tuple[str, str], tuple[str, str]]()
    found = [one.section for run in comparison.runs for one in comparison.measures[run.directory]]
    means = any(section.endswith(in_use.OWN) for section in found)
    for group in comparison.groups:
        chosen = group.judged_by[len(group.headline) :]
        score = chosen[0] if chosen else group.trained.task_of(group.runs[0].config, 2).user_headline
        of_score = [
            one
            for run in group.runs
            for one in comparison.measures[run.directory]
            if one.section.partition(",")[0] == f"users' {shown(score)}"
        ]
        worst = WORST[:1] if any(one.name in WORST[:1] for one in of_score) else WORST
        for one in of_score:
            if one.name in worst or (one.name == "mean" and means):
                names.setdefault((one.section, one.name), (score, group.kinds.unit(score)))
    return [
        Column(
            escaped(labelled(f"mean of {section}" if name == "mean" else f"{name}, {section}", unit)),
            (_best if section.endswith(in_use.OWN) else _on_test)(
                comparison.groups,
                [comparison.values(each, section, name) for each in comparison.groups],
                score,
            ),
        )
        for (section, name), (score, unit) in names.items()
    ]


def _on_test(
    groups: Sequence[Group], found: Sequence[Sequence[float]], score: str | None = None
) -> list[str]:
    """`_best` of a score on test, with a dagger where users have other models than the one that was
    scored."""
    cells = _best(groups, found, score, of_users=False)
    return [
        cell + DAGGER if values and group.keeps_parts else cell
        for cell, values, group in zip(cells, found, groups)
    ]


def _best(
    groups: Sequence[Group],
    found: Sequence[Sequence[float]],
    score: str | None,
    of_users: bool = True,
) -> list[str]:
    """Cells of scores. Bold is the best of several groups with the same images and number of seeds: the
    highest or the lowest mean, as the task declares.

    Args:
        groups: of the cells.
        found: the scores of each group's seeds.
        score: its name; None: the first by which each group is judged.
        of_users: whether they are of the users' models, else of the server's, where no user may have it.
    """
    scores = [group.headline[0] if score is None else score for group in groups]
    signs = [-1 if group.kinds.is_lower_better(name) else 1 for group, name in zip(groups, scores)]
    units = [unit_of(name, group.kinds) for group, name in zip(groups, scores)]
    cells = [escaped(in_words(values, unit)) for values, unit in zip(found, units)]
    for place, group in enumerate(groups):
        if 0 < len(found[place]) < len(group.finished):
            cells[place] += f" ($n = {len(found[place])}$)"
    rivals: dict[tuple[object, ...], list[int]] = {}
    for place, group in enumerate(groups):
        if not of_users and group.keeps_parts:
            continue
        if found[place] and group.finished and math.isfinite(statistics.fmean(found[place])):
            kind = (group.images_key, len(found[place]), scores[place], units[place], signs[place])
            rivals.setdefault(kind, []).append(place)
    for places in rivals.values():
        exact = [statistics.fmean(found[place]) for place in places]
        digits = 2 if units[places[0]] == "percent" else decimals(exact)
        means = [f"{mean:.{digits}f}" for mean in exact]
        best = max(means, key=lambda mean: signs[places[0]] * float(mean))
        for place, mean in zip(places, means):
            if mean == best and len(set(means)) > 1:
                cells[place] = rf"\textbf{{{cells[place]}}}"
    return cells


def _megabytes(values: Sequence[float]) -> str:
    if not values:
        return NONE
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    mean = amount(statistics.fmean(values) / 1e6)
    return f"{mean} ± {amount(deviation / 1e6)}" if deviation else mean
