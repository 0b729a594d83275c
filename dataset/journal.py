"""What a preprocessing has done so far, in the folder ``F.partial`` beside F: one that was stopped goes on.

It holds what was found of each block of images that was checked, the output in the making, and what was
written of it. Every entry carries its SHA-256 and appears whole or not at all; one that is damaged counts as
not there. One process owns the folder at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType

from dataset.fetch.http import SourceError
from dataset.signals import Stopped

RESUMABLE = (Stopped, KeyboardInterrupt, SourceError)
"""After these the work so far is kept; after any other failure nothing is left behind."""


class Journal:
    """Entries by name; a context manager.

    Raises ValueError when another process writes the same output.
    """

    def __init__(self, output: Path) -> None:
        self.folder = output.with_name(f"{output.name}.partial")
        self.data = self.folder / "data.hdf5"
        self._lock = -1

    def __enter__(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            os.close(self._lock)
            raise ValueError(
                f"another process is writing {self.folder}: wait for its end, or choose another --output_file"
            ) from None
        except OSError:
            pass  # this file system has no locks
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not issubclass(kind, RESUMABLE):
            self.discard()
        os.close(self._lock)

    def discard(self) -> None:
        """Delete the folder; what is not ours in it stays, and then it too."""
        for path in [*self.folder.glob("entry-*"), self.data, self.folder / "lock"]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not empty
            self.folder.rmdir()

    def put(self, name: str, content: bytes) -> None:
        """Keep an entry, on the disk when this returns."""
        path = self._path(name)
        temporary = path.with_name(f"{path.name}.new")
        with open(temporary, "wb") as file:
            file.write(hashlib.sha256(content).digest() + content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def get(self, name: str) -> bytes | None:
        """An entry; None if it is not there, or damaged."""
        try:
            content = self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        return content[32:] if hashlib.sha256(content[32:]).digest() == content[:32] else None

    def forget(self, prefix: str) -> None:
        """Drop the entries whose names begin so."""
        for path in self.folder.glob(f"entry-{prefix}*"):
            path.unlink()

    def size(self) -> int:
        """Bytes of disk that the output in the making has already."""
        return self.data.stat().st_blocks * 512 if self.data.exists() else 0

    def _path(self, name: str) -> Path:
        return self.folder / f"entry-{name}"


def free(folder: Path) -> int:
    """Bytes free on the disk of a folder, which need not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
