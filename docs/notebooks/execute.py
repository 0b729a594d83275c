"""Writes the notebooks of this folder: each ``NAME.py`` is executed and becomes ``NAME.ipynb`` with its outputs.

    make notebooks                    all of them; or: python docs/notebooks/execute.py NAME ...

Sources are in jupytext's percent format, so that they can be read, compared and linted as code.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

HERE = Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))

from dataset.cli import run
from dataset.files import write_bytes

NAMES = tuple(sorted(path.stem for path in HERE.glob("*.py") if path.stem != "execute"))
SECONDS = 900
"""The longest time for one cell."""


def source(name: str) -> NotebookNode:
    """A notebook without outputs. Its cells are numbered, so that the same source gives the same file."""
    notebook = jupytext.read(HERE / f"{name}.py")
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def executed(name: str, folder: Path) -> NotebookNode:
    """Run a notebook's cells in order in a process of its own, which works in ``folder``.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell fails.
    """
    notebook = source(name)
    place = {"metadata": {"path": str(folder)}}
    client = NotebookClient(notebook, timeout=SECONDS, coalesce_streams=True, resources=place)
    client.execute(env={**os.environ, "PYTHONPATH": str(HERE.parents[1])})
    for cell in notebook.cells:  # times of execution, which differ each time
        cell.metadata.pop("execution", None)
    return notebook


def main(argv: Sequence[str]) -> None:
    """Execute the notebooks that are named, or all, and write them.

    Raises:
        ValueError: for a name of no notebook.
    """
    for name in argv or NAMES:
        if name not in NAMES:
            raise ValueError(f"there is no notebook {name}: choose any of {', '.join(NAMES)}")
        print(f"executing {name}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            text = nbformat.writes(executed(name, Path(folder)))
        write_bytes(HERE / f"{name}.ipynb", f"{text}\n".encode())


if __name__ == "__main__":
    sys.exit(run(main))
