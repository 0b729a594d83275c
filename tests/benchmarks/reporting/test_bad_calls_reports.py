"""Bad calls of reports, figures, sweeps and table1: exit code 2, one line, and nothing is written."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from benchmarks.compare.__main__ import main as compare
from benchmarks.core.config.sections import config_modules
from benchmarks.flair import figures, overview, per_user, private_figure, report, standin, table1
from benchmarks.sweep import command as sweep
from benchmarks.visual_classification import report as vision_report
from tests.bad_calls import check_refused
from tests.benchmarks.made_runs import make_run
from tests.benchmarks.sweep.test_space import written
from tests.benchmarks.visual_classification.test_visual_classification import made_run

COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "report": report.main,
    "figures": figures.main,
    "private_figure": private_figure.main,
    "overview": overview.main,
    "per_user": per_user.main,
    "standin": standin.main,
    "table1": table1.main,
    "sweep": sweep.main,
    "vision": vision_report.main,
    "compare": compare,
}
RATES = {"local.learning_rate": {"values": [0.01, 0.3]}}
LOCAL = "--local=true --data_path=mini"
FIXED = f"{LOCAL} --sweep_dir=old"

CALLS = [
    # What is said of a run directory holds for every command that reads runs.
    ("report", "nowhere", "nowhere is not a folder"),
    ("report", "file", "file is not a folder"),
    ("report", "empty", "empty has no run"),
    ("report", "half", "no finished run in half (1 half finished, 0 broken)"),
    ("report", "cut", "no finished run in cut (0 half finished, 1 broken)"),
    ("report", "list half", "no finished run in list, half (1 half finished, 1 broken)"),
    ("report", "", "the following arguments are required: RUN_DIR"),
    ("report", "whole --format=pdf", "--format: invalid choice: 'pdf'"),
    ("report", "whole --verfiy", "unrecognized arguments: --verfiy"),
    ("report", "whole --output_dir=file/x", "file"),
    ("figures", "whole", "the following arguments are required: --output_dir"),
    ("figures", "--output_dir=out", "nothing to draw: give run directories"),
    ("figures", "nowhere --output_dir=out", "nowhere is not a folder"),
    ("figures", "empty --output_dir=out", "empty has no run"),
    ("figures", "half --output_dir=out", "no finished run in half"),
    ("figures", "cut --output_dir=out", "no finished run in cut"),
    ("figures", "torn --output_dir=out", "torn is not a complete run (JSONDecodeError"),
    ("figures", "unscored --output_dir=out", "unscored is not a complete run (no line"),
    ("figures", "users --output_dir=out", "per_user.json is damaged"),
    ("figures", "strangers --output_dir=out", "has scores of the users of other data than the run's"),
    ("figures", "--data_path=nowhere.hdf5 --output_dir=out", "nowhere.hdf5: no such file"),
    ("figures", "--data_path=file --output_dir=out", "file"),
    ("figures", "--data_path=mini --threads=0 --output_dir=out", "--threads is 0"),
    ("figures", "--data_path=mini --image_size=-1 --output_dir=out", "--image_size is -1"),
    ("figures", "--data_path=mini --image_size=x --output_dir=out", "invalid int value: 'x'"),
    ("private_figure", "", "the following arguments are required: OUT.png, RUN_DIR"),
    ("private_figure", "out.png", "the following arguments are required: RUN_DIR"),
    ("private_figure", "out.png nowhere", "nowhere is not a complete run"),
    ("private_figure", "out.png empty", "empty is not a complete run"),
    ("private_figure", "out.png torn", "torn is not a complete run"),
    ("private_figure", "out.png cut", "cut is not a complete run"),
    ("private_figure", "out.png list", "list is not a complete run"),
    ("private_figure", "out.png whole other", "have the same config and the same seed, 0"),
    ("private_figure", "out.xyz whole", "xyz"),
    ("overview", "", "the following arguments are required: OUT.png, NAME=RUN_DIR,RUN_DIR"),
    ("overview", "out.png whole", "write a group of runs as NAME=RUN_DIR,RUN_DIR"),
    ("overview", "out.png a=nowhere", "nowhere is not a complete run"),
    ("overview", "out.png a=half", "half is not a complete run"),
    ("overview", "out.png a=cut", "cut is not a complete run"),
    ("overview", "out.png a=list", "list is not a complete run"),
    ("overview", "out.png a=torn", "torn is not a complete run"),
    ("overview", "out.png a=whole,other", "have the same config and the same seed, 0"),
    ("overview", "out.png a=whole,small", "are not seeds of the same experiment"),
    ("per_user", "nowhere", "nowhere is not a folder"),
    ("per_user", "empty", "empty has no run"),
    ("per_user", "half", "half cannot be scored: the run has not ended"),
    ("per_user", "cut", "cut cannot be scored: its files are damaged"),
    ("per_user", "whole --local.learning_rate=1", "--local.learning_rate is the run's own"),
    ("per_user", "whole --personal.num_epochs=x", "personal.num_epochs is 'x'"),
    ("standin", "", "the following arguments are required: --output_file"),
    ("standin", "--output_file=x.pth", "the name must end in .safetensors"),
    ("standin", "--output_file=x.safetensors --epochs=0", "--epochs must be at least 1"),
    ("table1", "--settings fl-r-71", "no such file, and not the name of a config"),
    ("table1", "--settings", "--settings: expected at least one argument"),
    ("table1", "--seeds one", "invalid int value: 'one'"),
    ("table1", "--data_path=mini --seeds 0 0", "give different numbers from 0 on"),
    ("table1", "--data_path=mini --seeds -1", "--seeds"),
    ("table1", "--data_path=mini --scale=huge", "scale is 'huge'"),
    ("table1", "--data_path=nowhere.hdf5", "nowhere.hdf5: no such file"),
    ("table1", "--data_path=mini --weights=nowhere.pth", "nowhere.pth: no such file"),
    ("table1", "--data_path=mini -- --local.learnin_rate=1", "did you mean local.learning_rate?"),
    ("table1", "--data_path=mini -- stray", "cannot read the argument 'stray'"),
    ("table1", "stray", "unrecognized arguments: stray"),
    (
        "table1",
        "--data_path=mini --settings fl-r-17 --seeds 0 --runs_dir=torn_runs",
        "results.json is damaged",
    ),
    ("sweep", f"nowhere {LOCAL}", "no such file and no shipped sweep"),
    ("sweep", f"file {LOCAL}", "file is not valid YAML:"),
    ("sweep", f"empty.yaml {LOCAL}", "parameters is missing"),
    ("sweep", f"metric.yaml {LOCAL}", "metric.name is 'C-AP': choose one of val/loss, val/C-AP"),
    ("sweep", f"unknown.yaml {LOCAL}", "metric.name is 'val/C-APP': choose one of"),
    ("sweep", f"goal.yaml {LOCAL}", "metric.goal is minimize, but a higher val/C-AP is better: set it to"),
    ("sweep", f"good.yaml {LOCAL} --count=x", "count is 'x'"),
    ("sweep", f"good.yaml {LOCAL} --np=0", "np is '0'"),
    ("sweep", f"good.yaml {LOCAL} --run_dir=x", "--run_dir is set by the sweep itself: remove it from"),
    (
        "sweep",
        f"good.yaml {LOCAL} --local.learning_rate=1",
        "--local.learning_rate is a parameter of the sweep",
    ),
    ("sweep", f"good.yaml {LOCAL} --server.lr=1", "there is no config key server.lr"),
    ("sweep", f"good.yaml {LOCAL} --program=train.py", "--program is 'train.py'"),
    ("sweep", f"good.yaml {FIXED}", "old holds a sweep of an earlier version (sweep.json)"),
    ("sweep", "good.yaml --local=maybe", "local is 'maybe'"),
    ("sweep", "good.yaml --local=true --data_path=nowhere.hdf5", "nowhere.hdf5: no such file"),
    ("sweep", "--local=true", "give the sweep first: python -m benchmarks.sweep NAME_OR_YAML"),
    ("vision", "nowhere", "nowhere is not a folder"),
    ("vision", "empty", "empty has no run"),
    ("vision", "half", "no finished run of visual classification in half: 1 run of benchmarks.flair"),
    ("vision", "whole", "no finished run of visual classification in whole: 1 run of benchmarks.flair"),
    ("vision", "vision_cut", "vision_cut is not a complete run"),
    ("vision", "vision --rounds=a", "--rounds: 'a': give whole numbers"),
    ("vision", "vision --batches=", "--batches: '': give whole numbers"),
    ("vision", "vision --round=1", "unrecognized arguments: --round=1"),
    ("vision", "vision --output_dir=file/x", "file"),
    ("compare", "nowhere", "nowhere is not a folder"),
    ("compare", "file", "file is not a folder"),
    ("compare", "whole empty", "empty has no run"),
    ("compare", "cut", "no run in cut can be shown: cut is not a complete run"),
    ("compare", "list cut", "no run in list, cut can be shown: list is not a complete run"),
    ("compare", "torn", "torn is not a complete run (JSONDecodeError"),
    ("compare", "--output_dir=out", "the following arguments are required: RUN_DIR"),
    ("compare", "whole --output_dir=file", "file is a file, not a folder"),
    ("compare", "whole --output_dir=gone", "--output_dir gone: the target of the link gone does not exist"),
    ("compare", "whole --output_dir=", "--output_dir is empty"),
    ("compare", "whole --target=x", "--target: invalid float value: 'x'"),
    ("compare", "whole --target=nan", "--target is nan: give a number"),
    ("compare", "whole --at_megabytes=-1", "--at_megabytes is -1: give a number of MB, at least 0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directories, whole and not, and files of sweeps; every call is made from here."""
    top = tmp_path_factory.mktemp("bad")
    (top / "file").write_text("a: [1")
    (top / "empty").mkdir()
    (top / "gone").symlink_to("nowhere")
    make_run(top / "whole", "pfl-r-17")
    make_run(top / "other", "pfl-r-17", shift=1.0)
    make_run(top / "small", "fl-r-17", "--scale=small", seed=1)
    make_run(top / "half", finished=False)
    made = {
        name: make_run(top / name, "pfl-r-17")
        for name in ("cut", "list", "torn", "unscored", "users", "strangers")
    }
    (made["cut"] / "results.json").write_text((made["cut"] / "results.json").read_text()[:100])
    (made["list"] / "results.json").write_text("[1, 2]")
    (made["torn"] / "metrics.jsonl").write_text('{"round": 0}\n{"rou')
    (made["unscored"] / "metrics.jsonl").write_text('{"round": 0}\n')
    (made["users"] / "per_user.json").write_text("[[")
    (made["strangers"] / "per_user.json").write_text('{"split": "test", "images": [2, 3]}')
    make_run(top / "torn_runs" / "fl-r-17-seed0")
    (top / "torn_runs" / "fl-r-17-seed0" / "results.json").write_text("{")
    made_run(top / "vision", "cifar10-fedavg", 0, 40.0)
    made_run(top / "vision_cut", "cifar10-fedavg", 0, 40.0)
    (top / "vision_cut" / "metrics.jsonl").write_text("{")
    (top / "empty.yaml").write_text("")
    metrics = {"good": "val/C-AP", "metric": "C-AP", "unknown": "val/C-APP"}
    for name, metric in metrics.items():
        goal = {"name": metric, "goal": "maximize"}
        Path(written(top, RATES, metric=goal)).rename(top / f"{name}.yaml")
    Path(written(top, RATES, metric={"name": "val/C-AP"})).rename(top / "goal.yaml")
    (top / "old").mkdir()
    (top / "old" / "sweep.json").write_text(json.dumps({"sweep": yaml.safe_load("a: 1")}))
    (top / "old" / "lock").touch()
    return top


@pytest.mark.parametrize("command, words, said", CALLS, ids=[f"{call[0]} {call[1]}" for call in CALLS])
def test_a_bad_call_ends_in_one_line_and_leaves_nothing(
    command: str, words: str, said: str, folder: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(folder)
    monkeypatch.setattr("benchmarks.core.mini.DataSource.ready", lambda *_: None)
    monkeypatch.setattr(table1, "make_runs", lambda *_: pytest.fail("a run was started"))
    check_refused(COMMANDS[command], words, said, folder, capsys)


def test_another_benchmark_that_cannot_be_imported_hides_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["benchmarks.half_written.config", *config_modules()]
    monkeypatch.setattr("benchmarks.reporting.known.config_modules", lambda: names)
    monkeypatch.chdir(folder)
    check_refused(vision_report.main, "half", "1 run of benchmarks.flair", folder, capsys)
