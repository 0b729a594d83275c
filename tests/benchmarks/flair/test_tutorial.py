"""The tutorial: every cell of its notebook runs, with no Jupyter."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.core.config.trees import Tree
from benchmarks.flair.notebook import TUTORIAL, execute, main
from dataset.cli import run

NOTEBOOK: dict[str, Any] = json.loads(TUTORIAL.read_text())


def test_the_notebook_is_in_jupyters_format_with_its_pictures() -> None:
    """nbformat 4.5: what its schema requires of the cells that occur here."""
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    for cell in NOTEBOOK["cells"]:
        code = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source"} | code
    ids = [cell["id"] for cell in NOTEBOOK["cells"]]
    assert len(set(ids)) == len(ids)
    outputs = [out for cell in NOTEBOOK["cells"] for out in cell.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in outputs) == 4
    assert any("test C-AP" in "".join(out.get("text", [])) for out in outputs)


def test_every_cell_of_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TUTORIAL.parent)  # as Jupyter would
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TUTORIAL_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("TUTORIAL_ROUNDS", "2")
    executed = execute(NOTEBOOK, TUTORIAL.name)
    kinds = [out["output_type"] for cell in executed["cells"] for out in cell.get("outputs", [])]
    assert kinds.count("display_data") == 4
    assert (tmp_path / "run" / "results.json").exists()
    assert Path.cwd() == TUTORIAL.parent.parent.parent
    os.chdir(tmp_path)
    for before, after in zip(NOTEBOOK["cells"], executed["cells"], strict=True):
        assert (before["id"], before["source"]) == (after["id"], after["source"])


def page(*cells: tuple[str, str]) -> Tree:
    """A notebook of cells that have not been executed."""
    return {"cells": [{"cell_type": kind, "source": text.splitlines(keepends=True)} for kind, text in cells]}


def test_a_notebook_gets_what_its_cells_print_and_keeps_its_text(tmp_path: Path) -> None:
    path = tmp_path / "page.ipynb"
    path.write_text(json.dumps(page(("markdown", "# Title\n\ntext"), ("code", "x = 1\n\nprint(x)"))))
    assert run(main, [str(path)]) == 0
    title, code = json.loads(path.read_text())["cells"]
    assert title == {"cell_type": "markdown", "source": ["# Title\n", "\n", "text"]}
    assert code["source"] == ["x = 1\n", "\n", "print(x)"]
    assert code["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    assert code["execution_count"] == 1


@pytest.mark.parametrize("text", ["x = 1", "[]", '{"cells": 3}', '{"cells": [{}]}'])
def test_a_file_that_is_no_notebook_is_left_as_it_is(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.ipynb"
    path.write_text(text)
    assert run(main, [str(path)]) == 2
    assert f"error: {path} is no Jupyter notebook" in capsys.readouterr().err
    assert path.read_text() == text


def test_a_cell_that_fails_makes_no_notebook() -> None:
    with pytest.raises(ZeroDivisionError):
        execute(page(("code", "1 / 0")), "page")
