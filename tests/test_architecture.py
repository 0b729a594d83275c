"""docs/architecture.md and its picture say what the house is today."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
FILE = re.compile(r"`([\w.]+(?:/[\w.]+)+)`|\]\(([^)#:]+)\)")
"""A path from the repository's root in backticks, or a link from the page."""


def files_in(text: str) -> list[Path]:
    return [ROOT / path if path else PAGE.parent / link for path, link in FILE.findall(text)]


def section(title: str) -> str:
    (text,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return str(text)


def test_every_file_that_the_page_names_exists() -> None:
    files = files_in(PAGE.read_text())
    assert len(files) > 30
    assert [str(file) for file in files if not file.exists()] == []
    assert "](docs/architecture.md)" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("walk, most", [("An image", 12), ("A config value", 6), ("A user's update", 12)])
def test_a_walk_passes_few_files(walk: str, most: int) -> None:
    steps = re.findall(r"^\d+\. .*", section(walk), re.MULTILINE)
    files = {file for file in files_in("\n".join(steps)) if file.suffix == ".py"}
    assert len(steps) >= 4
    assert 4 <= len(files) <= most


def test_the_table_of_extending_counts_what_the_files_have() -> None:
    rows = re.findall(
        r"^\|.*\[[^]]+\]\(\.\./(tests/[^)]+)\) \| (\d+) \| 0 \|", section("Extending"), re.MULTILINE
    )
    assert len(rows) >= 5
    counted = {path: len((ROOT / path).read_text().splitlines()) for path, _ in rows}
    assert {path: int(lines) for path, lines in rows} == counted


def boxes_in(picture: Path) -> str:
    with Image.open(picture) as image:
        assert min(image.size) > 400
        return str(image.info["Description"])


def test_the_picture_shows_todays_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = str(ROOT / "docs" / "draw_house.py")
    monkeypatch.setattr("sys.argv", [program, str(tmp_path / "house.png")])
    runpy.run_path(program, run_name="__main__")
    today = boxes_in(tmp_path / "house.png")
    assert {"pfl_ext.engine", "dataset.files", "benchmarks.core"} <= set(today.split())
    assert boxes_in(ROOT / "docs" / "house.png") == today, "draw it again: python docs/draw_house.py"
