"""Which version of this code runs, for results that others are to repeat."""

from __future__ import annotations

import json
import subprocess
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

PACKAGE = "flair-on-pfl"

PROJECT = {"benchmarks", "dataset", "pfl_ext", "tests"}
"""The packages whose version `commit` says."""


def commit() -> str | None:
    """The commit of this checkout, with ``+`` where files differ from it or its code has others besides.

    If the package is installed, it is the commit that pip installed it from, else its version. None where
    nothing is known. A repository in which the package merely lies, in a virtual environment, is not meant.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", Path(__file__).name)
        others = git("ls-files", "--others", "--exclude-standard", "--full-name", ":/*.py")
        return git("rev-parse", "HEAD") + ("+" if others or git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return _installed()


def _installed() -> str | None:
    try:
        package = distribution(PACKAGE)
    except PackageNotFoundError:
        return None
    origin = json.loads(package.read_text("direct_url.json") or "{}")
    return origin.get("vcs_info", {}).get("commit_id") or f"{PACKAGE} {package.version}"


def short_commit(commit: str | None) -> str:
    """A `commit` as tables show it: the first digits of a commit, else what there is."""
    if commit is None:
        return "unknown"
    return commit[:8] + commit[40:] if len(commit.rstrip("+")) == 40 else commit
