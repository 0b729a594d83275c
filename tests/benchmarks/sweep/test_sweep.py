"""Sweeps as they are run: with no server, and by wandb's own agent."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import queue
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import wandb
import yaml
from wandb.apis.public import sweeps as wandb_sweeps
from wandb.wandb_agent import Agent

from benchmarks.core.config.digests import short_digest
from benchmarks.core.config.trees import Tree
from benchmarks.core.mini import DataSource
from benchmarks.flair.config import parse
from benchmarks.sweep import local as sweep_local
from benchmarks.sweep.command import main
from benchmarks.sweep.local import LocalSweep, Trial, alone, read_values
from benchmarks.sweep.report import Row, axis, markdown, parallel_coordinates
from benchmarks.sweep.space import Metric, command_words, read_sweep
from dataset.cli import Stopped, raised, run
from tests.benchmarks.conftest import SMALL
from tests.benchmarks.sweep.test_space import COMMAND, written

RATES = {"local.learning_rate": {"values": [0.01, 0.3]}}
FOUR = {"local.learning_rate": {"values": [0.1, 0.2, 0.3, 0.4]}}
SHORT = [word for word in SMALL if "num_rounds" not in word and "progress" not in word]

# A trainer that takes no time: its metric is a hundred times its learning rate, plus the round. It waits
# until as many trials as go TOGETHER were started.
DOUBLE = """
import json, pathlib, sys, time
given = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
rate, here = float(given["local.learning_rate"]), pathlib.Path(given["run_dir"])
here.mkdir(parents=True, exist_ok=True)
(here / "started").open("a").write(f"{given['runtime.device']} {time.time()}\\n")
if rate == FAILS and not (here / "again").exists():
    (here / "again").touch()
    sys.exit("error: no luck today")
deadline = time.monotonic() + 120
while len(list(here.parent.glob("*/started"))) < TOGETHER:
    assert time.monotonic() < deadline, "no other trial was started"
    time.sleep(0.01)
for step in range(8):
    with (here / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": step, "val": {"C-AP": 100 * rate + step}}) + "\\n")
    time.sleep(PAUSE)
(here / "ended").write_text(str(time.time()))
(here / "results.json").write_text(json.dumps({"test": {"C-AP": 1.5}, "wall_clock_s": 2}))
"""


@pytest.fixture
def doubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LocalSweep]:
    """A local sweep whose trials are `DOUBLE`: what is tested is which are run, when and on what."""
    monkeypatch.setattr(sweep_local, "POLL_SECONDS", 0.05)
    real = LocalSweep.command

    def make(
        parameters: Tree, pause: float = 0.0, fails: float = -1.0, together: int = 1, **options: Any
    ) -> LocalSweep:
        script = DOUBLE
        for name, value in {"FAILS": fails, "PAUSE": pause, "TOGETHER": together}.items():
            script = script.replace(name, str(value))

        def command(self: LocalSweep, trial: Trial, slot: int) -> list[str]:
            words = real(self, trial, slot)
            return [sys.executable, "-c", script, *words[words.index("benchmarks.flair.train") + 1 :]]

        monkeypatch.setattr(LocalSweep, "command", command)
        local = {k: options.pop(k) for k in ("workers", "devices", "count", "seed") if k in options}
        sweep, tree, _ = read_sweep(written(tmp_path, parameters, **options))
        return LocalSweep(sweep, tree, ["--config=fl-r-17"], tmp_path / "sweep", **local)

    return make


def starts(sweep: LocalSweep) -> list[list[str]]:
    """The devices on which each trial was started, in turn."""
    files = [sweep.run_dir(trial) / "started" for trial in sweep.trials]
    return [[line.split()[0] for line in file.read_text().splitlines()] for file in files]


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
    state = json.loads((sweep / "sweep.json").read_text())
    models = {}
    for trial, rate in zip(state["trials"], [0.01, 0.3], strict=True):
        directory = sweep / "trials" / f"{trial['number']:03d}-{trial['digest'][:8]}"
        assert trial["status"] == "finished"
        assert yaml.safe_load((directory / "config.yaml").read_text())["local"]["learning_rate"] == rate
        models[rate] = json.loads((directory / "results.json").read_text())["model_sha256"]
    assert models[0.01] != models[0.3]
    table = list(csv.DictReader((sweep / "table.csv").read_text().splitlines()))
    assert [row["rank"] for row in table] == ["1", "2"]
    assert float(table[0]["best val/C-AP"]) >= float(table[1]["best val/C-AP"])
    assert (sweep / "plots" / "parallel_coordinates.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in (sweep / "plots" / "parallel_coordinates.svg").read_bytes()
    before = (sweep / "table.csv").read_bytes()
    capsys.readouterr()
    assert run(main, killed_sweep.argv) == 0
    assert (sweep / "table.csv").read_bytes() == before
    assert "starts" not in capsys.readouterr().out


def test_a_sweep_without_a_file_draws_the_mini_set_first(
    doubled: Callable[..., LocalSweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 17.39: its trials were sent to a file of the mini set that nobody had drawn."""
    drawn: list[Path | None] = []
    doubled(RATES)  # trials take no time from here on
    monkeypatch.setattr(DataSource, "ready", lambda self, asked, path: drawn.append(asked))
    monkeypatch.chdir(tmp_path)
    for data in ([], ["--data_path=mini"]):
        assert (
            run(main, [str(tmp_path / "sweep.yaml"), "--local=true", *data, f"--sweep_dir=s{len(data)}"]) == 0
        )
    assert drawn == [None, Path("mini")]


def test_trials_run_side_by_side_on_their_own_devices(doubled: Callable[..., LocalSweep]) -> None:
    sweep = doubled(FOUR, together=2, workers=2, devices=["cpu:0", "cpu:1"])
    sweep.run()
    devices = starts(sweep)
    assert sorted(device for trial in devices for device in trial) == ["cpu:0"] * 2 + ["cpu:1"] * 2
    spans = [
        (
            float((sweep.run_dir(trial) / "started").read_text().split()[1]),
            float((sweep.run_dir(trial) / "ended").read_text()),
        )
        for trial in sweep.trials
    ]
    assert spans[1][0] < spans[0][1]  # the second began before the first ended
    most = max(sum(a <= t < b for a, b in spans) for t, _ in spans)
    assert most == 2


def test_an_interrupted_sweep_goes_on_with_the_half_finished(
    doubled: Callable[..., LocalSweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = doubled(FOUR, pause=0.1)
    real = LocalSweep._reap

    def interrupt(self: LocalSweep) -> None:
        real(self)
        if len(self.trials) == 2 and (self.run_dir(self.trials[1]) / "started").exists():
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LocalSweep, "_reap", interrupt)
    with pytest.raises(Stopped), raised():
        sweep.run()
    assert [trial.status for trial in sweep.trials] == ["finished", "running"]
    monkeypatch.setattr(LocalSweep, "_reap", real)
    again = doubled(FOUR)
    again.run()
    assert [trial.status for trial in again.trials] == ["finished"] * 4
    assert [len(devices) for devices in starts(again)] == [1, 2, 1, 1]


def test_a_failed_trial_is_told_of_and_tried_once_more(
    doubled: Callable[..., LocalSweep], capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = doubled(FOUR, fails=0.2)
    with pytest.raises(ValueError, match="1 of 4 trials failed, trial 001: no luck today"):
        sweep.run()
    assert [trial.status for trial in sweep.trials] == ["finished", "failed", "finished", "finished"]
    assert "| failed |" in (sweep.directory / "table.md").read_text()
    again = doubled(FOUR, fails=0.2)
    rows = again.run()
    assert [row.status for row in rows] == ["finished"] * 4
    assert [row.score for row in rows] == [17.0, 27.0, 37.0, 47.0]
    assert [len(devices) for devices in starts(again)] == [1, 2, 1, 1]


def test_hyperband_stops_the_hopeless_and_leaves_the_best(doubled: Callable[..., LocalSweep]) -> None:
    """Side by side, all four have had two values when the first has eight: only the best may end."""
    rule = {"type": "hyperband", "min_iter": 2, "eta": 4}
    sweep = doubled(FOUR, pause=0.25, together=4, workers=4, early_terminate=rule)
    rows = sweep.run()
    assert rows[3].status == "finished"
    assert {row.status for row in rows[:3]} == {"stopped"}
    again = doubled(FOUR, pause=0.25, together=4, workers=4, early_terminate=rule)
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
    assert len(first.trials) == 3
    whole = doubled(space, **options)
    whole.run()
    assert [trial.point for trial in whole.trials[:3]] == [trial.point for trial in first.trials]
    assert len({trial.digest for trial in whole.trials}) == 5
    (whole.directory / "sweep.json").rename(whole.directory / "older.json")
    afresh = doubled(space, **options)
    points = [afresh._new_trial() for _ in range(1)]
    assert points[0] is not None
    assert points[0].point == whole.trials[0].point


def test_a_small_space_is_not_tried_twice(doubled: Callable[..., LocalSweep]) -> None:
    sweep = doubled(RATES, method="random", run_cap=9)
    sweep.run()
    assert sorted(trial.point["local.learning_rate"] for trial in sweep.trials) == [0.01, 0.3]


def test_a_directory_belongs_to_one_sweep_and_one_call(doubled: Callable[..., LocalSweep]) -> None:
    sweep = doubled(RATES)
    sweep.run()
    with pytest.raises(ValueError, match="holds another sweep"):
        doubled(FOUR)
    with (
        alone(sweep.directory),
        pytest.raises(ValueError, match="is being worked on"),
        alone(sweep.directory),
    ):
        pass


def test_a_line_that_is_just_being_written_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"round": 0, "val": {"C-AP": 3.5}}\n{"round": 1}\n{"round": 2, "val": {"C-A')
    assert read_values(path, "val/C-AP") == [(0, 3.5)]
    assert read_values(tmp_path / "none", "val/C-AP") == []


@pytest.mark.parametrize(
    "argv, message",
    [
        (["nowhere", "--local=true"], "no such file and no shipped sweep; the shipped ones are bayes, clip-"),
        (["learning-rates", "--local=true", "--workers=0"], "--workers is '0'"),
        (
            ["learning-rates", "--local=true", "--run_dir=x"],
            "--run_dir is the sweep's to give: remove it from the arg",
        ),
        (
            ["learning-rates", "--local=true", "--program=benchmarks.sweep.command"],
            "--program is 'benchmarks.sweep.command': choose",
        ),
        (
            ["learning-rates", "--local=true", "--program=benchmarks.visual_classification.train"],
            "is a sweep of benchmarks.flair.train, and --program is",
        ),
        (["learning-rates", "--local=true", "--local.learning_rate=1"], "--local.learning_rate is swept"),
        (
            ["learning-rates", "--local=true", "--locl.batch_size=1"],
            "no config key locl; did you mean local?",
        ),
        (["learning-rates", "--workers=2"], "--workers is for local sweeps"),
        (["learning-rates"], "no wandb key was found"),
        (["me/flair/abc123", "--server.beta1=0.5"], "stand in its command at wandb"),
        (["--local=true"], "the sweep comes first"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_ends_in_one_line_and_code_2(
    argv: list[str],
    message: str,
    mini_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.chdir(tmp_path)
    where = [] if "/" in argv[0] else [f"--data_path={mini_file}"]
    assert run(main, [*argv, *where] if not argv[0].startswith("--") else argv) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(errors) == 1
    assert message in errors[0]


def test_wandbs_own_agent_runs_what_was_asked_for(
    mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """wandb's Agent itself; only its server's answers are written here."""
    fixed = [f"--data_path={mini_file}", "--run_dir=sweep/{digest}", *SHORT, "--federated.num_rounds=1"]
    fixed.append("--runtime.threads=1")
    command = [*COMMAND[:-1], *fixed, "--runtime.track=wandb", "--runtime.progress=false", "${args}"]
    args = {"local.learning_rate": {"value": 0.3}}
    answers = [[{"type": "run", "run_id": "r1", "program": "", "args": args}]]
    monkeypatch.setattr(
        wandb_sweeps, "_sweep_with_runs", lambda *_: {"config": yaml.safe_dump({"command": command})}
    )
    monkeypatch.setattr(wandb_sweeps, "_register_agent", lambda *_, **__: {"id": "agent"})

    def heartbeat(api: Any, agent_id: str, metrics: Any, running: dict[str, bool]) -> list[Any]:
        return answers.pop(0) if not running and answers else []

    monkeypatch.setattr(wandb_sweeps, "_agent_heartbeat", heartbeat)
    monkeypatch.setattr(wandb, "Api", lambda: None)
    monkeypatch.setattr(Agent, "POLL_INTERVAL", 0.1)
    for name, value in {"MODE": "offline", "SWEEP_ID": "sweep1", "DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    monkeypatch.setenv("WANDB_RUN_ID", "")
    monkeypatch.setenv("WANDB_SWEEP_PARAM_PATH", "")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    monkeypatch.chdir(tmp_path)
    Agent(None, queue.Queue(), sweep_id="sweep1", count=1).run()  # type: ignore[no-untyped-call]
    words = ["--config=fl-r-17", *fixed, *command_words({"local.learning_rate": 0.3})]
    directory = tmp_path / "sweep" / short_digest(parse(words).config)
    assert yaml.safe_load((directory / "config.yaml").read_text())["local"]["learning_rate"] == 0.3
    assert json.loads((directory / "results.json").read_text())["model_sha256"]
    assert [path.stem for path in tmp_path.glob("sweep/*/wandb/offline-run-*/*.wandb")] == ["run-r1"]


def some_rows() -> list[Row]:
    points = [{"a.rate": 0.1, "b": "x"}, {"a.rate": 0.001, "b": "y"}, {"a.rate": 0.01, "b": "x"}]
    scores: list[float | None] = [12.0, 30.0, None]
    return [
        Row(i, point, "finished" if score else "failed", score, 3, None, 1.0, f"trials/{i}")
        for i, (point, score) in enumerate(zip(points, scores))
    ]


def test_the_column_of_test_is_the_headline_of_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 17.19: the tables of visual classification had a column of C-AP, which was empty."""
    sweep, tree, _ = read_sweep("effective-learning-rate")
    words = ["--config=cifar10-fedavgm"]
    local = LocalSweep(dataclasses.replace(sweep, metric=None), tree, words, tmp_path / "s", count=1)
    assert local.metric == Metric("val/accuracy", "maximize")
    trial = local._new_trial()
    assert trial is not None
    local.run_dir(trial).mkdir(parents=True)
    told = {"test": {"accuracy": 61.5, "loss": 1.0}, "wall_clock_s": 3}
    (local.run_dir(trial) / "results.json").write_text(json.dumps(told))
    line = {"round": 4, "val": {"accuracy": 60.0, "loss": 1.1}}
    (local.run_dir(trial) / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    local.report()
    (row,) = csv.DictReader((local.directory / "table.csv").read_text().splitlines())
    assert (row["best val/accuracy"], row["test accuracy"]) == ("60", "61.50")
    assert "C-AP" not in (local.directory / "table.md").read_text()


def test_a_local_sweep_needs_no_command(
    doubled: Callable[..., LocalSweep], mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.46: it failed after a while, with a dump of an object."""
    doubled(RATES, command=None)  # trials take no time from here on
    argv = [
        str(tmp_path / "sweep.yaml"),
        "--local=true",
        f"--data_path={mini_file}",
        f"--sweep_dir={tmp_path / 's'}",
    ]
    assert run(main, argv) == 0
    assert "| finished |" in (tmp_path / "s" / "table.md").read_text()


def test_a_sweep_by_val_of_runs_that_follow_test_is_refused_before_any_trial(
    mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every trial would fail at its end, as there is no val in its metrics.jsonl."""
    argv = [written(tmp_path, RATES, command=None, metric=None), "--local=true", f"--data_path={mini_file}"]
    argv += ["--program=benchmarks.visual_classification.train"]
    assert run(main, argv) == 2
    assert "add --data.scored=val" in capsys.readouterr().err


def test_the_run_dir_of_a_sweeps_file_is_refused_not_ignored(
    mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Issue 17.46."""
    for word in (["--run_dir=mine/{digest}"], ["--run_dir", "mine"], ["--runtime.device=cuda:1"]):
        file = written(tmp_path, RATES, command=[*COMMAND[:-1], *word, COMMAND[-1]])
        assert run(main, [file, "--local=true", f"--data_path={mini_file}"]) == 2
        key = word[0].split("=")[0]
        assert (
            f"{key} is the sweep's to give: remove it from the command of {file}" in capsys.readouterr().err
        )


def test_wandb_gives_each_trial_a_directory_of_its_own(
    mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[Tree] = []
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(wandb, "sweep", lambda tree, **_: registered.append(tree))
    monkeypatch.setattr(wandb, "agent", lambda *_, **__: None)
    command = [*COMMAND[:-1], "--run_dir=mine/{digest}", COMMAND[-1]]
    for options, place in (
        ({"command": None}, "runs/sweeps/sweep/{digest}"),
        ({"command": command}, "mine/{digest}"),
    ):
        assert run(main, [written(tmp_path, RATES, **options), f"--data_path={mini_file}"]) == 0
        words = registered[-1]["command"]
        assert [word for word in words if word.startswith("--run_dir")] == [f"--run_dir={place}"]
        assert words[:4] == ["${env}", "${interpreter}", "-m", "benchmarks.flair.train"]
        assert words[-1] == "${args}"


def test_the_table_has_the_best_first_and_the_unscored_last() -> None:
    lines = markdown(some_rows(), ["a.rate", "b"], Metric("val/C-AP", "maximize"), "C-AP").splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == ["001", "000", "002"]
    smallest = markdown(some_rows(), ["a.rate"], Metric("val/loss"), "C-AP").splitlines()[2:]
    assert [line.split(" | ")[1] for line in smallest] == ["000", "001", "002"]


def test_axes_place_numbers_by_size_and_words_evenly() -> None:
    log = axis("rate", [0.001, 0.1, 0.01], None, True)
    assert log.places == pytest.approx([0, 1, 0.5])
    assert axis("n", [1, 5, 2], [1, 2, 5], False).ticks == [(0.0, "1"), (0.25, "2"), (1.0, "5")]
    words = axis("form", ["torch", "keras"], ["keras", "torch", "other"], False)
    assert list(words.places) == [0.5, 0.0]
    assert axis("none", [None, 3], [None, 3], False).places == [0.0, 1.0]
    assert axis("same", [2.0, 2.0], None, False).places == [0.5, 0.5]


def test_one_scored_trial_makes_no_plot(tmp_path: Path) -> None:
    sweep, _, _ = read_sweep("learning-rates")
    only = [row for row in some_rows() if row.number == 1]
    assert not parallel_coordinates(only, sweep, Metric("val/C-AP", "maximize"), "t", tmp_path / "p")
    assert list(tmp_path.iterdir()) == []
