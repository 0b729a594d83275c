"""A researcher's own loss of users, as docs/extending.md shows it: the files of `tests.dropped`."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.predict import trained
from pfl_ext.algorithms.algorithm import ALGORITHMS, RunContext
from pfl_ext.algorithms.clients import Clients
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.conftest import classes_file as classes_file
from tests.benchmarks.conftest import mini_file as mini_file
from tests.benchmarks.conftest import refused as refused
from tests.benchmarks.conftest import train as train
from tests.benchmarks.conftest import vision as vision
from tests.benchmarks.run_files import lines
from tests.test_extending import dropped as dropped


def test_a_new_loss_of_users_trains_and_goes_on(
    dropped: None, vision: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without its term it is FedAvg; with it the outputs have more entropy."""
    argv = ("--federated.algorithm=confident", "--model.arch=lenet", "--local.num_epochs=3")
    beta = "--federated.options.beta"
    whole, _ = killed_and_resumed(vision, 1, *argv, f"{beta}=2")
    said = "engine: pfl's own loop trains the users, because of the algorithm's own local steps\n"
    assert said in capsys.readouterr().err
    none, plain = vision(*argv, f"{beta}=0", name="none"), vision(*argv[1:], name="plain")
    for ours, theirs in zip(lines(none), lines(plain), strict=True):
        assert ours["tracked"]["loss"] == pytest.approx(theirs["tracked"]["loss"], rel=1e-4)
        assert ours.get("train_loss") == pytest.approx(theirs.get("train_loss"), rel=1e-4)
    assert lines(whole)[0]["train_loss"] < lines(none)[0]["train_loss"] - 1, (
        "2 times the entropy is taken off"
    )
    pixels = torch.randint(0, 256, (64, 20, 20, 3), generator=torch.Generator().manual_seed(0)).to(
        torch.uint8
    )
    entropy = []
    for directory in (none, whole):
        with torch.no_grad():
            logs = trained(directory).network(pixels).log_softmax(1)
        entropy.append(float(-(logs.exp() * logs).sum(1).mean()))
    assert entropy[1] > entropy[0]


def test_a_loss_of_each_users_own_trains_and_goes_on(dropped: None, vision: Train) -> None:
    """With tau 0 it is FedAvg. A user of one class has a loss of nearly 0, so it sends hardly an update."""
    argv = ("--federated.algorithm=fedlc", "--model.arch=lenet")
    tau = "--federated.options.tau"
    whole, _ = killed_and_resumed(vision, 1, *argv)
    none, plain = vision(*argv, f"{tau}=0", name="none"), vision(*argv[1:], name="plain")
    for ours, theirs in zip(lines(none), lines(plain), strict=True):
        assert ours["tracked"]["loss"] == pytest.approx(theirs["tracked"]["loss"], rel=1e-4)
        assert ours.get("train_loss") == pytest.approx(theirs.get("train_loss"), rel=1e-4)
    assert lines(whole)[0]["train_loss"] < lines(plain)[0]["train_loss"]


def test_a_users_margins_follow_from_its_own_images(dropped: None) -> None:
    kind: Any = import_module("pfl_ext.algorithms.fedlc").Calibrated
    steps = kind.__new__(kind)
    steps.tau = 2.0
    steps.begin(SimpleNamespace(targets=torch.tensor([[0, 1.0, 0], [0, 0.5, 0], [3.0, 0, 0]])))
    torch.testing.assert_close(steps.margin, 2 * torch.tensor([1.0, 2.0, 1e-8]) ** -0.25)


@pytest.mark.parametrize(
    "section, argv",
    [
        ("compression", "--compression.kind=top_k"),
        ("attack", "--attack.kind=boost"),
        ("aggregation", "--aggregation.kind=median"),
    ],
)
def test_what_an_algorithm_says_it_takes_and_leaves_out_is_refused(
    section: str, argv: str, dropped: None, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALGORITHMS["confident"], "takes", (section,))
    said = f"federated.algorithm takes {section}, but does not apply it: give Clients the "
    refused(said, "--federated.algorithm=confident", argv, "--model.arch=lenet")


@pytest.mark.parametrize(
    "argv", ["--compression.kind=random_k", "--attack.kind=boost", "--aggregation.kind=median"]
)
@pytest.mark.parametrize(
    "calls, said", [((), "does not begin its rounds of"), (("begin",), "before it ends the last one")]
)
def test_stages_that_an_algorithm_does_not_begin_and_end_are_refused(
    calls: tuple[str, ...],
    said: str,
    argv: str,
    dropped: None,
    train: Train,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They would have another round's draws: an attacker's update would be multiplied by 0 users."""
    kind: Any = ALGORITHMS["confident"]
    of_round = kind.round

    def begin(algorithm: Any, context: RunContext) -> None:
        ServerModelAlgorithm.__init__(algorithm, context)
        algorithm.stages = context.stages(list(context.model.variable_map))
        algorithm.clients = Clients(context, loss=algorithm.loss, before=algorithm.stages)

    def round_(algorithm: Any, state: Any, number: int) -> Any:
        for stage in algorithm.stages if calls else ():
            stage.begin(number, algorithm.clients.cohort(number))
        return of_round(algorithm, state, number)

    monkeypatch.setattr(kind, "takes", ("compression", "attack", "aggregation"))
    monkeypatch.setattr(kind, "__init__", begin)
    monkeypatch.setattr(kind, "round", round_)
    train("--federated.algorithm=confident", argv, "--model.arch=lenet", code=2)
    assert said in capsys.readouterr().err
