"""When a score was reached, where seconds are known of only some seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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


@pytest.mark.usefixtures("no_pictures")
def test_scores_after_the_same_traffic(tmp_path: Path) -> None:
    """Rounds 0 and 2 are scored; two users a round move 0.5 MB each, or 2 MB each. A run without traffic has
    no row."""
    for name, megabytes, rate in (("small", 0.5, "0.1"), ("large", 2.0, "0.3"), ("unknown", None, "0.5")):
        for seed in (0, 1):
            more: dict[str, Any] = (
                {} if megabytes is None else {"traffic": {"down": megabytes * 4e5, "up": megabytes * 6e5}}
            )
            words = ("fl-r-17", f"--local.learning_rate={rate}")
            path = make_run(tmp_path / f"{name}{seed}", *words, shift=2.0 * seed, seed=seed, **more)
            lines = [
                json.loads(line) | {"users": 2} for line in (path / "metrics.jsonl").read_text().splitlines()
            ]
            (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))

    def rows(*words: str, megabytes: str) -> list[list[str]]:
        assert run(main, [str(tmp_path), f"--output_dir={tmp_path / 'out'}", *words]) == 0
        page = check((tmp_path / "out" / "compare.html").read_text())
        return [row[1:] for row in page.rows(f"C-AP exact on val (%) after {megabytes}")]

    first, second = (["2", "10.00", "10.00 to 10.00", "0", "0"], ["2", "21.00", "20.00 to 22.00"])
    assert rows(megabytes="2 MB, which all groups used") == [first, [*second, "2", "2"]]
    wanted = "--at_megabytes=1.9"
    assert rows(wanted, megabytes="1.9 MB, as asked for") == [first, first]
    wanted = "--at_megabytes=8"
    assert rows(wanted, megabytes="8 MB, as asked for") == [[*second, "8", "2"], [*second, "2", "2"]]
