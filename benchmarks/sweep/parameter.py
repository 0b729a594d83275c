"""The values that one config key takes in a sweep, by wandb's distributions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, Literal

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from pydantic.dataclasses import dataclass

from pfl_ext.configs import STRICT

Distribution = Literal[
    "constant", "categorical", "categorical_w_probabilities", "int_uniform", "uniform", "q_uniform",
    "log_uniform", "log_uniform_values", "q_log_uniform_values", "normal", "log_normal",
]  # fmt: skip
TINY = 1e-12
MOST_VALUES = 1_000_000
"""Most values of a parameter with a step, and most points of a grid: they are listed."""
LARGEST_INT = 2**53


@dataclass(frozen=True, config=STRICT)
class Parameter:
    """One entry of ``parameters``, with wandb's keys."""

    value: Any = None
    values: list[Any] | None = None
    probabilities: list[float] | None = None
    distribution: Distribution | None = None
    min: float | int | None = None
    max: float | int | None = None
    q: float | int | None = None
    mu: float = 0.0
    sigma: float = 1.0

    def __post_init__(self) -> None:
        kind = self.kind
        if kind.startswith("categorical") and not self.values:
            raise ValueError("values is missing or empty")
        if self.probabilities is not None and len(self.probabilities) != len(self.values or ()):
            raise ValueError("there must be as many probabilities as values")
        if "uniform" in kind:
            if self.min is None or self.max is None or not self.min < self.max:
                raise ValueError(f"{kind} needs min and max, min the smaller")
            if kind.endswith("log_uniform_values") and self.min <= 0:
                raise ValueError("min must be above 0 for a logarithmic scale")
            if kind == "int_uniform" and (self.min != int(self.min) or self.max != int(self.max)):
                raise ValueError("int_uniform needs whole numbers")
        if kind.startswith("q_") and not (self.q and self.q > 0):
            raise ValueError(f"{kind} needs q, the step, above 0")
        if kind == "int_uniform" and max(-(self.min or 0), self.max or 0) > LARGEST_INT:
            raise ValueError(f"int_uniform needs numbers up to {LARGEST_INT}")
        if kind == "q_uniform" and ((self.max or 0) - (self.min or 0)) / (self.q or 1) > MOST_VALUES:
            raise ValueError(f"q_uniform has more than {MOST_VALUES:,} values: choose a larger q")

    @property
    def kind(self) -> Distribution:
        """The distribution, as wandb infers it where the file does not say."""
        if self.distribution is not None or self.values is not None:
            return self.distribution or "categorical"
        if self.min is None or self.max is None:
            return "constant"
        return "int_uniform" if isinstance(self.min, int) and isinstance(self.max, int) else "uniform"

    def options(self) -> Sequence[Any] | None:
        """Every value, where there are finitely many."""
        low, high, q = float(self.min or 0), float(self.max or 0), float(self.q or 1)
        if self.kind == "constant" or self.values is not None:
            return [self.value] if self.values is None else list(self.values)
        if self.kind == "int_uniform":
            return range(int(low), int(high) + 1)
        if self.kind == "q_uniform":
            return [_multiple(i * q, q) for i in range(round(low / q), round(high / q) + 1)]
        return None

    def space(self) -> BaseDistribution:
        """Optuna's distribution of what `at` turns into a value; on [0, 1] for the kinds that it lacks."""
        low, high = float(self.min or 0), float(self.max or 0)
        if self.values is not None and self.probabilities is None:
            return CategoricalDistribution(self.values)
        if self.kind == "int_uniform":
            return IntDistribution(int(low), int(high))
        if self.kind in ("uniform", "q_uniform"):
            return FloatDistribution(low, high)
        if self.kind == "log_uniform":
            low, high = math.exp(low), math.exp(high)
        return (
            FloatDistribution(low, high, log=True) if "log_uniform" in self.kind else FloatDistribution(0, 1)
        )

    def at(self, drawn: Any) -> Any:
        """The value of the config key for what was drawn from `space`."""
        if self.kind.startswith("q_"):
            return _multiple(drawn, float(self.q or 1))
        if self.kind in ("normal", "log_normal"):
            x = NormalDist(self.mu, self.sigma).inv_cdf(min(max(drawn, TINY), 1 - TINY))
            return math.exp(x) if self.kind == "log_normal" else x
        if self.probabilities is None or self.values is None:
            return drawn
        edges = itertools.accumulate(share / math.fsum(self.probabilities) for share in self.probabilities)
        return next((v for v, edge in zip(self.values, edges) if drawn < edge), self.values[-1])


def _multiple(x: float, q: float) -> float | int:
    """The multiple of ``q`` that is nearest to ``x``; an integer where ``q`` is one."""
    rounded = round(x / q) * q
    return int(rounded) if q == int(q) else float(f"{rounded:.10g}")
