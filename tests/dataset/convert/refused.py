"""A call of ``dataset.convert`` that is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dataset.convert.__main__ import main
from tests.bad_calls import check_refused


def refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The progress bars of a source that is read before it is refused are not looked at."""
    real = capsys.readouterr

    class Line:
        @staticmethod
        def readouterr() -> Any:
            found = real()
            lines = [part for part in found.err.replace("\r", "\n").splitlines() if part.strip()]
            bars = (
                "0/2 list",
                "1/2 check",
                "2/2 write",
                "own/labels.csv: these columns",
                "splits by file names:",
            )
            kept = [line for line in lines if not line.lstrip("\x1b[A ").startswith(bars)]
            return type(found)(found.out, "".join(f"{line}\n" for line in kept))

    check_refused(main, words, said, Path.cwd(), Line())  # type: ignore[arg-type]
    assert not Path("out.hdf5").exists()
