"""A researcher's own loss of users, as docs/extending.md shows it: the files of `tests.dropped`."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from pfl.model.pytorch import PyTorchModel

from benchmarks.predict import trained
from pfl_ext.algorithms.algorithm import ALGORITHMS, RunContext, register
from pfl_ext.algorithms.clients import Clients
from pfl_ext.algorithms.fedprox import FedProx
from pfl_ext.algorithms.own_steps import OwnSteps
from pfl_ext.algorithms.server_model import ServerModelAlgorithm
from tests.benchmarks.conftest import Refused, Train, killed_and_resumed
from tests.benchmarks.conftest import classes_file as classes_file
from tests.benchmarks.conftest import mini_file as mini_file
from tests.benchmarks.conftest import refused as refused
from tests.benchmarks.conftest import train as train
from tests.benchmarks.conftest import vision as vision
from tests.benchmarks.run_files import lines, results, weights
from tests.test_extending import dropped as dropped


def test_a_new_loss_of_users_trains_and_goes_on(dropped: None, vision: Train) -> None:
    """Without its term it is FedAvg; with it the outputs have more entropy."""
    argv = ("--federated.algorithm=confident", "--model.arch=lenet", "--local.num_epochs=3")
    beta = "--federated.options.beta"
    whole, _ = killed_and_resumed(vision, 1, *argv, f"{beta}=2")
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


def test_a_loss_of_ones_own_trains_privately(dropped: None, train: Train) -> None:
    """Without its term it is private FedAvg with the same noise; with it the guarantee is the same."""
    private = ("--federated.weighting=users", "--seed=1", "--privacy.noise_seed=run", "--privacy.delta=0.01")
    clipped = ("--privacy.epsilon=100", "--privacy.mechanism=gaussian", "--privacy.clipping_bound=0.01")
    argv = (*private, *clipped, "--federated.cohort_size=4", "--model.arch=lenet")
    own = ("--federated.algorithm=confident", "--federated.options.beta")
    runs = [train(*argv, name="plain"), *(train(*argv, own[0], f"{own[1]}={b}", name=b) for b in ("0", "2"))]
    plain, none, term = (torch.from_numpy(weights(run)) for run in runs)
    assert float((none - plain).norm()) < 1e-6 * float(plain.norm()) < float((term - plain).norm())
    assert len({lines(run)[-1]["epsilon"] for run in runs}) == 1


def test_a_loop_of_ones_own_takes_such_steps(dropped: None, vision: Train) -> None:
    kind: Any = import_module("pfl_ext.algorithms.confident").Confident

    @register("looped")
    class Looped(ServerModelAlgorithm):
        options: ClassVar[type] = kind.options

        def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
            clients = Clients(self.context, kind(self.context))
            x = clients.weights()
            update, line = clients.mean_update(x, clients.cohort(number), number)
            return state, {**line, "learning_rate": clients.server_step(x, update, number)}

    argv = ("--model.arch=lenet", "--federated.options.beta=2", "--federated.algorithm")
    ours, theirs = (vision(*argv[:2], f"{argv[2]}={name}", name=name) for name in ("looped", "confident"))
    assert [line["train_loss"] for line in lines(ours)[:-1]] == [
        line["train_loss"] for line in lines(theirs)[:-1]
    ]
    np.testing.assert_array_equal(weights(ours), weights(theirs))


def test_findings_do_not_replace_what_a_run_says_itself(
    dropped: None, vision: Train, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"test": "mine", "mine": 1}
    monkeypatch.setattr(ALGORITHMS["slowmo"], "findings", lambda algorithm, state: found)
    run = results(vision("--federated.algorithm=slowmo", "--model.arch=lenet"))
    assert "accuracy" in run["test"]
    assert run["mine"] == 1
    assert "WARNING: results.json has test of its own, so the algorithm's" in capsys.readouterr().err


def test_steps_and_a_rule_at_once_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^Own has a rule beside its own steps"):
        type("Own", (OwnSteps,), {"rule": FedProx.rule})


def test_a_users_margins_follow_from_its_own_images(dropped: None) -> None:
    kind: Any = import_module("pfl_ext.algorithms.fedlc").FedLC
    fedlc = kind.__new__(kind)
    fedlc.setup = SimpleNamespace(options=SimpleNamespace(tau=2.0))
    fedlc.begin_user(SimpleNamespace(targets=torch.tensor([[0, 1.0, 0], [0, 0.5, 0], [3.0, 0, 0]])))
    torch.testing.assert_close(fedlc.margin, 2 * torch.tensor([1.0, 2.0, 1e-8]) ** -0.25)


@pytest.mark.parametrize(
    "section, argv",
    [
        ("compression", "--compression.kind=top_k"),
        ("attack", "--attack.kind=boost"),
        ("aggregation", "--aggregation.kind=median"),
        ("devices", "--devices.drop_out=0.5"),
    ],
)
def test_what_an_algorithm_says_it_takes_and_leaves_out_is_refused(
    section: str, argv: str, dropped: None, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ALGORITHMS["slowmo"], "takes", (section,))
    said = f"federated.algorithm takes {section}, but does not apply it: "
    refused(said, "--federated.algorithm=slowmo", argv, "--model.arch=lenet")


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
) -> None:
    """They would have another round's draws: an attacker's update would be multiplied by 0 users."""

    @register("staged")
    class Staged(ServerModelAlgorithm):
        takes: ClassVar[tuple[str, ...]] = ("compression", "attack", "aggregation")

        def __init__(self, context: RunContext) -> None:
            super().__init__(context)
            self.stages = context.stages(list(context.model.variable_map))
            self.clients = Clients(context, before=self.stages)

        def round(self, state: PyTorchModel, number: int) -> tuple[PyTorchModel, dict[str, Any]]:
            x, cohort = self.clients.weights(), self.clients.cohort(number)
            for stage in self.stages if calls else ():
                stage.begin(number, cohort)
            update, line = self.clients.mean_update(x, cohort, number)
            return state, {**line, "learning_rate": self.clients.server_step(x, update, number)}

    train("--federated.algorithm=staged", argv, "--model.arch=lenet", code=2)
    assert said in capsys.readouterr().err
