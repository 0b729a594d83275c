"""The numbers of the FLAIR paper (Table 1 and the table beside Figure 4)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pfl_ext.tasks.multi_label_scores import COLUMNS


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
