"""The documentation: a site without a warning, read in a browser; its code exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import griffe
import pytest
import yaml

from tests.browser import opened
from tests.shown import FENCED, ROOT

pytestmark = [
    pytest.mark.xdist_group("site"),
    pytest.mark.skipif(
        sys.version_info < (3, 11), reason="the newest mkdocstrings for Python 3.10 does not build the site"
    ),
]


def pages() -> list[Path]:
    """The pages of the site that are files of the repository."""
    text = (ROOT / "mkdocs.yml").read_text()
    named = (ROOT / name for name in re.findall(r"^ +- (\S+\.md)$", text, re.MULTILINE))
    return [path for path in named if "notebooks" not in path.parts]


REFERENCE = "pfl_ext.data"
"""The page of the reference that is built here; all are made alike, and `make docs` makes all."""
BUILD = f"""
import sys
from mkdocs.commands.build import build
from mkdocs.config import load_config
config = load_config("mkdocs.yml", site_dir=sys.argv[1])
hook = config.hooks["docs/site.py"]
print(*(module for modules in hook.packages().values() for module in modules))
one = {{{REFERENCE!r}: hook.packages()[{REFERENCE!r}]}}
hook.packages = lambda: one
config.plugins.on_startup(command="build", dirty=False)
build(config)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The site without most of its reference, and the modules that the reference has."""
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.split()


@pytest.fixture(scope="module")
def site(built: tuple[Path, list[str]]) -> Path:
    return built[0]


def test_every_page_becomes_a_part_of_the_site(site: Path) -> None:
    for page in pages():
        name = page.relative_to(ROOT).with_suffix(".html").as_posix().replace("README.html", "index.html")
        assert (site / name).stat().st_size > 5_000, name
    assert "FederatedImageDataset" in (site / "reference" / f"{REFERENCE}.html").read_text()
    assert "LINK" not in (site / "reference" / f"{REFERENCE}.html").read_text()


def test_every_docstring_is_read_without_a_warning(
    built: tuple[Path, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """By the reader of the reference. No docstring has a link, which the site would have to follow."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], docstring_parser="google")
    roots = [loader.load(root) for root in ("benchmarks", "dataset", "pfl_ext")]
    objects: list[Any] = list(roots)
    for each in objects:
        if not each.is_alias:
            objects += (m for m in each.members.values() if not m.name.startswith("_"))
            if each.docstring is not None:
                assert each.docstring.parsed
                assert not re.search(r"\]\(\w|\[\w+\]\[\w", each.docstring.value), each.path
    assert caplog.messages == []
    found = {each.path for each in objects if not each.is_alias and each.is_module}
    assert found >= set(built[1])
    assert len(built[1]) > 300


def test_pages_are_read_without_network_at_any_width(site: Path) -> None:
    names = ("index", "docs/which_algorithm", "docs/notebooks/train", f"reference/{REFERENCE}")
    with opened(*(site / f"{name}.html" for name in names)) as windows:
        for seen in windows:
            assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []
            assert len(seen.ask("document.querySelector('article').innerText")) > 3_000
            assert seen.ask("document.documentElement.scrollWidth") <= seen.width


def test_notebooks_are_pages_with_what_their_cells_printed_and_drew(site: Path) -> None:
    text = (site / "docs" / "notebooks" / "train.html").read_text()
    assert "run directory: runs/notebook-users" in text
    assert 'src="train-1.png"' in text
    assert (site / "docs" / "notebooks" / "train-1.png").read_bytes().startswith(b"\x89PNG")
    assert 'href="private.html"' in text
    assert 'href="docs/notebooks/train.html"' in (site / "index.html").read_text()


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def test_code_that_a_page_shows_is_a_file_that_a_test_runs() -> None:
    shown = [
        body
        for kind, body in FENCED.findall((ROOT / "docs" / "extending.md").read_text())
        if kind == "python"
    ]
    files = {path.read_text() for path in (ROOT / "tests" / "dropped").rglob("*.py")}
    assert len(shown) == 7
    assert [body for body in shown if body not in files] == []


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["strict"]
