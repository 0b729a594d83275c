"""Where runs lie, and which of them are seeds of one experiment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.core.config.digests import experiment
from benchmarks.core.config.sections import TrainingConfig
from benchmarks.core.config.trees import Tree

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


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Within, what a damaged or missing file of a run raises is a ValueError that names the directory."""
    try:
        yield
    except DAMAGE as fault:
        text = " ".join(f"{type(fault).__name__}: {fault}".split())
        raise ValueError(
            f"{directory} holds no whole run ({text}): leave it out, or make the run again"
        ) from fault


def read_results(directory: Path) -> Tree:
    """``results.json`` of a run that has ended. Call it within `reading`."""
    return dict(json.loads((directory / "results.json").read_text()))


def read_history(directory: Path) -> list[Tree]:
    """The lines of a run's ``metrics.jsonl``. Call it within `reading`."""
    return [dict(json.loads(line)) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def check_numbers(tree: Tree, *paths: tuple[str, ...]) -> None:
    """Raise a `DAMAGE` where one of the paths of keys in a tree leads nowhere, or to what is no number."""
    for path in paths:
        node: Any = tree
        for key in path:
            node = node[key]
        if not isinstance(node, (int, float)):
            raise TypeError(f"{' '.join(path)} is {node!r}, which is no number")


def _walk(top: Path) -> Iterator[Path]:
    for where, names, files in os.walk(top):
        if {"config.yaml", "results.json"} & set(files):
            names.clear()  # what lies inside a run is the run's
            yield Path(where)
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "wandb")


def check_seeds(configs: Mapping[Path, Tree], kind: type[TrainingConfig]) -> None:
    """Refuse runs that are not different seeds of one experiment, whose mean would mean nothing.

    Args:
        configs: of each run directory the resolved config.
        kind: the benchmark's type of config.

    Raises:
        ValueError: a line that names two of the directories and in what their configs differ, or their seed.
    """
    seeds: dict[Any, Path] = {}
    first, *_ = configs
    reference = experiment(configs[first], kind)
    for directory, tree in configs.items():
        fields = experiment(tree, kind)
        keys = [k for k in {**reference, **fields} if reference.get(k) != fields.get(k)]
        if keys:
            shown = "; ".join(f"{k}: {reference.get(k)} -> {fields.get(k)}" for k in keys[:3])
            raise ValueError(
                f"{first} and {directory} are no seeds of one experiment, they differ in more than the seed "
                f"({shown}{'; ...' if keys[3:] else ''}): give them apart, or only one of them"
            )
        seed = tree.get("seed")
        if seed in seeds:
            raise ValueError(
                f"{seeds[seed]} and {directory} have the same config and the same seed, {seed}: give only one"
            )
        seeds[seed] = directory
