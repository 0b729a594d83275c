"""Where the lanes' time goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

Item = TypeVar("Item")


class Watch:
    """Where the lanes' time goes: this one measures nothing. It is called from their threads."""

    def charge(self, part: str) -> AbstractContextManager[None]:
        """A context manager around work of a kind: ``training``."""
        return nullcontext()

    def iterator(self, part: str, items: Iterator[Item]) -> Iterator[Item]:
        """The same items; waiting for each is charged to a kind: ``data``."""
        return items
