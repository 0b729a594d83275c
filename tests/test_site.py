"""The documentation: a site without a warning, read in a browser; its code and its commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.browser import SCHEMES, WIDTHS, opened

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.xdist_group("site")


def pages() -> list[Path]:
    """The pages of the site that are files of the repository."""
    text = (ROOT / "mkdocs.yml").read_text()
    return [ROOT / name for name in re.findall(r"^ +- (\S+\.md)$", text, re.MULTILINE)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_page_and_docstring_becomes_a_part_of_the_site(site: Path) -> None:
    for page in pages():
        name = page.relative_to(ROOT).with_suffix(".html").as_posix().replace("README.html", "index.html")
        assert (site / name).stat().st_size > 5_000, name
    assert "FederatedImageDataset" in (site / "reference" / "pfl_ext.data.html").read_text()
    assert "LINK" not in (site / "reference" / "pfl_ext.data.html").read_text()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["index", "docs/which_algorithm", "reference/pfl_ext.algorithms"])
def test_a_page_is_read_without_network_at_any_width(site: Path, name: str, width: int, scheme: str) -> None:
    with opened(site / f"{name}.html", width, scheme) as seen:
        assert [url for url in seen.requests if not url.startswith(("file:", "data:", "blob:"))] == []
        assert len(seen.ask("document.querySelector('article').innerText")) > 3_000
        assert seen.ask("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


def commands(page: Path) -> list[str]:
    """The lines of a page's shell examples, continued lines as one, without comments."""
    text = "".join(body for kind, body in FENCED.findall(page.read_text()) if kind == "sh")
    lines = text.replace("\\\n", " ").splitlines()
    return [line for line in lines if line.startswith(("make ", "python -m ", ".venv/bin/python -m "))]


@pytest.mark.parametrize("page", pages(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_of_a_page_name_targets_and_modules_that_there_are(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for line in commands(page):
        words = shlex.split(line, comments=True)
        if words[0] == "make":
            named = {word for word in words[1:] if re.fullmatch(r"[a-z][a-z0-9-]*", word)}
            assert named, line
            assert named <= targets, line
        elif "." in words[2]:
            assert find_spec(words[2]) is not None, line


def test_code_that_a_page_shows_is_a_file_that_a_test_runs() -> None:
    shown = [
        body
        for kind, body in FENCED.findall((ROOT / "docs" / "extending.md").read_text())
        if kind == "python"
    ]
    files = {path.read_text() for path in (ROOT / "tests" / "dropped").rglob("*.py")}
    assert len(shown) == 4
    assert [body for body in shown if body not in files] == []


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["strict"]
