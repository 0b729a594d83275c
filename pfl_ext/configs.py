"""What the config dataclasses of this package share.

A config dataclass stands next to the code that uses it, checks its values when it is made, and is a section
of a run's config, or a part of one: a value is declared once and handed on whole. A field's docstring is one
line that says what it is, with its unit; ``--help`` shows it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
"""Unknown fields, infinities and NaN are refused."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
"""A number of at least 0 and below 1."""


@dataclass(frozen=True, config=STRICT)
class NoOptions:
    """Options of an algorithm or optimiser that has none."""
