"""What results say of the code: of this checkout, and of an installed package wherever it lies."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.core import code_version
from benchmarks.core.code_version import commit, short_commit


def ran(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run([str(w) for w in words], cwd=cwd, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A site-packages with this package, inside the repository of somebody else's project."""
    ran("git", "init", "-q", cwd=tmp_path)
    (tmp_path / "paper.tex").write_text("x")
    ran("git", "add", "paper.tex", cwd=tmp_path)
    author = "-c", "user.name=A", "-c", "user.email=a@b.c"
    ran("git", *author, "commit", "-q", "-m", "first", cwd=tmp_path)
    site = tmp_path / "site"
    (site / "code_").mkdir(parents=True)
    shutil.copy(code_version.__file__, site / "code_/version.py")
    facts = site / "flair_on_pfl-1.2.3.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: flair-on-pfl\nVersion: 1.2.3\n")
    return site


def seen_in(site: Path) -> str:
    program = (
        f"import sys; sys.path.insert(0, {str(site)!r}); from code_.version import commit; print(commit())"
    )
    return ran(sys.executable, "-I", "-c", program, cwd=site)


def test_an_installed_package_is_not_the_project_that_it_lies_in(installed: Path) -> None:
    assert seen_in(installed) == "flair-on-pfl 1.2.3"


def test_what_pip_installed_from_git_has_its_commit(installed: Path) -> None:
    origin = '{"url": "https://x", "vcs_info": {"vcs": "git", "commit_id": "%s"}}' % ("ab" * 20)
    (installed / "flair_on_pfl-1.2.3.dist-info/direct_url.json").write_text(origin)
    assert seen_in(installed) == "ab" * 20


def test_a_checkout_has_its_commit() -> None:
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        pytest.skip("no checkout")
    found = commit()
    assert found is not None
    assert found.rstrip("+") == ran("git", "rev-parse", "HEAD", cwd=root)


def test_a_commit_that_is_not_all_of_the_code_ends_in_a_plus(installed: Path) -> None:
    """New files of code count, which an algorithm of one's own is; data and results that lie about do not."""
    author = "-c", "user.name=A", "-c", "user.email=a@b.c"
    ran("git", "add", ".", cwd=installed)
    ran("git", *author, "commit", "-q", "-m", "second", cwd=installed)
    whole = ran("git", "rev-parse", "HEAD", cwd=installed)
    (installed / "results.json").write_text("{}")
    assert seen_in(installed) == whole
    (installed.parent / "slowmo.py").write_text("beta = 0.5")
    assert seen_in(installed) == f"{whole}+"
    (installed.parent / "slowmo.py").unlink()
    (installed.parent / "paper.tex").write_text("y")
    assert seen_in(installed) == f"{whole}+"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("ab" * 20, "abababab"),
        ("ab" * 20 + "+", "abababab+"),
        ("flair-on-pfl 1.2.3", "flair-on-pfl 1.2.3"),
        (None, "unknown"),
    ],
)
def test_a_commit_in_a_table_is_short(value: str | None, shown: str) -> None:
    assert short_commit(value) == shown
