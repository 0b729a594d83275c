"""Tables as plain text, Markdown and CSV, and how their cells are written."""

from __future__ import annotations

import csv
import io
import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tabulate import tabulate

from dataset.files import write_bytes
from pfl_ext.tasks.score_kinds import LOSS, PERCENT, USUAL, ScoreKinds, labelled


def text_table(rows: Mapping[str, Mapping[str, float]], kinds: ScoreKinds = USUAL) -> str:
    """Rows of scores as plain text. The columns are those of the first row, without the loss.

    Args:
        rows: scores by name, by the name of the row.
        kinds: says which scores are no percentages; these have their unit in the head.
    """
    columns = [name for name in next(iter(rows.values())) if name != LOSS]
    heads = [name if kinds.unit(name) == PERCENT else labelled(name, kinds.unit(name)) for name in columns]
    form = ["", *(f".{each}f" for each in decimals_of(rows.values(), columns, kinds))]
    cells = [[name, *(values.get(column) for column in columns)] for name, values in rows.items()]
    return tabulate(cells, ["", *heads], tablefmt="plain", floatfmt=form, missingval="-")


def decimals_of(rows: Iterable[Mapping[str, float]], columns: Sequence[str], kinds: ScoreKinds) -> list[int]:
    """With how many decimals the scores of each column of a final table are written."""
    rows = list(rows)
    return [kinds.decimals(name, [row[name] for row in rows if name in row], 1) for name in columns]


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


def plain_names(titles: Iterable[str]) -> list[str]:
    """A name of small letters, digits and hyphens for each title, as for a file; no two are the same."""
    names = dict[str, None]()
    for title in titles:
        plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "unnamed"
        numbered = (plain if number == 1 else f"{plain}-{number}" for number in itertools.count(1))
        names[next(name for name in numbered if name not in names)] = None
    return list(names)
