"""Learning rates over the rounds and epochs, in whole runs."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
from pfl.model.pytorch import PyTorchModel

from benchmarks.flair.config import FLAIR
from pfl_ext.algorithms.fednova import Normaliser
from pfl_ext.algorithms.scaffold import Renewal
from tests.benchmarks.conftest import Train, killed_and_resumed
from tests.benchmarks.run_files import error_line, lines

POLY = ("--local.schedule=poly", "--local.schedule_power=0.9")
COSINE = ("--server.schedule=cosine", "--server.final_learning_rate=0.02", "--server.optimizer=sgd")
CYCLES = (
    "--local.schedule=cyclic", "--local.schedule_cycle=2", "--local.final_learning_rate=0.01",
    "--evaluation.average=swa", "--evaluation.average_every=2", "--evaluation.best_by=last",
)  # fmt: skip
CENTRAL = ("--config=c-r-17", "--centralised.schedule=exponential", "--centralised.schedule_factor=0.5")
WARM = ("--config=c-r-17", "--centralised.warmup_epochs=1")
BY_ROUND = [0.1 * left**0.9 for left in (1, 2 / 3, 1 / 3)]


@pytest.mark.parametrize("engine", ["fast", "stock"])
def test_each_round_trains_its_users_and_steps_at_its_own_rate(engine: str, train: Train) -> None:
    seen: list[float] = []
    real = PyTorchModel.new_local_optimizer

    def watched(self: Any, learning_rate: float) -> Any:
        seen.append(learning_rate)
        return real(self, learning_rate)

    with mock.patch.object(PyTorchModel, "new_local_optimizer", watched):
        directory = train(*POLY, *COSINE, f"--runtime.engine={engine}")
    assert sorted(set(seen), reverse=True) == pytest.approx(BY_ROUND)
    assert seen == sorted(seen, reverse=True)
    server = [line["learning_rate"] for line in lines(directory) if "learning_rate" in line]
    assert server == pytest.approx([0.02 + 0.08 * (1 + math.cos(math.pi * r / 3)) / 2 for r in range(3)])


@pytest.mark.parametrize(
    "words",
    [(*POLY, *COSINE), (*POLY, "--federated.algorithm=scaffold"), CENTRAL, CYCLES],
    ids=lambda w: w[-1],
)
def test_a_killed_run_goes_on_to_the_bit(words: tuple[str, ...], train: Train) -> None:
    killed_and_resumed(train, 1, *words)


WHOLE = ("--centralised.optimizer=sgd", "--centralised.head_rate_factor=4", "--centralised.batch_size=999")


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """The learning rates of body and head in each step of SGD."""
    seen, real = list[list[float]](), torch.optim.SGD.step

    def watched(self: Any, *words: Any) -> Any:
        seen.append([group["lr"] for group in self.param_groups])
        return real(self, *words)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    return seen


def test_epochs_have_their_own_rates_and_so_has_the_head(train: Train, rates: list[list[float]]) -> None:
    train(*CENTRAL, *WHOLE, "--centralised.learning_rate=0.2")
    assert rates == [[0.2, 0.8], [0.1, 0.4]]


def test_a_warm_up_is_timms(train: Train, rates: list[list[float]]) -> None:
    """The rates of timm's StepLRScheduler(warmup_t=2, warmup_lr_init=0.01, decay_t=1, decay_rate=0.5)."""
    words = ("--centralised.learning_rate=0.2", "--centralised.warmup_learning_rate=0.01")
    epochs = ("--centralised.num_epochs=4", "--centralised.warmup_epochs=2")
    train(*CENTRAL, *WHOLE, *words, *epochs)
    of_epochs = [0.01, 0.01 + (0.2 - 0.01) / 2, 0.2 * 0.5**2, 0.2 * 0.5**3]
    assert [rate for rate, _ in rates] == pytest.approx(of_epochs)
    assert [head for _, head in rates] == pytest.approx([4 * rate for rate in of_epochs])


def test_scaffold_and_fednova_reckon_with_the_rate_of_the_round(train: Train) -> None:
    """SCAFFOLD divides by it, and the pull of FedNova's proximal term is in proportion to it."""
    rates: dict[str, set[float]] = {"scaffold": set(), "fednova": set()}

    def noting(kind: type, name: str, value: Any) -> Any:
        real: Any = vars(kind)["__init__"]

        def init(self: Any, *words: Any, **more: Any) -> None:
            real(self, *words, **more)
            rates[name].add(round(value(self), 9))

        return mock.patch.object(kind, "__init__", init)

    with noting(Renewal, "scaffold", lambda it: it.learning_rate):
        train(*POLY, "--federated.algorithm=scaffold", name="scaffold")
    with noting(Normaliser, "fednova", lambda it: it.rate_times_mu / 0.5):
        train(*POLY, "--federated.algorithm=fednova", "--federated.mu=0.5", name="fednova")
    assert rates == {name: {round(rate, 9) for rate in BY_ROUND} for name in rates}


def test_an_effective_rate_is_what_the_schedule_begins_with() -> None:
    words = ["--local.effective_learning_rate=0.5", "--server.optimizer=sgd", "--server.momentum=0.9"]
    config = FLAIR.parse([*words, "--federated.num_rounds=3", *POLY]).config
    assert [config.local_rate(r) for r in range(3)] == pytest.approx([rate / 2 for rate in BY_ROUND])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--local.schedule_power=2"], "where local.schedule is constant: remove it, or choose poly"),
        (["--local.schedule=poly", "--local.schedule_factor=0.9"], "or choose exponential"),
        (["--local.final_learning_rate=0.1"], "choose poly or cosine or cyclic"),
        (["--local.schedule=poly", "--local.schedule_cycle=4"], "or choose cyclic"),
        (["--server.schedule=cyclic"], "server.schedule_cycle is none: give the rounds of a cycle, at least"),
        (["--evaluation.average_every=2"], "average is none: remove it, or set evaluation.average to ema or"),
        (["--server.schedule=cosine", "--server.warmup_rounds=3"], "or choose warmup_linear"),
        (["--server.schedule=exponential"], "server.schedule_factor is none"),
        (["--local.learning_rate=1e300"], "more than float32 holds: lower local.learning_rate"),
        (["--server.learning_rate=1e300"], "more than float32 holds: lower server.learning_rate"),
        (["--local.head_rate_factor=1e300"], "local.head_rate_factor is 1e.300, by which .* beyond float32"),
        (["--server.head_rate_factor=1e-300"], "server.head_rate_factor is 1e-300, by which .* float32"),
        (["--local.schedule=exponential"], "local.schedule_factor is none"),
        (["--local.schedule=poly", "--local.schedule_power=1e300"], "last of 5,000 learning rates is 0"),
        (["--config=c-r-17", "--centralised.schedule=exponential"], "centralised.schedule_factor is none"),
        (["--config=c-r-17", "--centralised.warmup_epochs=1000"], "must be below centralised.num_epochs"),
        (
            ["--config=c-r-17", "--centralised.warmup_epochs=1"],
            "warmup_learning_rate is 0, .* must be above 0",
        ),
        ([*WARM, "--centralised.warmup_learning_rate=1"], "warmup_learning_rate is 1, .* must be above 0"),
        ([*WARM, "--centralised.warmup_learning_rate=1e-45"], "warmup_learning_rate is 1e-45, .* above 0"),
        (["--config=c-r-17", "--centralised.warmup_learning_rate=0.1"], "centralised.warmup_epochs is 0"),
        (["--centralised.warmup_epochs=1"], "has no effect where mode is federated"),
        (["--config=c-r-17", "--local.schedule=poly"], "has no effect where mode is centralised"),
        (
            ["--federated.algorithm=fedncm", "--evaluation.best_by=last", "--local.schedule=poly"],
            "where federated.algorithm is fedncm",
        ),
    ],
)
def test_what_has_no_effect_or_no_meaning_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        FLAIR.parse(words)
    assert "\n" not in str(caught.value)


def test_a_command_says_so_in_one_line(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    train("--augment.label_smoothing=0.1", code=2)
    line = error_line(capsys)
    assert "there are no classes that exclude each other" in line
    assert "set augment.label_smoothing, which is 0.1, to 0" in line
