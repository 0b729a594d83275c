"""The report of runs that are not whole, or whose files are hostile."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.compare.__main__ import main as compare
from benchmarks.flair.config import FLAIR as BENCHMARK
from benchmarks.flair.report import collect, main, markdown
from benchmarks.reporting.folders import find_runs
from benchmarks.reporting.runs import read_run
from dataset.cli import run
from tests.benchmarks.made_runs import make_run


def test_unfinished_broken_and_duplicate_runs_are_named_and_the_rest_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "whole")
    make_run(tmp_path / "again")
    other = make_run(tmp_path / "more" / "other", shift=0.3)
    half = make_run(tmp_path / "half", seed=1, finished=False)
    broken = {name: make_run(tmp_path / name, seed=2) for name in (
        "cut", "nan", "swapped", "model", "yaml", "newer", "no-config", "list", "lines")}  # fmt: skip
    (broken["cut"] / "results.json").write_text((broken["cut"] / "results.json").read_text()[:100])
    for name, key, value in (("nan", "C-P", float("nan")), ("swapped", "", 0)):
        results = json.loads((broken[name] / "results.json").read_text())
        if key:
            results["test"][key] = value
        else:
            results["config_sha256"] = "0" * 64
        (broken[name] / "results.json").write_text(json.dumps(results))
    (broken["model"] / "model.safetensors").write_bytes(b"another")
    (broken["yaml"] / "config.yaml").write_text("seed: [1")
    (broken["newer"] / "config.yaml").write_text("seed: 1\nbogus: 2\n")
    (broken["no-config"] / "config.yaml").unlink()
    (broken["list"] / "results.json").write_text("[1, 2]")
    (broken["lines"] / "results.json").unlink()
    (broken["lines"] / "metrics.jsonl").write_text("{\n")
    assert run(main, [str(tmp_path)]) == 0
    text = capsys.readouterr().out
    sections = dict(re.findall(r"## ([A-Z][a-z]+)[^\n]*\n\n(.*?)(?=\n## |\Z)", text, re.DOTALL))
    assert f"{half}: FL-R-17, at round 3 of 5000" in sections["Half"]
    assert f"{broken['lines']}: FL-R-17, no round is on record" in sections["Half"]
    reasons = {
        "cut": "damaged", "nan": "C-P = nan", "swapped": "config_sha256 differs",
        "model": "model_sha256 differs",
        "yaml": "config.yaml is missing or not readable", "newer": "another version of the code",
        "no-config": "config.yaml is missing", "list": "damaged",
    }  # fmt: skip
    for name, reason in reasons.items():
        assert re.search(f"{re.escape(str(broken[name]))}: .*{reason}", sections["Broken"]), name
    assert len(sections["Broken"].strip().splitlines()) == len(reasons)
    assert f"{tmp_path / 'whole'} repeats {tmp_path / 'again'}" in sections["Duplicates"]
    assert f"{other} repeats {tmp_path / 'again'}" in sections["Duplicates"]
    assert "ANOTHER model" in sections["Duplicates"]
    (row,) = collect([tmp_path]).rows
    assert row.seeds == (0,)


def test_a_directory_given_twice_counts_once_and_a_trackers_files_are_no_runs(tmp_path: Path) -> None:
    whole = make_run(tmp_path / "whole")
    (whole / "wandb" / "offline" / "files").mkdir(parents=True)
    (whole / "wandb" / "offline" / "files" / "config.yaml").write_text("a: 1")
    assert find_runs([tmp_path, whole]) == [whole]


@pytest.mark.parametrize("name, message", [("nowhere", "is not a folder"), ("empty", "has no run")])
def test_a_path_without_runs_is_a_mistake(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert run(main, [str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_equal_seeds_with_different_results_are_named_and_never_averaged(tmp_path: Path) -> None:
    """Issue 17.37: of runs with one seed, only the first counts, whatever else they compute."""
    make_run(tmp_path / "a", shift=0.0)
    make_run(tmp_path / "b", "fl-r-17", "--evaluation.per_user=true", shift=4.0)
    make_run(tmp_path / "c", seed=1, shift=1.0)
    found = collect([tmp_path])
    (row,) = found.rows
    assert row.seeds == (0, 1)
    assert row.cell("C-AP").mean == pytest.approx(50.1 + 0.5)
    note = f"**{tmp_path / 'b'} repeats {tmp_path / 'a'}: the same config, seed and data, but ANOTHER model**"
    assert f"{note} (C-AP 54.10; 50.10 is counted)" in markdown(found)


DEEP = "[" * 5_000


BOMB = "a: &a [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1 or ''}, *a{i - 1 or ''}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    "name, content, fault",
    [
        ("config.yaml", DEEP[:500], "config.yaml is missing or not readable"),
        ("config.yaml", BOMB, "config.yaml is missing or not readable"),
        ("config.yaml", "", "config.yaml is missing or not readable"),
        ("results.json", DEEP, "its files are damaged"),
        ("privacy.json", DEEP, "its files are damaged"),
        ("privacy.json", "[]", "its files are damaged"),
    ],
)
def test_hostile_files_of_a_run_are_what_its_record_says(
    name: str, content: str, fault: str, tmp_path: Path
) -> None:
    """Nesting without end ended in a traceback: found by tests.campaigns.fuzz."""
    directory = make_run(tmp_path / "run", "pfl-r-17")
    (directory / name).write_text(content)
    found = read_run(directory, BENCHMARK).fault
    assert found is not None
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "key, value, named",
    [
        ("data", 5, "data = 5"),
        ("data", {"users": {"test": "x"}}, "data users test = 'x'"),
        ("weights", 5, "weights = 5"),
        ("per_user", "x", "per_user = 'x'"),
        ("per_user", {"quantiles": {"C-AP": 5}}, "per_user quantiles C-AP = 5"),
        ("traffic", "x", "traffic = 'x'"),
        ("traffic", {"down": 1}, "traffic up = {'down': 1}"),
        ("wall_clock_s", "1", "wall_clock_s = '1'"),
        ("last", {"test": 5}, "last test = 5"),
        ("parameters", "many", "parameters = 'many'"),
    ],
)
def test_a_part_of_another_type_is_what_the_record_says(
    key: str, value: Any, named: str, tmp_path: Path
) -> None:
    """Each ended a report or a comparison in a traceback."""
    directory = make_run(tmp_path / "run")
    results = json.loads((directory / "results.json").read_text())
    (directory / "results.json").write_text(json.dumps({**results, key: value}))
    record = read_run(directory, BENCHMARK)
    assert record.fault is not None
    assert record.fault.startswith(f"its files are damaged (ValueError: results.json has {named}: ")
    assert record.experiment
    assert run(compare, [str(directory), f"--output_dir={tmp_path / 'compared'}"]) == 2


@pytest.mark.parametrize("line", [DEEP, "[]", "3", '{"round": []}', '{"round": 1e999}', "{}"])
def test_a_hostile_line_of_metrics_is_no_progress(line: str, tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", finished=False)
    (directory / "metrics.jsonl").write_text(line + "\n")
    assert read_run(directory, BENCHMARK).progress == "no round is on record"
