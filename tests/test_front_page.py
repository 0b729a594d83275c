"""The README, the citation and the licence: what they point at is there, and can be read by machines."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.flair.config import FLAIR
from benchmarks.flair.overview import curve
from benchmarks.flair.overview import main as overview
from benchmarks.reporting.runs import read_run
from dataset.cli import run
from tests.benchmarks.made_runs import make_run

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "benchmarks/flair/README.md", "docs/architecture.md", "docs/own_data.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_local_link_of_a_page_leads_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    local = [link for link in links if not link.startswith("http")]
    missing = [link for link in local if not (path.parent / link).exists()]
    assert local
    assert missing == []


def test_tables_of_the_readme_have_as_many_cells_in_every_row() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    for above, below in itertools.pairwise(lines):
        if above.startswith("|") and below.startswith("|"):
            assert above.count("|") == below.count("|"), below


def check_person(person: dict[str, Any]) -> None:
    entity = set(person) == {"name"}
    assert entity or {"family-names", "given-names"} <= set(person), person
    assert all(isinstance(value, str) for value in person.values())


def test_the_citation_is_valid_cff() -> None:
    """The required keys and the forms of https://citation-file-format.github.io, version 1.2.0."""
    cff = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cff["cff-version"] == "1.2.0"
    assert {"title", "message", "authors"} <= set(cff)
    assert set(cff) <= {
        "cff-version", "title", "message", "type", "version", "authors", "license", "abstract", "keywords",
        "references",
    }  # fmt: skip
    assert f'version = "{cff["version"]}"' in (ROOT / "pyproject.toml").read_text()
    assert cff["type"] == "software"
    assert cff["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text()
    for work in [cff, *cff["references"]]:
        assert isinstance(work["title"], str)
        assert work["authors"]
        for person in work["authors"]:
            check_person(person)
    for work in cff["references"]:
        assert work["type"] in ("article", "conference-paper")
        assert isinstance(work["year"], int)
        assert work["url"].startswith("https://arxiv.org/abs/")
    assert {work["url"].split("/")[-1] for work in cff["references"]} == {"2207.08869", "2404.06430"}


def finished(directory: Path, test: float, seed: int = 0) -> Path:
    make_run(directory, "fl-r-17", "--federated.num_rounds=10", seed=seed)
    lines = [{"round": 0, "val": {"C-AP": 5.0}}, {"round": 1}, {"round": 10, "val": {"C-AP": test}}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory


def test_the_overview_draws_runs_and_refuses_unfinished_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = finished(tmp_path / "a", 30.0), finished(tmp_path / "b", 20.0, seed=1)
    assert curve(read_run(one, FLAIR)) == [(0.0, 5.0), (1.0, 30.0)]
    assert run(overview, [str(tmp_path / "p.png"), f"federated={one},{two}"]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    same = finished(tmp_path / "c", 20.0)
    other = make_run(tmp_path / "d", "c-r-17", seed=1)
    for directory, fault in ((same, "the same seed, 0"), (other, "more than the seed")):
        assert run(overview, [str(tmp_path / "q.png"), f"federated={one},{directory}"]) == 2
        assert fault in capsys.readouterr().err
    (two / "results.json").unlink()
    assert run(overview, [str(tmp_path / "q.png"), f"federated={one},{two}"]) == 2
    assert "is not a complete run" in capsys.readouterr().err
