"""The numbers of the FLAIR paper (Table 1 and the table beside Figure 4), and tables beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pfl_ext.tasks.metrics import COLUMNS


@cache
def _table() -> dict[str, Any]:
    return dict(json.loads((Path(__file__).parent / "table1.json").read_text()))


def settings() -> tuple[str, ...]:
    """The twelve rows of Table 1."""
    return tuple(_table()["rows"])


def row(setting: str) -> dict[str, float] | None:
    """The paper's test columns of one setting, percent, mean of five seeds; None if it has no such row."""
    found = _table()["rows"].get(setting)
    return dict(zip(COLUMNS, found["mean"])) if found else None


def row_std(setting: str) -> dict[str, float] | None:
    """The standard deviations over five seeds beside `row`; None if the paper has no such row."""
    found = _table()["rows"].get(setting)
    return dict(zip(COLUMNS, found["std"])) if found else None


def per_class(setting: str) -> dict[str, float]:
    """The paper's AP of each coarse class in percent; empty for settings the paper does not give."""
    table = _table()["per_class_ap"]
    return dict(zip(table["classes"], table[setting])) if setting in table else {}


def results_table(rows: Mapping[str, Mapping[str, float]]) -> str:
    """Rows of percentages as a plain-text table. Its columns are those of the first row, without the loss."""
    columns = [name for name in next(iter(rows.values())) if name != "loss"]
    width = max(len(name) for name in rows)
    lines = [" " * width + "".join(f"  {column:>6}" for column in columns)]
    for name, values in rows.items():
        cells = [f"{values[c]:.1f}" if c in values else "-" for c in columns]
        lines.append(
            f"{name:<{width}}" + "".join(f"  {cell:>{max(6, len(c))}}" for c, cell in zip(columns, cells))
        )
    return "\n".join(lines)
