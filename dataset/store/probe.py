"""Whether the HDF5 library survives a file, tried out in a process of its own.

Damage in HDF5's own structures, where they carry no checksum, can send the library into an endless loop or
into memory that is not its own; no ``try`` holds that.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import subprocess
import sys
from pathlib import Path

import h5py

CPU_S = 15
"""CPU time, in seconds, after which the library hangs; a busy machine or a slow disk takes none."""
TIMEOUT_S = 600.0
MEMORY = 4 << 30


def look(path: Path) -> None:
    """Read a file's structures, of those with a group for each user or image a sample."""

    def walk(node: h5py.Group | h5py.Dataset, depth: int) -> None:
        dict(node.attrs)
        if isinstance(node, h5py.Group) and depth < 3:
            for name in itertools.islice(node, 40 if depth < 2 else 8):
                if not isinstance(node.get(name, getlink=True), h5py.ExternalLink):
                    walk(node[name], depth + 1)

    with contextlib.suppress(Exception), h5py.File(path) as file:  # what is reported, the reader will see
        walk(file, 0)


def probe(path: Path) -> None:
    """`look` at a file in a process of its own, which takes half a second.

    Raises ValueError if the library crashes or hangs; damage that it reports is left to the reader.
    """
    if _dies_of(path):
        raise ValueError(f"{path} is damaged (the HDF5 library crashes or hangs on it); make it again")


def _dies_of(path: Path) -> bool:
    """Whether a process that looks at a file dies, or never ends."""
    command = [sys.executable, "-m", "dataset.store.probe", str(path), str(CPU_S)]
    try:
        return subprocess.run(command, timeout=TIMEOUT_S, capture_output=True, check=False).returncode < 0
    except subprocess.TimeoutExpired:
        return True


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(sys.argv[2]),) * 2)
    look(Path(sys.argv[1]))
