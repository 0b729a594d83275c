"""The tutorial: its notebook is what its page says, and every cell runs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flair.notebook import PAGE, Cell, cells, execute

NOTEBOOK: dict[str, Any] = json.loads(PAGE.with_suffix(".ipynb").read_text())


def test_the_notebook_is_the_page() -> None:
    """After a change of the page: python -m benchmarks.flair.notebook."""
    there = [Cell(cell["cell_type"], "".join(cell["source"])) for cell in NOTEBOOK["cells"]]
    assert there == cells(PAGE.read_text())


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
    monkeypatch.chdir(PAGE.parent)  # as Jupyter would
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("TUTORIAL_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("TUTORIAL_ROUNDS", "2")
    made = execute(cells(PAGE.read_text()), PAGE.name)
    kinds = [out["output_type"] for cell in made["cells"] for out in cell.get("outputs", [])]
    assert kinds.count("display_data") == 4
    assert (tmp_path / "run" / "results.json").exists()
    assert Path.cwd() == PAGE.parent.parent.parent
    os.chdir(tmp_path)


def test_a_page_is_split_into_its_cells() -> None:
    page = "# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\nprint(x)\n# %%\n"
    assert cells(page) == [Cell("markdown", "# Title\n\ntext"), Cell("code", "x = 1\n\nprint(x)")]
    (_, code) = execute(cells(page), "page")["cells"]
    assert code["outputs"] == [{"output_type": "stream", "name": "stdout", "text": ["1\n"]}]
    with pytest.raises(ValueError, match="every line begins with #"):
        cells("# %% [markdown]\nx = 1\n")
    with pytest.raises(ValueError, match="must begin with"):
        cells("x = 1\n# %%\n")


def test_a_cell_that_fails_makes_no_notebook() -> None:
    with pytest.raises(ZeroDivisionError):
        execute([Cell("code", "1 / 0")], "page")
