"""argparse whose complaints are one line, and the checks of paths that all commands share.

`dataset.cli.run` prints what is raised here and exits with 2. Nothing is written by a check.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

MAX_NAME_BYTES = 200
"""Of an output's name; a file system has 255, of which the names of its temporary files need some."""


class OneLineParser(argparse.ArgumentParser):
    """Raises ValueError where argparse would print its usage and exit, and in `read` for an empty value."""

    def error(self, message: str) -> NoReturn:
        """Raise the message, with a pointer to the help."""
        raise ValueError(f"{message}; see {self.prog} --help")

    def read(self, argv: Sequence[str]) -> argparse.Namespace:
        """As `parse_args`, and an empty value is an error: it would be read as the current folder."""
        for before, word in zip(["", *argv], argv):
            option, _, value = word.partition("=")
            if not word or (word.startswith("--") and "=" in word and not value):
                self.error(f"{option or before or 'an argument'} is empty: give a value, or leave it out")
        return self.parse_args(argv)


def output_file(option: str, path: Path) -> Path:
    """The path, if a file can be written there.

    Raises:
        ValueError: one line that names the option, for a folder, a name that is too long, and a place where
            nothing can be written.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give the name of a file")
    if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        raise ValueError(f"{option} has a name of more than {MAX_NAME_BYTES} bytes; give a shorter one")
    _writable(option, path, path.parent)
    return path


def output_folder(option: str, path: Path) -> Path:
    """The path, if it is a folder, or can become one, in which files can be written.

    Raises:
        ValueError: one line that names the option.
    """
    _writable(option, path, path)
    return path


def input_file(option: str, path: Path) -> Path:
    """The path, if it is a file that can be read.

    Raises:
        ValueError: one line that names the option.
    """
    if path.is_dir():
        raise ValueError(f"{option} {path} is a folder; give a file")
    try:
        with open(path, "rb"):
            return path
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error.strerror}") from None


def _writable(option: str, path: Path, folder: Path) -> None:
    """Refuse a path if no file can be made in its folder, or in the nearest one above that exists."""
    try:
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise ValueError(f"{option} {path}: {folder} is a file, not a folder; choose another place")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be written: {error.strerror} in {folder}; choose another place"
        ) from None
