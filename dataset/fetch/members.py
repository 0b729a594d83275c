"""Reads the small files of a data set, its lists and annotations, from folders and tar and zip archives.

Files may be untrusted. So each has a largest size, links within archives are not followed, and nothing is
written to disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from dataset.fetch.archives import Member, archive_members

Wanted = Callable[[PurePosixPath], tuple[str, int] | None]
"""Maps a path within a folder or an archive to the name under which the file is kept and its largest size in
bytes; None for a file that is not read."""
MAX_TOTAL = 1 << 32
"""Most bytes of all files together."""


def collected(places: Sequence[Path], wanted: Wanted) -> dict[str, bytes]:
    """The content of the wanted files of some folders and archives, by name.

    Raises:
        ValueError: for a damaged archive, when one file or all files together are too large, or when two
            files of one name differ.
    """
    found: dict[str, bytes] = {}
    total = 0
    for place in places:
        for path, size, read in _files(place):
            chosen = None if _is_rubbish(path) else wanted(path)
            if chosen is None:
                continue
            name, most = chosen
            total += size
            if size > most or total > MAX_TOTAL:
                raise ValueError(f"{place}: {path} is too large ({size:,} bytes)")
            content = read()
            if found.setdefault(name, content) != content:
                raise ValueError(
                    f"{place} has two different files {name}: give a folder with only one of them"
                )
    return found


def _files(place: Path) -> Iterator[Member]:
    if not place.is_dir():
        return archive_members(place)
    files = sorted(files_below(place))
    return (
        (PurePosixPath(path.relative_to(place).as_posix()), path.stat().st_size, path.read_bytes)
        for path in files
    )


def files_below(folder: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files of a folder and of those in it, linked folders among them, but for one around its link."""
    real = os.path.realpath(folder)
    if real in above:
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from files_below(path, above | {real})
        elif path.is_file():
            yield path


def _is_rubbish(path: PurePosixPath) -> bool:
    """Whether it is a file that macOS adds beside others."""
    return "__MACOSX" in path.parts or path.name.startswith(".")
