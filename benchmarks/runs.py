"""Where runs lie."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
    OverflowError,
)
"""With what reading a run's JSON or YAML can end when it is not what it should be."""


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories at or below these paths, each once, in order.

    :raises ValueError: for a path that does not exist or holds no run.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path} is no directory: give run directories, or directories of them")
        below = list(_walk(path))
        if not below:
            raise ValueError(f"{path} holds no run: no config.yaml and no results.json at or below it")
        found.update(dict.fromkeys(below))
    return list(found)


def _walk(top: Path) -> Iterator[Path]:
    for where, names, files in os.walk(top):
        if {"config.yaml", "results.json"} & set(files):
            names.clear()  # what lies inside a run is the run's
            yield Path(where)
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "wandb")
