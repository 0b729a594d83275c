"""The rows of CSV tables. Files may be untrusted: errors name file and line."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path


def header_of(lines: Iterable[str], origin: Path | str) -> list[str]:
    """The names of the columns of a CSV; empty for an empty one.

    Raises:
        ValueError: that names ``origin``, where it is no CSV.
    """
    try:
        return next(csv.reader(lines, strict=True), [])
    except csv.Error as error:
        raise ValueError(f"{origin}, line 1 is not valid CSV ({error})") from None


def rows_of(
    lines: Iterable[str], origin: Path | str, needed: Sequence[str]
) -> Iterator[tuple[int, dict[str, str]]]:
    """The rows of a CSV by column, each with the number of its line; an empty line is no row.

    Args:
        lines: the CSV, which is read as a stream.
        origin: its name for errors.
        needed: columns that it must have.

    Raises:
        ValueError: that names file and line, for a column that is missing or there twice, a row of another
            length, and a file without rows.
    """
    rows = csv.reader(lines, strict=True)
    found = False
    try:
        header = next(rows, [])
        if twice := [name for name, count in Counter(header).items() if name and count > 1]:
            raise ValueError(f"{origin} has two columns named {twice[0]!r}: remove or rename one")
        if lacking := [name for name in needed if name not in header]:
            has = f"but it has {', '.join(map(repr, header))[:200]}" if header else "but it is empty"
            raise ValueError(f"{origin} has no column {lacking[0]!r}; it needs {', '.join(needed)}, {has}")
        for cells in filter(None, rows):
            if len(cells) != len(header):
                raise ValueError(f"{origin}, line {rows.line_num} has {len(cells)} cells, not {len(header)}")
            found = True
            yield rows.line_num, dict(zip(header, cells))
    except csv.Error as error:
        raise ValueError(f"{origin}, line {rows.line_num} is not valid CSV ({error})") from None
    if not found:
        raise ValueError(f"{origin} has no image: it needs at least one line below the column names")
