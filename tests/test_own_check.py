"""What `benchmarks.check` finds in algorithms of one's own: some forget something, one does not."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.check.__main__ import main as check_command
from benchmarks.check.changed import CHANGES
from benchmarks.check.runs import INTERRUPTED, TWO_WORKERS, Refused, Runs, check, distance
from benchmarks.visual_classification.train import main
from dataset.cli import RESUMABLE, run
from pfl_ext.algorithms.algorithm import register
from tests import warm
from tests.benchmarks.conftest import classes_file as classes_file
from tests.benchmarks.run_files import error_line
from tests.benchmarks.sparing import sparingly
from tests.launching import environment
from tests.test_extending import dropped as dropped

SMALL = (
    "--config=cifar10-fedavg", "--scale=mini", "--model.arch=lenet", "--data.image_size=20",
    "--model.input_size=20", "--federated.cohort_size=4", "--federated.num_rounds=3", "--local.batch_size=4",
)  # fmt: skip


class InThisProcess(Runs):
    """Runs without other processes, and so with a single worker."""

    def train(self, name: str, *more: str, by: Sequence[str] = ()) -> bool:
        if by == TWO_WORKERS:
            raise Refused("one process")
        where = (f"--run_dir={self.folder / name}", "--runtime.keep_checkpoints=true")
        with CHANGES[by[1]]() if by else nullcontext(), sparingly(draw=False):
            code = run(main, [*self.command, *where, *more])
        assert code in (0, RESUMABLE)
        return code == 0


class Warm(Runs):
    """Runs in processes that have what they import."""

    start = (sys.executable, warm.__file__)


@pytest.fixture
def found(classes_file: Path, tmp_path: Path) -> Any:
    """Check an algorithm; whether all is kept, and the lines."""

    def call(name: str) -> tuple[bool, list[str]]:
        said = list[str]()
        words = (*SMALL, f"--federated.algorithm={name}", f"--data_path={classes_file}")
        return check(InThisProcess(words, tmp_path), said.append), said

    return call


def test_what_forgets_nothing_is_equal(dropped: None, found: Any) -> None:
    kept, said = found("slowmo")
    assert kept
    assert said[:2] == [
        "trained again: equal, bit for bit",
        "stopped after each round, and gone on with: equal, bit for bit",
    ]
    assert said[2].startswith("by pfl's own loop: equal")
    assert "times what a rounding of the first weights changes" in said[2]
    assert said[3:] == ["by two workers: refused: one process"]


def test_a_state_outside_of_the_checkpoint_is_found(dropped: None, found: Any) -> None:
    slowmo = import_module("pfl_ext.algorithms.slowmo").SlowMo

    @register("forgetful")
    class Forgetful(slowmo):  # type: ignore[misc, valid-type]
        def round(self, state: Any, number: int) -> Any:
            x, self.u = state[0], getattr(self, "u", state[1])
            (x, self.u), line = super().round((x, self.u), number)
            return (x, state[1]), line

    kept, said = found("forgetful")
    assert not kept
    assert said[0] == "trained again: equal, bit for bit"
    assert said[1].startswith("stopped after each round, and gone on with: NOT EQUAL: x/backbone.")
    assert said[1].endswith(", ... in results.json")


def test_what_draws_by_itself_and_what_depends_on_the_engine_is_found(dropped: None, found: Any) -> None:
    slowmo, drawn = import_module("pfl_ext.algorithms.slowmo").SlowMo, iter(range(1, 100))

    @register("drawing")
    class Drawing(slowmo):  # type: ignore[misc, valid-type]
        def round(self, state: Any, number: int) -> Any:
            (x, u), line = super().round(state, number)
            factor = next(drawn) if self.context.engine is not None else -1.0
            return (x, {name: factor * w for name, w in u.items()}), line

    kept, said = found("drawing")
    assert not kept
    assert said[0].startswith("trained again: NOT EQUAL: u/backbone.")
    assert said[2].startswith("by pfl's own loop: NOT EQUAL: the states differ by ")


@pytest.mark.parametrize("weight", [0.5, 0.0])
def test_a_state_that_grows_in_each_round_does_not_hide_a_difference(weight: float, tmp_path: Path) -> None:
    """As FedBuff's versions do. Without a number common to both rounds nothing says what is a rounding."""

    class Growing(Runs):
        rounds = stops = 0

        def train(self, name: str, *more: str, by: Sequence[str] = ()) -> bool:
            (self.folder / name).mkdir(exist_ok=True)
            self.stops += by == INTERRUPTED
            self.rounds = self.stops if by == INTERRUPTED else 3
            return self.rounds == 3

        def state(self, name: str) -> dict[str, torch.Tensor]:
            off = weight if name == "by pfl's own loop" else 0.0
            more = 1 if name == "perturbed" and not weight else 0
            return {"x": torch.full((2,), self.rounds + off), "versions": torch.ones(self.rounds + more)}

        def results(self, name: str) -> dict[str, Any]:
            return {}

    said = list[str]()
    assert check(Growing(["module"], tmp_path), said.append) == (weight == 0)
    assert said[2].startswith("by pfl's own loop: NOT EQUAL" if weight else "by pfl's own loop: equal")


def test_it_trains_in_processes_of_their_own(
    classes_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in os.environ.keys() - environment().keys():
        monkeypatch.delenv(name)  # or processes would be fresh interpreters
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    words = ("benchmarks.visual_classification.train", *SMALL, f"--data_path={classes_file}")
    runs = Warm(words, tmp_path)
    assert not runs.train("stopped", by=INTERRUPTED)
    assert runs.train("two", "--federated.num_rounds=1", by=(*TWO_WORKERS[:-1], warm.__file__))
    assert runs.state("stopped").keys() == runs.state("two").keys()
    assert distance(runs.state("stopped"), runs.state("two")) < 1e-4, "one round is done"


def test_runs_between_which_somebody_commits_are_equal(tmp_path: Path) -> None:
    for commit in ("one", "two"):
        found = {"test": {"accuracy": 1.0}, "commit": commit, "wall_clock_s": len(commit)}
        (tmp_path / commit).mkdir()
        (tmp_path / commit / "results.json").write_text(json.dumps(found), encoding="utf-8")
    results = [Runs(["module"], tmp_path).results(commit) for commit in ("one", "two")]
    assert results == [{"test": {"accuracy": 1.0}}] * 2


def test_states_of_other_tensors_are_no_rounding_apart() -> None:
    one = {"x": torch.ones(3), "count": torch.tensor(2)}
    assert distance(one, {"x": torch.tensor([1.0, 4, 5]), "count": torch.tensor(9)}) == 5
    assert distance(one, {"x": torch.ones(4), "count": torch.tensor(2)}) == math.inf
    assert distance(one, {"x": torch.ones(3)}) == math.inf


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name the module that trains, such as benchmarks.fedcv.classification.train"),
        (["benchmarks.flair.train", "--run_dir=here"], "leave --run_dir out: the runs lie in a"),
        (["benchmarks.nothing", "--a=b"], "No module named benchmarks.nothing"),
    ],
)
def test_what_is_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check_command, words) == 2
    assert message in error_line(capsys)
