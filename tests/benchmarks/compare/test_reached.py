"""When a score was reached, where seconds are known of only some seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare.__main__ import main
from dataset.cli import run
from tests.benchmarks.made_runs import make_run
from tests.page_checks import check


@pytest.mark.usefixtures("no_pictures")
def test_seconds_of_some_seeds_are_not_those_of_the_mean(tmp_path: Path) -> None:
    """The cell had the seconds of another round, or the command ended in a traceback."""
    for seed in (0, 1):
        path = make_run(tmp_path / f"run{seed}", shift=10.0, seed=seed) / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        if seed == 0:
            lines[1]["val"] = {"loss": 0.5, "C-AP": 12.0, "O-AP": 24.0}
        else:
            lines = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    make_run(tmp_path / "other", "fl-r-17", "--local.learning_rate=0.3", shift=10.0)
    words = [str(tmp_path), f"--output_dir={tmp_path / 'out'}", "--target=25"]
    assert run(main, words) == 0
    page = check((tmp_path / "out" / "compare.html").read_text())
    rows = page.rows("25.00 % C-AP exact on val, as asked for")
    assert [row[1:4] for row in rows] == [["1", "2", "0.0333"], ["2", "2", "–"]]
