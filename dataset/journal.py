"""The journal of a preprocessing in the folder ``F.partial`` beside F, from which a stopped one continues.

It holds the results for each checked block of images, the unfinished output, and a list of what was written
to it. Every entry has its SHA-256 and appears completely or not at all. A damaged entry counts as missing.
One process owns the folder at a time. `only_writer` also keeps apart the commands without a journal.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from dataset.cli import SourceError, Stopped, output_file
from dataset.files import HALF_WRITTEN, locked, write_bytes

RESUMABLE = (Stopped, KeyboardInterrupt, SourceError)
"""The errors after which the work so far is kept, as after a full disk; after any other failure nothing is
left behind."""
FULL = (errno.ENOSPC, errno.EDQUOT)


def _folder_of(output: Path) -> Path:
    return output.with_name(f"{output.name}.partial")


@contextlib.contextmanager
def only_writer(output: Path, overwrite: bool = True, option: str = "--output_file") -> Iterator[None]:
    """Be the only process that writes this output within the block.

    A command that adds to a file also reads it within the block.

    Args:
        output: the path of the file.
        overwrite: whether it may exist. This is checked under the lock, because another process may have
            finished the file since the command began.
        option: the name of the option, for the error.

    Raises:
        ValueError: when another process writes it, or it exists and may not.
    """
    refusal = f"another process is writing {output}: wait until it ends, or choose another {option}"
    with _alone(_folder_of(output) / "lock", refusal):
        output_file(option, output, overwrite)
        yield


@contextlib.contextmanager
def only_downloader(folder: Path | None) -> Iterator[None]:
    """Be the only process that downloads into this folder within the block: another would cut off half files,
    and delete at its end what this one still reads.

    Args:
        folder: of ``--download_folder``; None: the one beside the output, which has one writer.

    Raises:
        ValueError: when another process downloads into it.
    """
    if folder is None:
        yield
        return
    refusal = f"another process is downloading into {folder}: wait until it ends, or choose another "
    with _alone(folder / ".download.lock", refusal + "--download_folder"):
        yield


@contextlib.contextmanager
def _alone(lock: Path, refusal: str) -> Iterator[None]:
    """Hold a lock file within the block; it goes afterwards, and its folder, if that is empty."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with locked(lock, refusal):
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it is not empty
                lock.parent.rmdir()


class Journal:
    """Entries by name; a context manager. It is entered, and refused, as `only_writer` is.

    Args:
        output: the path of the file.
        overwrite: whether it may exist.
        locked: whether the caller is the `only_writer` already.
    """

    def __init__(self, output: Path, overwrite: bool = True, locked: bool = False) -> None:
        self.folder = _folder_of(output)
        self.data = self.folder / "data.hdf5"
        lock = contextlib.nullcontext() if locked else only_writer(output, overwrite)
        self._lock: contextlib.AbstractContextManager[None] = lock

    def __enter__(self) -> Journal:
        self._lock.__enter__()
        return self

    def __exit__(self, _: object, fault: BaseException | None, __: object) -> None:
        if not (isinstance(fault, RESUMABLE) or _is_full(fault)):
            self.discard()
        self._lock.__exit__(None, None, None)

    def discard(self) -> None:
        """Delete what is kept. Files in the folder that are not ours stay, and then the folder too."""
        half = self.folder.glob(HALF_WRITTEN[0])
        for path in [*self.folder.glob("entry-*"), *half, self.data]:
            path.unlink(missing_ok=True)

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
