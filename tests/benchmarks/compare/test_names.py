"""Names of charts' files and of LaTeX's labels."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.compare import charts, latex
from benchmarks.compare.__main__ import main
from benchmarks.compare.groups import Comparison
from benchmarks.reporting.tables import plain_names
from dataset.cli import run
from tests.benchmarks.made_runs import make_run


def test_no_two_titles_have_one_name() -> None:
    titles = ["F1 + on val", "F1 - on val", "F1 on val 2", "f1 on VAL", "准确率"]
    assert plain_names(titles) == ["f1-on-val", "f1-on-val-2", "f1-on-val-2-2", "f1-on-val-3", "unnamed"]


def test_charts_and_tables_that_differ_by_a_sign_do_not_replace_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second chart was written over the first, and LaTeX had one label twice."""
    real, stems = charts.charts, list[Path]()

    def twice(comparison: Comparison) -> list[charts.Chart]:
        first = real(comparison)[0]
        return [dataclasses.replace(first, title=f"F1 {sign} on val") for sign in "+-"]

    def single(chart: charts.Chart, labels: Sequence[str], stem: Path) -> list[Path]:
        stems.append(stem)
        return []

    monkeypatch.setattr(charts, "charts", twice)
    monkeypatch.setattr(charts, "single", single)
    monkeypatch.setattr(charts, "png", lambda *_: None)
    monkeypatch.setattr(latex, "shown", {"C-AP": "F1 +", "O-AP": "F1 -"}.__getitem__)
    for rate in (0.1, 0.3):
        make_run(tmp_path / f"{rate}", "fl-r-17", f"--local.learning_rate={rate}")
    columns = "--columns=local.learning_rate"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "compare.png").touch()
    assert run(main, [str(tmp_path), columns, f"--output_dir={tmp_path / 'out'}"]) == 0
    assert [stem.name for stem in stems] == ["f1-on-val", "f1-on-val-2"]
    text = (tmp_path / "out" / "crossed.tex").read_text()
    assert re.findall(r"label\{(.*?)\}", text) == ["tab:f1", "tab:f1-2"]
