"""The numbers of Hsu, Qi, Brown (ECCV 2020), Tables 1-5, by the name of the setting."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.settings import Tree

ROUNDS = (1000, 2500, 5000)
BATCHES = (10_000, 25_000, 50_000)
RELATIVE = (10, 50, 90)
"""Where the paper reads its curves: rounds, batches of the largest users, percent of centralised accuracy."""


@cache
def rows() -> dict[str, Tree]:
    """Every setting that the paper has a row for."""
    read: dict[str, Any] = json.loads((Path(__file__).parent / "paper.json").read_text())
    return dict(read["rows"])


def centralised(setting: str) -> float | None:
    """Test accuracy in percent of centralised training on the same images, where the paper gives it."""
    row = rows().get(setting, {})
    name = row.get("centralised", setting)
    value = rows().get(name, {}).get("accuracy")
    return None if value is None else float(value)
