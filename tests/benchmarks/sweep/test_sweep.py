"""Sweeps as they are run: with no server, and by wandb's own agent."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml
from optuna.trial import TrialState

from benchmarks.core.config.trees import Tree
from benchmarks.core.mini import DataSource
from benchmarks.core.secret import open_secret, secret_path
from benchmarks.sweep.command import main
from benchmarks.sweep.local import LocalSweep, Options, read_values
from benchmarks.sweep.space import Metric, read_sweep
from dataset.cli import Stopped, raised, run
from dataset.files import locked
from pfl_ext.tasks.ranking import Diverged
from tests.benchmarks.conftest import train_into
from tests.benchmarks.sweep.conftest import RATES, SEEN, SHORT, double
from tests.benchmarks.sweep.test_space import written

FOUR = {"local.learning_rate": {"values": [0.1, 0.2, 0.3, 0.4]}}


def starts(sweep: LocalSweep) -> list[list[str]]:
    """The devices on which each trial was started, in turn."""
    files = [sweep.run_dir(trial) / "started" for trial in sweep.trials()]
    return [[line.split()[0] for line in file.read_text().splitlines()] for file in files]


def statuses(sweep: LocalSweep) -> list[str]:
    """As the table has them."""
    return [row.status for row in sweep.rows()]


def local_argv(mini_file: Path, tmp_path: Path, file: str, *extra: str) -> list[str]:
    fixed = [f"--data_path={mini_file}", f"--sweep_dir={tmp_path / 'sweep'}", "--runtime.threads=1"]
    return [file, "--local=true", *fixed, *SHORT, "--federated.num_rounds=2", *extra]


@dataclasses.dataclass(frozen=True)
class KilledSweep:
    """A sweep of two trials, killed in the second, and gone on with to its end by the same command."""

    argv: list[str]
    directory: Path
    first_results_written: int
    """When the first trial's results were written, in nanoseconds, as seen before the kill."""


@pytest.fixture(scope="module")
def killed_sweep(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> KilledSweep:
    tmp_path = tmp_path_factory.mktemp("killed")
    words = local_argv(mini_file, tmp_path, written(tmp_path, RATES), "--federated.num_rounds=6")
    sweep = get_context("fork").Process(target=run, args=(main, words))
    sweep.start()
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob("sweep/trials/001*/checkpoint/last.safetensors")):
        assert time.monotonic() < deadline
        assert sweep.is_alive()
        time.sleep(0.05)
    sweep.kill()
    sweep.join()
    first = next(tmp_path.glob("sweep/trials/000*/results.json")).stat().st_mtime_ns
    time.sleep(1)
    assert run(main, words) == 0
    return KilledSweep(words, tmp_path / "sweep", first)


@pytest.mark.xdist_group("killed sweep")
def test_a_sweep_killed_outright_goes_on(killed_sweep: KilledSweep) -> None:
    """SIGKILL in the second trial: its process dies with the sweep, and goes on from its checkpoint after."""
    sweep = killed_sweep.directory
    assert (
        next(sweep.glob("trials/000*/results.json")).stat().st_mtime_ns == killed_sweep.first_results_written
    )
    assert "resuming at round" in (sweep / "logs" / "001.log").read_text()
    lines = next(sweep.glob("trials/001*/metrics.jsonl")).read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == list(range(7))


@pytest.mark.xdist_group("killed sweep")
def test_each_trial_is_a_plain_run_of_what_was_asked_for(
    killed_sweep: KilledSweep, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predecessors 14, and: the same command again runs nothing twice."""
    sweep = killed_sweep.directory
    models = {}
    for directory, rate in zip(sorted((sweep / "trials").iterdir()), [0.01, 0.3], strict=True):
        assert yaml.safe_load((directory / "config.yaml").read_text())["local"]["learning_rate"] == rate
        models[rate] = json.loads((directory / "results.json").read_text())["model_sha256"]
    assert models[0.01] != models[0.3]
    table = list(csv.DictReader((sweep / "table.csv").read_text().splitlines()))
    assert [row["rank"] for row in table] == ["1", "2"]
    assert float(table[0]["best val/C-AP"]) >= float(table[1]["best val/C-AP"])
    assert (sweep / "plots" / "scores.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in (sweep / "plots" / "scores.svg").read_bytes()
    before = (sweep / "table.csv").read_bytes()
    capsys.readouterr()
    assert run(main, killed_sweep.argv) == 0
    assert (sweep / "table.csv").read_bytes() == before
    assert "starts" not in capsys.readouterr().out


@pytest.mark.xdist_group("killed sweep")
def test_a_trial_is_the_same_run_as_alone(killed_sweep: KilledSweep, mini_file: Path, tmp_path: Path) -> None:
    """The second trial of a process, killed and resumed: nothing of the first one has leaked into it."""
    words = ["--local.learning_rate=0.3", "--federated.num_rounds=6"]
    alone = train_into(tmp_path / "alone", mini_file, *words)
    trial = next((killed_sweep.directory / "trials").glob("001*"))
    results = [json.loads((directory / "results.json").read_text()) for directory in (alone, trial)]
    for key in ("config_sha256", "data_sha256", "model_sha256", "val", "test", "best_step"):
        assert results[0][key] == results[1][key], key


def test_a_sweep_without_a_file_draws_the_mini_set_first(
    doubled: Callable[..., LocalSweep], mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 17.39: its trials were sent to a file of the mini set that nobody had drawn."""
    drawn: list[Path | None] = []
    doubled(RATES)  # trials take no time from here on

    def ready(self: DataSource, asked: Path | None, path: Path) -> None:
        drawn.append(asked)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(mini_file, path)

    monkeypatch.setattr(DataSource, "ready", ready)
    monkeypatch.chdir(tmp_path)
    for data in ([], ["--data_path=mini"]):
        assert (
            run(main, [str(tmp_path / "sweep.yaml"), "--local=true", *data, f"--sweep_dir=s{len(data)}"]) == 0
        )
    assert drawn == [None, Path("mini")]


def test_trials_run_side_by_side_on_their_own_devices(doubled: Callable[..., LocalSweep]) -> None:
    sweep = doubled(FOUR, together=2, workers=2, devices="cpu:0, cpu:1")
    sweep.run()
    devices = [device for trial in starts(sweep) for device in trial]
    assert sorted(devices[:2]) == ["cpu:0", "cpu:1"]  # the first two are open at once
    directories = [sweep.run_dir(trial) for trial in sweep.trials()]
    spans = [
        (float((path / "started").read_text().split()[1]), float((path / "ended").read_text()))
        for path in directories
    ]
    assert spans[1][0] < spans[0][1]  # the second began before the first ended
    for device in ("cpu:0", "cpu:1"):
        own = sorted(span for span, on in zip(spans, devices, strict=True) if on == device)
        assert all(ended <= started for (_, ended), (started, _) in itertools.pairwise(own))


def test_a_trial_is_a_fork_that_leaves_nothing_behind(doubled: Callable[..., LocalSweep]) -> None:
    """What is imported is shared; what a trial does to its process, the others do not see."""
    sweep = doubled(FOUR)
    sweep.run()
    for trial, rate in zip(sweep.trials(), FOUR["local.learning_rate"]["values"]):
        words = (sweep.run_dir(trial) / "started").read_text().split(maxsplit=3)
        assert words[2:] == [str(os.getpid()), f"[{rate}]\n"]
    assert SEEN == []


def test_each_fork_draws_its_own_secret(tmp_path: Path) -> None:
    """No generator whose state a fork inherits has a part in the noise of a private trial."""
    for name in "ab":
        fork = get_context("fork").Process(target=open_secret, args=(tmp_path / name, "config", "data"))
        fork.start()
        fork.join()
    secrets = {json.loads(secret_path(tmp_path / name).read_text())["secret"] for name in "ab"}
    assert len(secrets) == 2


def test_an_interrupted_sweep_goes_on_with_the_half_finished(
    doubled: Callable[..., LocalSweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = doubled(FOUR, pause=0.1)
    real = LocalSweep._watch

    def interrupt(self: LocalSweep, *active: Any) -> bool:
        if len(self.trials()) == 2 and (self.run_dir(self.trials()[1]) / "started").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, *active)

    monkeypatch.setattr(LocalSweep, "_watch", interrupt)
    with pytest.raises(Stopped), raised():
        sweep.run()
    assert statuses(sweep) == ["finished", "running"]
    monkeypatch.setattr(LocalSweep, "_watch", real)
    again = doubled(FOUR)
    again.run()
    assert statuses(again) == ["finished"] * 4
    assert [len(devices) for devices in starts(again)] == [1, 2, 1, 1]


@pytest.mark.parametrize(
    "fault, message", [("fails", "no luck today"), ("dies", "killed by SIGKILL, see")], ids=["exit", "kill"]
)
def test_a_trial_that_fails_or_dies_harms_no_other_and_is_tried_once_more(
    fault: str, message: str, doubled: Callable[..., LocalSweep]
) -> None:
    sweep = doubled(FOUR, **{fault: 0.2})
    with pytest.raises(ValueError, match=f"1 of 4 trials failed, trial 001: {message}"):
        sweep.run()
    assert statuses(sweep) == ["finished", "failed", "finished", "finished"]
    assert "| failed |" in (sweep.directory / "table.md").read_text()
    again = doubled(FOUR, **{fault: 0.2})
    rows = again.run()
    assert [row.status for row in rows] == ["finished"] * 4
    assert [row.score for row in rows] == [17.0, 27.0, 37.0, 47.0]
    assert [len(devices) for devices in starts(again)] == [1, 2, 1, 1]


def test_a_trial_that_diverges_is_an_answer_and_ranks_last(
    doubled: Callable[..., LocalSweep], capsys: pytest.CaptureFixture[str]
) -> None:
    """Grids of rates have such trials. It was a failure: the sweep ended with 2, and tried it once more."""
    sweep = doubled(FOUR, diverges=0.35)
    rows = sweep.run()
    assert [row.status for row in rows] == ["finished"] * 3 + ["diverged"]
    assert [row.score for row in rows] == [17.0, 27.0, 37.0, None], "47 until then"
    assert [trial.value for trial in sweep.study.get_trials()] == [17.0, 27.0, 37.0, -math.inf], "the worst"
    assert "trial 003 diverged" in capsys.readouterr().out
    assert (sweep.directory / "table.md").read_text().splitlines()[-1].split(" | ")[1] == "003"
    again = doubled(FOUR, diverges=0.35)
    assert [row.status for row in again.run()] == [row.status for row in rows]
    assert [len(devices) for devices in starts(again)] == [1, 1, 1, 1]


def test_a_sweep_in_which_all_trials_diverge_has_failed(doubled: Callable[..., LocalSweep]) -> None:
    with pytest.raises(ValueError, match="no trial has finished: the model diverged in 2 of 2 trials: use"):
        doubled(RATES, diverges=0.0).run()


def test_what_diverged_stops_no_other_trial(doubled: Callable[..., LocalSweep]) -> None:
    """It was ahead until it diverged."""
    rule = {"type": "hyperband", "min_iter": 2, "eta": 4}
    falling = {"local.learning_rate": {"values": [0.4, 0.3, 0.2, 0.1]}}
    rows = doubled(falling, pause=0.15, diverges=0.35, workers=1, early_terminate=rule).run()
    assert [row.status for row in rows][:2] == ["diverged", "finished"]


def test_hyperband_stops_the_hopeless_and_leaves_the_best(doubled: Callable[..., LocalSweep]) -> None:
    """All four have started when the best one comes first to each place: only it may end."""
    rule = {"type": "hyperband", "min_iter": 2, "eta": 4}
    falling = {"local.learning_rate": {"values": [0.4, 0.3, 0.2, 0.1]}}
    sweep = doubled(falling, pause=0.25, together=4, workers=4, early_terminate=rule)
    rows = sweep.run()
    assert [row.status for row in rows] == ["finished", "stopped", "stopped", "stopped"]
    again = doubled(falling, pause=0.25, together=4, workers=4, early_terminate=rule)
    assert [row.status for row in again.run()] == [row.status for row in rows]
    assert [len(devices) for devices in starts(again)] == [1, 1, 1, 1]


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_a_search_makes_as_many_different_trials_as_asked_for(
    method: str, doubled: Callable[..., LocalSweep]
) -> None:
    options: Tree = {"method": method, "run_cap": 5}
    space = {"local.learning_rate": {"distribution": "log_uniform_values", "min": 0.001, "max": 1.0}}
    first = doubled(space, count=3, **options)
    first.run()
    points = [trial.user_attrs["point"] for trial in first.trials()]
    assert len(points) == 3
    whole = doubled(space, **options)
    whole.run()
    assert [trial.user_attrs["point"] for trial in whole.trials()[:3]] == points
    assert len({trial.user_attrs["digest"] for trial in whole.trials()}) == 5
    assert next(whole.sweep.candidates(0, 0, []))[1] == points[0]


def test_trials_from_1000_on_have_numbers_of_their_own(
    doubled: Callable[..., LocalSweep], capsys: pytest.CaptureFixture[str]
) -> None:
    """Trial 1000 was trial 100 in table, messages and log."""
    sweep = doubled(RATES, fails=0.3)
    for name, rate in (("100-a", 0.01), ("1000-b", 0.3)):
        point = {"local.learning_rate": rate}
        sweep._add(point, {"point": point, "digest": name, "name": name})
    with pytest.raises(ValueError, match="trial 1000: no luck today"):
        sweep.run()
    assert [row.number for row in sweep.rows()] == [100, 1000]
    assert sorted(path.name for path in (sweep.directory / "logs").iterdir()) == ["100.log", "1000.log"]
    said = capsys.readouterr().out
    assert "trial 1000 of 2 starts: " in said
    assert "trial 1000 failed" in said


def test_a_small_space_is_not_tried_twice(doubled: Callable[..., LocalSweep]) -> None:
    sweep = doubled(RATES, method="random", run_cap=9)
    assert sorted(row.point["local.learning_rate"] for row in sweep.run()) == [0.01, 0.3]


def test_a_kill_between_two_steps_loses_no_trial(doubled: Callable[..., LocalSweep]) -> None:
    """Queued but not started; started but not noted as started; a journal cut short, its lock left behind."""
    sweep = doubled(FOUR)
    sweep._add_new()
    journal = sweep.directory / "study.journal"
    with journal.open("ab") as file:
        file.write(b'{"op_code": 5, "tri')
    journal.with_name("study.journal.lock").symlink_to(journal)
    sweep = doubled(FOUR)
    assert [trial.state for trial in sweep.trials()] == [TrialState.WAITING]
    sweep.study.ask()
    assert statuses(doubled(FOUR)) == ["running"]
    sweep = doubled(FOUR)
    sweep.run()
    assert [row.score for row in sweep.rows()] == [17.0, 27.0, 37.0, 47.0]
    assert [len(devices) for devices in starts(sweep)] == [1, 1, 1, 1]


def test_a_directory_belongs_to_one_sweep_and_one_call(
    doubled: Callable[..., LocalSweep], mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = doubled(RATES)
    sweep.run()
    with pytest.raises(ValueError, match="has another sweep"):
        doubled(FOUR)
    argv = [str(tmp_path / "sweep.yaml"), "--local=true", f"--data_path={mini_file}"]
    with locked(sweep.directory / "lock", "held"):
        assert run(main, [*argv, f"--sweep_dir={sweep.directory}"]) == 2
    assert "is in use by another process" in capsys.readouterr().err
    (sweep.directory / "study.journal").write_text('{"op_code": 0}\n{\n')
    with pytest.raises(ValueError, match=r"study\.journal is damaged"):
        doubled(RATES)


def test_several_processes_of_a_trial_are_started_by_the_launcher(
    doubled: Callable[..., LocalSweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(python: str, words: Sequence[str]) -> None:
        given = words[words.index("benchmarks.flair.train") + 1 :]
        assert words[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        double(given, pause=0, fails=-1, dies=-1, together=1)
        os._exit(0)

    monkeypatch.setattr(os, "execv", launched)
    assert [row.status for row in doubled(RATES, np=2).run()] == ["finished"] * 2


def test_torchruns_exit_code_of_a_diverged_trial_is_1(
    doubled: Callable[..., LocalSweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    def launched(python: str, words: Sequence[str]) -> None:
        given = words[words.index("benchmarks.flair.train") + 1 :]
        try:
            double(given, pause=0, fails=-1, dies=-1, together=1, diverges=0.2)
        except Diverged as fault:
            os.write(2, f"error: {fault}\n".encode())
            os._exit(1)
        os._exit(0)

    monkeypatch.setattr(os, "execv", launched)
    assert [row.status for row in doubled(RATES, np=2).run()] == ["finished", "diverged"]


def test_a_line_that_is_just_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 0, "val": {"C-AP": 3.5}}\n{"round": 1}\n{"round": 2, "val": {"C-A')
    assert read_values(path, "val/C-AP") == [(0, 3.5)]
    path.write_text('{"round": 2, not parsed}\n{"round": 3, "val": {"C-AP": 4.5}}\n')
    assert read_values(path, "val/C-AP") == [(3, 4.5)], "lines without scores of val are not parsed"
    assert read_values(tmp_path / "none", "val/C-AP") == []


def test_the_column_of_test_is_the_headline_of_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 17.19: the tables of visual classification had a column of C-AP, which was empty."""
    sweep, tree, _ = read_sweep("effective-learning-rate")
    words = ["--config=cifar10-fedavgm"]
    sweep = dataclasses.replace(sweep, metric=None)
    (tmp_path / "s").mkdir()
    local = LocalSweep(sweep, tree, words, tmp_path / "s", Options(count=1))
    assert sweep.ranking == Metric("val/accuracy", "maximize")
    local._add_new()
    run_dir = local.run_dir(local.trials()[0])
    run_dir.mkdir(parents=True)
    results = {"test": {"accuracy": 61.5, "loss": 1.0}, "wall_clock_s": 3}
    (run_dir / "results.json").write_text(json.dumps(results))
    line = {"round": 4, "val": {"accuracy": 60.0, "loss": 1.1}}
    (run_dir / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    local.report()
    (row,) = csv.DictReader((local.directory / "table.csv").read_text().splitlines())
    assert (row["best val/accuracy"], row["test accuracy"]) == ("60", "61.50")
    assert "C-AP" not in (local.directory / "table.md").read_text()
