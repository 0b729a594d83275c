"""What the fuzz campaign tries: a reader and sound files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Target:
    """A reader: sound files, and how a file is read; the path's name has ``suffix``."""

    name: str
    seeds: Sequence[bytes]
    read: Callable[[Path], object]
    suffix: str = ""
    text: bool = False
    same: bool = False
    """What is read without complaint must equal what was read of the seed."""
