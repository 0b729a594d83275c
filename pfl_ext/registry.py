"""Registries of things that a config chooses by name. A thing registers itself in a file of its package."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from dataset.files import OWN, import_all, module_in_execution

Thing = TypeVar("Thing")
Kept = TypeVar("Kept")


def of_ones_own() -> str:
    """What is said of an unknown name where the user names no files of their own."""
    if os.environ.get(OWN):
        return ""
    return f"; if it is defined in a file of yours, set {OWN} to the name of the file"


class Registry(Generic[Thing]):
    """The things of one kind by name; a new one is a new file in the package.

    Args:
        package: its modules are imported before the first look-up, so that they register their things.
        key: the config key that names a thing.
    """

    def __init__(self, package: str, key: str) -> None:
        self._package, self.key = package, key
        self._things: dict[str, Thing] = {}
        self.registered_by: dict[str, str] = {}
        """The module that registered each thing, which may be defined in another."""
        self._is_complete = False

    def add(self, name: str, thing: Thing) -> None:
        """Register a thing.

        Raises:
            ValueError: when another thing has this name.
        """
        if self._things.setdefault(name, thing) is not thing:
            raise ValueError(f"there are two {self.key} named {name}: rename one")
        self.registered_by[name] = module_in_execution()

    def register(self, name: str) -> Callable[[Kept], Kept]:
        """Decorator that registers a thing under this name."""

        def decorate(thing: Kept) -> Kept:
            self.add(name, thing)  # type: ignore[arg-type]  # a class decorator keeps the class's own type
            return thing

        return decorate

    def names(self) -> Sequence[str]:
        """The names of all things, in alphabetical order.

        Raises:
            ValueError: when a module of the package cannot be imported.
        """
        if not self._is_complete:
            import_all(self._package)
            self._is_complete = True
        return sorted(self._things)

    def __getitem__(self, name: str) -> Thing:
        """The thing of this name.

        Raises:
            ValueError: when nothing has this name.
        """
        if name not in self.names():
            raise ValueError(
                f"{self.key} is {name!r}: choose one of {', '.join(self.names())}{of_ones_own()}"
            )
        return self._things[name]
