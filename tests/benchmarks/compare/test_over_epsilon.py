"""Scores over the epsilon that models have spent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.compare import charts
from benchmarks.compare.reading import compare
from benchmarks.compare.series import line_of
from tests.benchmarks.made_runs import make_run


def test_curves_over_epsilon_have_the_last_model_of_each(tmp_path: Path) -> None:
    """It is the largest of the seeds; that of a simulated system stands apart; other runs have none."""
    for seed, most in ((0, 3.0), (1, 4.0)):
        path = make_run(tmp_path / str(seed), "pfl-r-17", seed=seed) / "metrics.jsonl"
        metrics = [json.loads(line) for line in path.read_text().splitlines()]
        spent = ([0.0, 0.0], [1.0, 1.5], [2.0, most], [2.0, most])
        for number, (line, (simulated, own)) in enumerate(zip(metrics, spent, strict=True)):
            line |= {"val": {"C-AP": 10.0 * number}, "simulated_epsilon": simulated, "epsilon": own}
        path.write_text("".join(json.dumps(line) + "\n" for line in metrics))
    make_run(tmp_path / "other")
    groups = compare([tmp_path]).groups
    line = line_of(0, groups[0], ("val", "C-AP"), "epsilon")
    assert line is not None
    assert line.x.tolist() == [0, 1.5, 4, 4]
    assert line_of(1, groups[1], ("val", "C-AP"), "simulated epsilon") is None
    privacy = tmp_path / "1" / "privacy.json"
    privacy.write_text(json.dumps({**json.loads(privacy.read_text()), "seeded_for_research_only": True}))
    found = {chart.title: chart for chart in charts.charts(compare([tmp_path]))}
    for name, ends in (("epsilon", [0, 1.5, 4]), ("simulated epsilon", [0, 1, 2])):
        chart = found[f"C-AP exact on val over {name}"]
        assert chart.x_label.endswith("; NO PROTECTION in 1 of 2 runs, noise from the seed")
        (drawn,) = chart.lines
        assert (drawn.x.tolist(), drawn.mean.tolist()) == (ends, [0, 10, 30])


@pytest.mark.parametrize("spent", ["null", '"much"'])
def test_a_damaged_epsilon_is_one_line(spent: str, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", "pfl-r-17") / "metrics.jsonl"
    path.write_text(path.read_text().replace('"val"', f'"epsilon": {spent}, "val"', 1))
    with pytest.raises(ValueError, match="is not a complete run"):
        charts.charts(compare([tmp_path]))
