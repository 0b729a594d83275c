"""A page of ``# %%`` cells as an executed Jupyter notebook, with no Jupyter: for people and for the tests.

python -m benchmarks.flair.notebook        benchmarks/flair/tutorial.py -> tutorial.ipynb beside it
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.cli import run as run_command
from dataset.files import write_bytes

PAGE = Path(__file__).parent / "tutorial.py"
MARKDOWN = "# %% [markdown]"


@dataclass(frozen=True)
class Cell:
    """Text or code of one cell."""

    kind: str
    source: str


def cells(page: str) -> list[Cell]:
    """The cells of a page; in markdown cells every line is a comment.

    Raises:
        ValueError: for text before the first cell, or a line of code in a markdown cell.
    """
    out: list[Cell] = []
    block: list[str] = []
    kind = ""
    for line in [*page.splitlines(), "# %%"]:
        if not line.startswith("# %%"):
            block.append(line)
            continue
        text = "\n".join(block).strip("\n")
        if kind == "" and text:
            raise ValueError("the page must begin with # %%")
        if kind == "markdown":
            stray = [part for part in text.splitlines() if not part.startswith("#")]
            if stray:
                raise ValueError(f"in a markdown cell every line begins with #: {stray[0]!r}")
            text = "\n".join(part[1:].removeprefix(" ") for part in text.splitlines())
        if text:
            out.append(Cell(kind, text))
        kind, block = ("markdown" if line == MARKDOWN else "code"), []
    return out


def _figures() -> list[dict[str, Any]]:
    """The open pyplot figures as outputs; they are closed."""
    from matplotlib import pyplot

    out = []
    for number in pyplot.get_fignums():
        buffer = io.BytesIO()
        pyplot.figure(number).savefig(buffer, format="png", dpi=80)
        png = base64.b64encode(buffer.getvalue()).decode()
        data = {"image/png": png, "text/plain": ["<Figure>"]}
        out.append({"output_type": "display_data", "data": data, "metadata": {}})
    pyplot.close("all")
    return out


def execute(page: Sequence[Cell], name: str) -> dict[str, Any]:
    """Run the code cells in order in one namespace; the notebook with what they printed and drew.

    An exception of a cell is not caught: a page that fails makes no notebook.
    """
    import matplotlib

    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    entries, count = [], 0
    for number, cell in enumerate(page):
        source = cell.source.splitlines(keepends=True)
        identity = hashlib.sha256(f"{number} {cell.source}".encode()).hexdigest()[:8]
        entry: dict[str, Any] = {"cell_type": cell.kind, "id": identity, "metadata": {}, "source": source}
        if cell.kind == "code":
            count += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(cell.source, f"{name}, cell {number}", "exec"), namespace)
            stream = {"output_type": "stream", "name": "stdout"}
            text = printed.getvalue().splitlines(keepends=True)
            entry["outputs"] = ([{**stream, "text": text}] if text else []) + _figures()
            entry["execution_count"] = count
        entries.append(entry)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": entries, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main(argv: Sequence[str]) -> None:
    """Execute the tutorial and write its notebook."""
    if {"--help", "-h"} & set(argv):
        print(__doc__)
        return
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        raise ValueError("write: python -m benchmarks.flair.notebook [PAGE.py]")
    page = Path(argv[0]) if argv else PAGE
    notebook = execute(cells(page.read_text()), page.name)
    path = page.resolve().with_suffix(".ipynb")
    write_bytes(path, (json.dumps(notebook, indent=1) + "\n").encode())
    print(f"{path}: {len(notebook['cells'])} cells")


if __name__ == "__main__":
    sys.exit(run_command(main))
