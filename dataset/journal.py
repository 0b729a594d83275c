"""The journal of a preprocessing in the folder ``F.partial`` beside F, from which a stopped one continues.

It holds the results for each checked block of images, the unfinished output, and a list of what was written
to it. Every entry has its SHA-256 and appears completely or not at all. A damaged entry counts as missing.
One process owns the folder at a time.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from pathlib import Path

from dataset.cli import SourceError, Stopped
from dataset.files import HALF_WRITTEN, locked, write_bytes

RESUMABLE = (Stopped, KeyboardInterrupt, SourceError)
"""The errors after which the work so far is kept, as after a full disk; after any other failure nothing is
left behind."""
FULL = (errno.ENOSPC, errno.EDQUOT)


class Journal:
    """Entries by name; a context manager.

    Raises ValueError when another process writes the same output.
    """

    def __init__(self, output: Path) -> None:
        self.folder = output.with_name(f"{output.name}.partial")
        self.data = self.folder / "data.hdf5"
        refusal = (
            f"another process is writing to {self.folder}: wait until it ends, or choose another "
            "--output_file"
        )
        self._lock = locked(self.folder / "lock", refusal)

    def __enter__(self) -> Journal:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock.__enter__()
        return self

    def __exit__(self, _: object, fault: BaseException | None, __: object) -> None:
        if not (isinstance(fault, RESUMABLE) or _is_full(fault)):
            self.discard()
        self._lock.__exit__(None, None, None)

    def discard(self) -> None:
        """Delete the folder. Files in it that are not ours stay, and then the folder too."""
        half = self.folder.glob(HALF_WRITTEN[0])
        for path in [*self.folder.glob("entry-*"), *half, self.data, self.folder / "lock"]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # it is not empty
            self.folder.rmdir()

    def put(self, name: str, content: bytes) -> None:
        """Keep an entry, on the disk when this returns."""
        write_bytes(self._path(name), hashlib.sha256(content).digest() + content)

    def get(self, name: str) -> bytes | None:
        """An entry; None if it is not there, or damaged."""
        try:
            content = self._path(name).read_bytes()
        except FileNotFoundError:
            return None
        return content[32:] if hashlib.sha256(content[32:]).digest() == content[:32] else None

    def forget(self, prefix: str) -> None:
        """Delete the entries whose names begin with ``prefix``."""
        for path in self.folder.glob(f"entry-{prefix}*"):
            path.unlink()

    def size(self) -> int:
        """Bytes on disk of the unfinished output."""
        return self.data.stat().st_blocks * 512 if self.data.exists() else 0

    def _path(self, name: str) -> Path:
        return self.folder / f"entry-{name}"


def _is_full(fault: BaseException | None) -> bool:
    """Whether an error, or the one that it puts into other words, is that a disk or a quota is full."""
    while fault is not None:
        if isinstance(fault, OSError) and fault.errno in FULL:
            return True
        fault = fault.__cause__ or fault.__context__
    return False


def free(folder: Path) -> int:
    """Bytes free on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(_existing(folder)).free


def disk_of(folder: Path) -> int:
    """The number of the disk of a folder, which need not exist yet."""
    return _existing(folder).stat().st_dev


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder
