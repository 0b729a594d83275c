"""Image files of a folder, named by an untrusted list. No file outside the folder is read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath

from dataset.convert.source import Part, Rows
from dataset.convert.text import shown
from dataset.fetch.archives import MAX_IMAGE_BYTES
from dataset.fetch.source import Image


class Folder:
    """A folder of images.

    Args:
        option: the option of the command line, for errors.
        root: its value, the folder.

    Raises:
        ValueError: when there is no such folder.
    """

    def __init__(self, option: str, root: Path) -> None:
        if not root.is_dir():
            raise ValueError(f"{option} {root} is not a folder")
        self.option, self.root = option, root
        self._real = os.path.realpath(root)
        self._real_folder = lru_cache(1 << 12)(os.path.realpath)

    def named(self, name: str, where: str) -> PurePosixPath:
        """The path of a file that a list names, below the folder.

        Raises:
            ValueError: for an absolute path, or one that leaves the folder; the message has ``where``.
        """
        path = PurePosixPath(name)
        if not name or path.is_absolute() or ".." in path.parts or "\0" in name or path == PurePosixPath():
            raise ValueError(
                f"{where} has the path {shown(name)}, which is not a path inside the folder of {self.option}"
            )
        return path

    def size(self, path: PurePosixPath, where: str) -> tuple[int, int]:
        """Size in bytes and time of a file; -1 and 0 if it does not exist.

        Raises:
            ValueError: for a link out of the folder, anything that is no file, and a file larger than any
                image; the message has ``where``.
        """
        full = self.root / path
        real = f"{self._real_folder(full.parent)}/{full.name}"
        try:
            found = os.lstat(real)
            if stat.S_ISLNK(found.st_mode):
                real, found = os.path.realpath(real), Path(real).stat()
        except FileNotFoundError:
            return -1, 0
        except OSError as error:
            raise ValueError(f"{where}: {path} cannot be read: {error.strerror}") from None
        if os.path.commonpath([self._real, real]) != self._real:
            raise ValueError(
                f"{where}: {path} is a link to a place outside {self.option} {self.root}: copy the file "
                "into the folder"
            )
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{where}: {path} is not a file")
        if found.st_size > MAX_IMAGE_BYTES:
            raise ValueError(
                f"{where}: {path} has {found.st_size:,} bytes; an image may have at most {MAX_IMAGE_BYTES:,}"
            )
        return found.st_size, found.st_mtime_ns


class FileRows(Rows):
    """`Rows` whose images are files of a folder. The path below the folder is the image's id."""

    def __init__(self, folder: Folder, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.folder = folder
        self.num_bytes = 0
        self._digest = hashlib.sha256(str(folder.root.resolve()).encode())

    def put(self, where: str, client: object, path: str, split: str | None, labels: list[object]) -> None:
        """Add one record.

        Raises:
            ValueError: as `Rows.add` and `Folder` do.
        """
        inside = self.folder.named(path, where)
        self.add(where, client, str(inside), split, labels)
        size, time = self.folder.size(inside, where)
        self.num_bytes += max(size, 0)
        self._digest.update(f"{size} {time}\n".encode())

    def part(self, name: str, place: object) -> Part:
        """The records that were added, with their images; ``place`` as in `Part`."""
        table, root = self.table(), self.folder.root
        ids = table["image_id"]

        def images(start: int) -> Iterator[Image]:
            for row in range(start, len(ids)):
                try:
                    yield (root / ids[row].as_py()).read_bytes()
                except FileNotFoundError:
                    yield None

        return Part(name, self._digest.hexdigest(), table, place, images)  # type: ignore[arg-type]
