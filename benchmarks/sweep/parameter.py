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
LARGEST_LOGARITHM = 700
"""The largest that can be drawn: a float holds numbers up to e to the power of 709."""


class NotGiven:
    """Stands for a ``value`` that is not given, as null is a value."""


USED = {
    "constant": ("value",),
    "categorical": ("values", "probabilities"),
    "categorical_w_probabilities": ("values", "probabilities"),
    "q_uniform": ("min", "max", "q"),
    "q_log_uniform_values": ("min", "max", "q"),
    "normal": ("mu", "sigma"),
    "log_normal": ("mu", "sigma"),
}
"""The keys that a distribution uses; those that are not named here use ``min`` and ``max``."""
KEYS = ("value", "values", "probabilities", "min", "max", "q", "mu", "sigma")


@dataclass(frozen=True, config=STRICT)
class Parameter:
    """One entry of ``parameters``, with wandb's keys. A key that its distribution does not use is refused."""

    value: Any = NotGiven
    values: list[Any] | None = None
    probabilities: list[float] | None = None
    distribution: Distribution | None = None
    min: float | int | None = None
    max: float | int | None = None
    q: float | int | None = None
    mu: float | None = None
    """None: 0."""
    sigma: float | None = None
    """None: 1."""

    def __post_init__(self) -> None:
        kind = self.kind
        self._check_keys()
        if kind.startswith("categorical"):
            self._check_values()
        if "uniform" in kind:
            self._check_range()
        if self.sigma is not None and self.sigma <= 0:
            raise ValueError(f"sigma is {self.sigma:g}: {kind} needs one above 0")
        if kind in ("log_uniform", "log_normal") and max(map(abs, self._logarithms())) > LARGEST_LOGARITHM:
            raise ValueError(
                f"{kind} is given by logarithms, and those here are too large or too small: "
                "log_uniform_values takes the numbers themselves"
            )

    def _check_keys(self) -> None:
        """Refuse a missing value, keys without effect, and values that no config key takes."""
        kind = self.kind
        if kind == "constant" and self.value is NotGiven:
            raise ValueError("value is missing: give value, values, or min and max")
        given = [key for key in KEYS if getattr(self, key) is not (NotGiven if key == "value" else None)]
        used = USED.get(kind, ("min", "max"))
        if unused := [key for key in given if key not in used]:
            raise ValueError(
                f"{unused[0]} has no effect on a parameter that is {kind}, which uses {' and '.join(used)}: "
                f"remove {unused[0]}, or set distribution to one that uses it"
            )
        if any(isinstance(value, (list, dict)) for value in (self.value, *(self.values or ()))):
            raise ValueError("a value must be a number, a word, true, false or null, not a list or a mapping")

    def _check_values(self) -> None:
        """Refuse values that cannot be drawn."""
        if not self.values:
            raise ValueError("values is missing or empty")
        shares = self.probabilities
        if shares is None:
            if self.kind == "categorical_w_probabilities":
                raise ValueError(
                    "probabilities is missing: categorical_w_probabilities needs one for each value"
                )
            return
        if len(shares) != len(self.values):
            raise ValueError("there must be as many probabilities as values")
        if not all(share >= 0 for share in shares) or not 0 < math.fsum(shares) < math.inf:
            raise ValueError("probabilities must be 0 or above, and one of them above 0")

    def _check_range(self) -> None:
        """Refuse a range, or a step, without values between ``min`` and ``max``, or with too many."""
        kind, low, high = self.kind, self.min, self.max
        if low is None or high is None or not low < high:
            raise ValueError(f"{kind} needs min and max, min the smaller")
        if kind.endswith("log_uniform_values") and low <= 0:
            raise ValueError("min must be above 0 for a logarithmic scale")
        if kind.startswith("q_") and not (self.q and self.q > 0):
            raise ValueError(f"{kind} needs q, the step, above 0")
        if kind == "q_uniform" and (high - low) / (self.q or 1) > MOST_VALUES:
            raise ValueError(f"q_uniform has more than {MOST_VALUES:,} values: choose a larger q")
        if kind == "int_uniform" and (low != int(low) or high != int(high)):
            raise ValueError("int_uniform needs whole numbers")
        if kind == "int_uniform" and max(-low, high) > LARGEST_INT:
            raise ValueError(f"int_uniform needs numbers up to {LARGEST_INT}")

    def _logarithms(self) -> tuple[float, float]:
        """The least and the greatest logarithm that can be drawn."""
        if self.kind == "log_uniform":
            return float(self.min or 0), float(self.max or 0)
        x = self._normal()
        return x.inv_cdf(TINY), x.inv_cdf(1 - TINY)

    def _normal(self) -> NormalDist:
        return NormalDist(self.mu or 0.0, 1.0 if self.sigma is None else self.sigma)

    @property
    def kind(self) -> Distribution:
        """The distribution, as wandb infers it where the file does not say."""
        if self.distribution is not None or self.values is not None:
            return self.distribution or "categorical"
        if self.min is None and self.max is None:
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
            x = self._normal().inv_cdf(min(max(drawn, TINY), 1 - TINY))
            return math.exp(x) if self.kind == "log_normal" else x
        if self.probabilities is None or self.values is None:
            return drawn
        edges = itertools.accumulate(share / math.fsum(self.probabilities) for share in self.probabilities)
        return next((v for v, edge in zip(self.values, edges) if drawn < edge), self.values[-1])


def _multiple(x: float, q: float) -> float | int:
    """The multiple of ``q`` that is nearest to ``x``; an integer where ``q`` is one."""
    rounded = round(x / q) * q
    return int(rounded) if q == int(q) else float(f"{rounded:.10g}")
