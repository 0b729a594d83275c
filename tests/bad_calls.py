"""What every bad call of a command line must end in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dataset.cli import run


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every path with the time of its last change, and the content of every file.

    Taking a lock opens its file for writing, so that only its content counts.
    """
    return {
        str(path): (
            0 if path.name == "lock" else path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in folder.rglob("*")
    }


def check_refused(
    main: Callable[[Sequence[str]], None],
    words: str,
    said: str,
    folder: Path,
    capture: pytest.CaptureFixture[str],
) -> str:
    """Exit code 2, one line that begins with ``error: `` and says this, and nothing changed in the folder.

    Returns:
        What stood on the standard output.
    """
    before = snapshot(folder)
    assert run(main, words.split()) == 2
    printed = capture.readouterr()
    assert printed.err.startswith("error: "), printed.err
    assert printed.err.count("\n") == 1, printed.err
    assert said in printed.err
    assert snapshot(folder) == before
    return printed.out
