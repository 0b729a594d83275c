"""Tables as plain text and Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tabulate import tabulate


def text_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Rows of percentages as plain text. The columns are those of the first row, without the loss."""
    columns = [name for name in next(iter(rows.values())) if name != "loss"]
    cells = [[name, *(values.get(column) for column in columns)] for name, values in rows.items()]
    return tabulate(cells, ["", *columns], tablefmt="plain", floatfmt=".1f", missingval="-")


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; cells are written as they are."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
