"""Executes a Jupyter notebook with no Jupyter: its code cells run, and their outputs are written into it.

python -m benchmarks.flair.notebook [PAGE.ipynb]        by default benchmarks/flair/tutorial.ipynb
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.core.commands import command_parser
from benchmarks.core.config.trees import Tree
from dataset.cli import run as run_command
from dataset.files import write_bytes

TUTORIAL = Path(__file__).parent / "tutorial.ipynb"


def _figures() -> list[Tree]:
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


def execute(notebook: Tree, name: str) -> Tree:
    """Run the code cells in order in one namespace; the notebook with what they printed and drew.

    An exception of a cell is not caught: a page that fails makes no notebook.
    """
    import matplotlib

    matplotlib.use("Agg")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            count += 1
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("".join(cell["source"]), f"{name}, cell {number}", "exec"), namespace)
            stream = {"output_type": "stream", "name": "stdout"}
            text = printed.getvalue().splitlines(keepends=True)
            outputs = ([{**stream, "text": text}] if text else []) + _figures()
            cell = {**cell, "execution_count": count, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def main(argv: Sequence[str]) -> None:
    """Execute a notebook and write its outputs into it."""
    parser = command_parser("flair.notebook", __doc__)
    parser.add_argument("page", type=Path, nargs="?", default=TUTORIAL, metavar="PAGE.ipynb")
    path: Path = parser.parse_args(argv).page.resolve()
    try:
        notebook = json.loads(path.read_text())
        count = len([(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]])
    except (ValueError, LookupError, TypeError) as fault:
        raise ValueError(f"{path} is no Jupyter notebook ({fault!r}): give a file.ipynb") from fault
    text = json.dumps(execute(notebook, path.name), indent=1) + "\n"
    write_bytes(path, text.encode())
    print(f"{path}: {count} cells")


if __name__ == "__main__":
    sys.exit(run_command(main))
