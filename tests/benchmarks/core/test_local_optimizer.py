"""Adam and AdamW as the optimiser of a user's steps: whole runs, and what refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.benchmarks.conftest import Refused, Train, killed_and_resumed

ONE_STEP = (
    "--federated.num_rounds=1",
    "--federated.cohort_size=1",
    "--server.optimizer=sgd",
    "--server.learning_rate=1",
    "--local.num_epochs=1",
    "--local.batch_size=64",
    "--local.max_grad_norm=none",
)
RATE = 2.0**-10


def after_one_step(train: Train, name: str, *argv: str) -> dict[str, Tensor]:
    rate = f"--local.learning_rate={RATE}"
    found: dict[str, Tensor] = load_file(train(*ONE_STEP, rate, *argv, name=name) / "model.safetensors")
    return found


def test_a_first_step_is_as_long_for_every_weight_that_has_a_gradient(train: Train) -> None:
    """The first step of Adam is the sign of the gradient, and AdamW's decay comes on top of it."""
    plain, twice, decayed = (
        after_one_step(train, name, "--local.optimizer=adamw", "--local.epsilon=1e-30", *words)
        for name, words in {
            "plain": (),
            "twice": (f"--local.learning_rate={2 * RATE}",),
            "decayed": ("--local.weight_decay=8",),
        }.items()
    )
    moved = 0
    for name, weights in plain.items():
        step = (twice[name] - weights).abs()  # 0 where there is no gradient
        rounding = 4 * 2.0**-24 * float(weights.abs().max())
        assert float((step * (step - RATE)).abs().max()) <= RATE * rounding
        moved += int((step > RATE / 2).sum())
        start = (weights - decayed[name]) / (8 * RATE)
        torch.testing.assert_close(start, weights, rtol=0, atol=RATE + rounding / RATE)
    assert moved > 1000


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_killed_run_goes_on_to_the_bit(optimizer: str, train: Train) -> None:
    words = f"--local.optimizer={optimizer}", "--local.weight_decay=0.01", "--local.learning_rate=0.003"
    whole, again = killed_and_resumed(train, 1, *words)
    assert (again / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    assert f"  optimizer: {optimizer}\n" in (whole / "config.yaml").read_text()


SGD_ONLY: list[tuple[list[str], str]] = [
    (["scaffold"], "computes from steps of sgd: set local.optimizer to sgd"),
    (["fednova"], "that steps of sgd give to gradients: set local.optimizer to sgd"),
    (["qffl", "--federated.weighting=users"], "to sgd, or set federated.options.lipschitz"),
    (
        ["split", "--federated.options.variant=relay", "--federated.options.momentum=handover"],
        "or federated.options.momentum to restart",
    ),
]


@pytest.mark.parametrize("words, message", SGD_ONLY, ids=lambda value: value[0])
def test_an_algorithm_whose_equations_are_those_of_sgd_refuses_others(
    words: list[str], message: str, vision: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    vision(f"--federated.algorithm={words[0]}", *words[1:], "--local.optimizer=adam", code=2)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--local.optimizer=adam", "--local.momentum=0.9"], "local.momentum has no effect where"),
        (["--local.beta1=0.8"], "local.beta1 has no effect where local.optimizer is sgd"),
        (["--local.optimizer=lamb"], "local.optimizer is 'lamb'"),
        (["--local.optimizer=adam", "--local.epsilon=0"], "local.epsilon"),
    ],
    ids=str,
)
def test_what_has_no_effect_is_refused(words: list[Any], message: str, refused: Refused) -> None:
    refused(message, *words)
