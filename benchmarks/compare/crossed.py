"""Runs as a paper's table has them: a row for each method, a column for each value of one key."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.compare.groups import Comparison, Group, refuse_doubles, telling_keys, values_in_words
from benchmarks.compare.privacy import in_short, privacy_of
from benchmarks.core.config.trees import Tree, as_word


@dataclass(frozen=True)
class Crossed:
    """Groups of runs by row and column; a cell may have none."""

    key: str
    """The key whose values are the columns."""
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: Mapping[tuple[int, int], Group]
    """By row and column."""
    besides: tuple[str, ...]
    """Other keys in which groups of one row differ."""

    @property
    def _most(self) -> int:
        return max(len(group.finished) for group in self.cells.values())

    def fewer(self, group: Group) -> str:
        """`` (n = 1)`` for a group with fewer finished seeds than another."""
        n = len(group.finished)
        return f" (n = {n})" if 0 < n < self._most else ""

    @property
    def row_of(self) -> dict[str, str]:
        """The label of each group's row, by the label of the group."""
        return {group.label: self.rows[row] for (row, _), group in self.cells.items()}

    def in_words(self, written: Callable[[str], str] = str) -> str:
        """What the numbers are.

        Args:
            written: how text and labels are written in the language of the table, as HTML or LaTeX.
        """
        said = [f"Mean ± standard deviation over {self._most} seeds, where no other n is named."]
        if self._most < 2:
            said = ["One seed each." if self._most else "No run has ended."]
        if self.besides:
            said.append(f"What else differs along a row: {', '.join(self.besides)}.")
        said = list(map(written, said))
        for (row, column), group in self.cells.items():
            if (found := privacy_of(group)) is not None:
                where = f"{written(self.rows[row])}, {written(self.columns[column])}"
                said.append(where + written(f": epsilon {in_short(group)}, delta {found[2]}."))
        return " ".join(said)

    def column(self, place: int) -> list[Group | None]:
        """The groups of a column, from the first row to the last."""
        return [self.cells.get((row, place)) for row in range(len(self.rows))]


def crossed(comparison: Comparison, key: str, row_keys: Sequence[str]) -> Crossed:
    """Put the groups into rows and columns.

    Args:
        comparison: what is compared.
        key: the columns' key, as ``data.partition``.
        row_keys: the keys whose values make a row, beside the setting. Without any, every key but that of
            the columns does; with them the groups of a row may differ in others, as in a rate that was tuned
            for each column.

    Raises:
        ValueError: when a key has no effect in any run, or two groups fall into one cell.
    """
    if not comparison.judges_alike:
        raise ValueError("--columns needs runs that have the same scores; leave the others out")
    differing = comparison.differences()
    _check_keys(comparison, key, row_keys, differing)
    names = [_name(group, key) for group in comparison.groups]
    trees = [_of_row(group, key, row_keys) for group in comparison.groups]
    columns = sorted({_value(group, key) for group in comparison.groups}, key=_by_number)
    rows: list[tuple[str, Tree]] = []
    cells: dict[tuple[int, int], Group] = {}
    for group, row in zip(comparison.groups, zip(names, trees)):
        if row not in rows:
            rows.append(row)
        place = rows.index(row), columns.index(_value(group, key))
        if place in cells:
            raise ValueError(_two_in_one(cells[place], group, key))
        cells[place] = group
    inside = [[cells[at] for at in cells if at[0] == row] for row in range(len(rows))]
    besides = [
        name
        for name in differing
        if name != key and any(len({str(each.keys.get(name)) for each in of_row}) > 1 for of_row in inside)
    ]
    if any(len({run.data_key for each in of_row for run in each.finished}) > 1 for of_row in inside):
        besides.append("the data")
    return Crossed(key, tuple(columns), tuple(_labels(rows)), cells, tuple(besides))


def _check_keys(comparison: Comparison, key: str, row_keys: Sequence[str], differing: Iterable[str]) -> None:
    """Refuse a key that has no effect in any run, and one for both rows and columns."""
    every = {name for group in comparison.groups for name in group.keys}
    for name in (key, *row_keys):
        if inner := sorted(other for other in every if other.startswith(f"{name}.")):
            raise ValueError(f"{name} is a section: name one of its keys, such as {inner[0]}")
        if name not in every:
            known = ", ".join(differing) or "none"
            raise ValueError(f"no run has a key {name} that has an effect; the keys that differ are {known}")
    if key in (*row_keys, "setting"):
        raise ValueError(
            f"{key} cannot be used for rows and columns at the same time; remove it from --columns"
        )


def named(crossing: Crossed, names: Mapping[str, str]) -> Crossed:
    """The rows and columns by these names instead of their labels. Rows are in the names' order: each comes
    where the first name of itself or of one of its groups is, and those without any come last.

    Raises:
        ValueError: when two rows or two columns would have one name.
    """
    places = {label: place for place, label in enumerate(names)}

    def place(row: int) -> int:
        groups = [group.label for (its, _), group in crossing.cells.items() if its == row]
        return min(places.get(label, len(places)) for label in (crossing.rows[row], *groups))

    order = sorted(range(len(crossing.rows)), key=place)
    cells = {(order.index(row), column): group for (row, column), group in crossing.cells.items()}
    rows, columns = (
        tuple(names.get(label, label) for label in each)
        for each in ([crossing.rows[row] for row in order], crossing.columns)
    )
    for labels in (rows, columns):
        refuse_doubles(labels)
    return replace(crossing, rows=rows, columns=columns, cells=cells)


def _name(group: Group, key: str) -> str:
    """The setting, with its algorithm where that is another, unless algorithms are the columns."""
    config = group.runs[0].config
    own = config.setting if key == "federated.algorithm" else group.trained.benchmark.name_of(config)
    return own or "no setting"


def _of_row(group: Group, key: str, row_keys: Sequence[str]) -> Tree:
    if row_keys:
        return {name: group.keys.get(name) for name in row_keys}
    return {name: value for name, value in group.keys.items() if name != key}


def _value(group: Group, key: str) -> str:
    return as_word(group.keys.get(key))


def _by_number(word: str) -> list[tuple[int, float, str]]:
    """``alpha-1.00`` after ``alpha-0.10``, and 10 after 9."""
    parts = re.split(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)", word)
    return [(1, float(part), "") if place % 2 else (0, 0.0, part) for place, part in enumerate(parts)]


def _two_in_one(first: Group, second: Group, key: str) -> str:
    names = [name for name in first.keys | second.keys if first.keys.get(name) != second.keys.get(name)]
    differ = ", ".join(name for name in names if name != key)
    both = f"{first.runs[0].directory} and {second.runs[0].directory} are of one row and one column"
    if not differ:
        return f"{both}, but with other data or weights: leave one out"
    return f"{both}: add the keys in which they differ ({differ}) to --rows, or leave one out"


def _labels(rows: Sequence[tuple[str, Tree]]) -> list[str]:
    """The name of each row's setting, and the values that tell it from other rows of that name."""
    labels = []
    for name, tree in rows:
        rivals = [other for its, other in rows if its == name and other != tree]
        labels.append(", ".join([name, *values_in_words(tree, telling_keys(tree, rivals))]))
    return labels
