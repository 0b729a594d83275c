"""The interface by which the engine reports how lanes spend their time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

Item = TypeVar("Item")


class Watch:
    """Base class, which measures nothing. Its methods are called from the lanes' threads."""

    def charge(self, part: str) -> AbstractContextManager[None]:
        """A context manager that charges the work in it to a kind, such as ``training``."""
        return nullcontext()

    def iterator(self, part: str, items: Iterator[Item]) -> Iterator[Item]:
        """The same items. Waiting for each is charged to a kind, such as ``data``."""
        return items
