"""How the scores of a task are read: which are better the lower they are, and the unit of each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

LOSS = "loss"
"""The score that every task has: lower is better, and it has no unit."""
PERCENT = "%"
KEY = "score_kinds"
"""The key of ``results.json`` for what a task declares of its scores, where it declares anything."""


@dataclass(frozen=True)
class ScoreKinds:
    """What a task declares of its scores. Of all others, higher is better, and they are in percent.

    Attributes:
        lower_is_better: the names of the scores that are the better the lower they are, besides the loss.
        units: by name; empty for a score that is a plain number.
    """

    lower_is_better: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, results: Mapping[str, Any]) -> ScoreKinds | None:
        """From a ``results.json``; None where it says nothing."""
        if (declared := results.get(KEY)) is None:
            return None
        return cls(tuple(declared.get("lower_is_better", ())), dict(declared.get("units", {})))

    @property
    def declared(self) -> dict[str, Any]:
        """What ``results.json`` keeps; empty where all scores are of the usual kind."""
        kept = {"lower_is_better": list(self.lower_is_better), "units": dict(self.units)}
        return {key: value for key, value in kept.items() if value}

    def is_lower_better(self, name: str) -> bool:
        """Whether the lower of two such scores is the better one."""
        return name == LOSS or name in self.lower_is_better

    def unit(self, name: str) -> str:
        """``%``, the declared unit, or nothing."""
        return self.units.get(name, "" if name == LOSS else PERCENT)

    def decimals(self, name: str, values: Iterable[float], of_percent: int) -> int:
        """With how many decimals these scores are written; ``of_percent`` where they are percentages."""
        return of_percent if self.unit(name) == PERCENT else decimals(values)


USUAL = ScoreKinds()
"""The kinds of a task that declares nothing."""


def labelled(text: str, unit: str) -> str:
    """``MAE on test (degrees)``; the text alone without a unit."""
    return f"{text} ({unit})" if unit else text


def decimals(values: Iterable[float]) -> int:
    """Decimals of numbers of any size: three, or for small ones three significant digits of the greatest."""
    greatest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    return 3 if greatest == 0 else min(8, max(3, 2 - math.floor(math.log10(greatest))))
