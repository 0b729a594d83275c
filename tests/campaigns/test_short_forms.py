"""Each campaign in a short form; the long ones and their figures stand in README.md."""

from __future__ import annotations

import subprocess
import sys


def campaign(name: str, *argv: str) -> str:
    """What a campaign says; it must end well."""
    command = [sys.executable, "-m", f"tests.campaigns.{name}", *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_killed_runs_equal_the_run_never_killed() -> None:
    said = campaign("kill_training", "--kills=5", "--rounds=6", "--kind=pfl")
    assert said.startswith("pfl: 5 kills over ")
    assert "each equal to the run never killed" in said


def test_killed_preprocessing_makes_the_same_file() -> None:
    said = campaign("kill_preprocessing", "--kills=6", "--images=150", "--kind=archives")
    assert said.startswith("archives: 6 kills over ")
    assert "each with the content of the file made in one go" in said
