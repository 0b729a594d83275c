"""The runs at or below some folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from benchmarks.reporting.runs import FOREIGN, RunOfAnother, RunRecord
from dataset.pages import clean


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run directories at or below these paths, each once, in order; those behind links come last.

    Raises:
        ValueError: for a path that does not exist or holds no run.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ValueError(f"{path} is not a folder: give run directories, or folders of them")
        below = [*_walk(path, follow=False), *_walk(path, follow=True)]
        if not below:
            raise ValueError(
                f"{path} has no run (no config.yaml and no results.json in it or below it): give run "
                "directories"
            )
        for directory in below:
            found.setdefault(directory.resolve(), directory)
    return list(found.values())


def _walk(top: Path, follow: bool) -> Iterator[Path]:
    """The run directories in a folder.

    Args:
        top: the folder.
        follow: also behind links, but for those to a folder that holds ``top``, and each folder once.
    """
    seen = {*top.resolve().parents}
    for where, names, files in os.walk(top, followlinks=follow):
        if (place := Path(where).resolve()) in seen:
            names.clear()
            continue
        seen.add(place)
        if {"config.yaml", "results.json"} & set(files):
            names.clear()  # what lies inside a run is the run's
            yield Path(where)
        names[:] = sorted(name for name in names if not name.startswith(".") and name != "wandb")


def finished_runs(
    paths: Iterable[Path], read: Callable[[Path], RunRecord], what: str
) -> tuple[list[RunRecord], list[str]]:
    """The runs at or below these paths that can be reported, and a line for each other one.

    Args:
        paths: of runs and of folders with runs.
        read: reads one, as `finished_run` does. The runs of other benchmarks share a line.
        what: what is reported, for the error.

    Raises:
        ValueError: when there is none.
    """
    places = list(paths)
    found: list[RunRecord] = []
    left_out: list[str] = []
    others: Counter[str] = Counter()
    for directory in find_runs(places):
        try:
            found.append(read(directory))
        except RunOfAnother as other:
            others[str(other).removeprefix(FOREIGN).split(",")[0].strip()] += 1
        except ValueError as fault:
            left_out.append(clean(fault))
    left_out += [f"{number:,} run{'s' * (number > 1)} of {name}" for name, number in others.items()]
    if not found:
        raise ValueError(f"no finished run {what} in {', '.join(map(str, places))}: {'; '.join(left_out)}")
    return found, left_out
