"""What one option may be in a private run: the rules of `benchmarks.core.config.privacy_matrix`.

A benchmark gives the same rules for its own keys, as ``privacy_rules`` of its config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PRIVACY = ("privacy", "local_privacy")
"""The sections of a config that ask for it."""
Values = tuple[Any, ...] | None  # None: any value
OF_THE_DATA = "says which images there are and whose they are: the data set that the guarantee is about"
NOT_OF_TRAINING_USERS = "looks at val and test users, and at the released model"


@dataclass(frozen=True)
class Rule:
    """What one option may be in a private run."""

    argument: str
    """Why the allowed values keep the guarantee, and why the others do not."""
    central: Values = None
    """Allowed with ``privacy``; None: any."""
    local: Values = None
    """Allowed with ``local_privacy``; None: any."""

    def allowed(self, section: str) -> Values:
        """The values that go with ``section``, ``privacy`` or ``local_privacy``; None: any."""
        return self.central if section == "privacy" else self.local

    def allows(self, section: str, value: Any) -> bool:
        """Whether a value goes with ``section``."""
        values = self.allowed(section)
        return values is None or value in values


def each(argument: str, section: str, keys: str) -> dict[str, Rule]:
    """A rule for each of several keys of a section, which may have any value."""
    return {f"{section}.{key}": Rule(argument) for key in keys.split()}


def only(argument: str, *values: Any) -> Rule:
    """A rule that allows only these values, with either kind of privacy."""
    return Rule(argument, values, values)
