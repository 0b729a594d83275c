"""Types and settings that the config dataclasses of this package share.

A config dataclass stands next to the code that uses it and checks its values when it is made. It is a section
of a run's config, or a part of one, so that every value is declared once and passed on whole. A field's
docstring is one line that says what it is, with its unit; ``--help`` shows it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
"""Unknown fields, infinities and NaN are refused."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A number of at least 0 and below 1."""


def rounded_down(share: float, n: int) -> int:
    """``share n``, rounded down. 0.29 of 100 is 29, although the product of the floats is below it."""
    return int(share * n + 1e-9)


@dataclass(frozen=True, config=STRICT)
class NoOptions:
    """The options of an algorithm or optimiser without options."""
