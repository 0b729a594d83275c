"""Tables as plain text, Markdown and CSV, and how their cells are written."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from dataset.files import write_bytes


def text_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Rows of percentages as plain text. The columns are those of the first row, without the loss."""
    columns = [name for name in next(iter(rows.values())) if name != "loss"]
    cells = [[name, *(values.get(column) for column in columns)] for name, values in rows.items()]
    return tabulate(cells, ["", *columns], tablefmt="plain", floatfmt=".1f", missingval="-")


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; cells are written as they are."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def print_row(*cells: str) -> None:
    """One row of a Markdown table, on the screen at once."""
    print(f"| {' | '.join(cells)} |", flush=True)


def csv_table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as CSV; None is an empty cell."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()


def write_texts(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Write these texts, but for empty ones, into a folder as files of these names; their paths."""
    paths = {folder / name: text for name, text in texts.items() if text}
    for path, text in paths.items():
        write_bytes(path, text.encode())
    return list(paths)


def spread(values: Sequence[float | None], digits: int = 1) -> str:
    """``mean ± std`` over seeds (n - 1), the value alone where there is but one, a dash where one is None."""
    known = [float(value) for value in values if value is not None]
    if not known or len(known) < len(values):
        return "-"
    deviation = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.fmean(known):.{digits}f}{deviation}"


def section(head: str, lines: Sequence[str]) -> list[str]:
    """The lines of a Markdown section: its head, and a bullet for each line; nothing without lines."""
    return [head, "", *(f"* {line}" for line in lines), ""] if lines else []
