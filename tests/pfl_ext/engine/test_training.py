"""Local training as the engine knows it: what it takes over from pfl's, and what it leaves to pfl's loop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import nn

from pfl_ext.backend import training_context
from pfl_ext.engine.training import (
    Adaptive,
    LocalSGDConfig,
    LocalTraining,
    PerVariableClippedAdam,
    PerVariableClippedSGD,
    local_training,
)
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.rules import Rule
from pfl_ext.tasks.multi_label import MultiLabel

SGD = torch.optim.SGD


def asked(optimizer: Any = SGD, scaler: Any = None, mu: float = 0.0, **changes: Any) -> LocalTraining | str:
    module = ImageClassifier(nn.Linear(2, 1), task=MultiLabel(), input_size=8)
    model = PyTorchModel(module, optimizer, SGD(module.parameters(), lr=1.0))
    model._grad_scaler = scaler
    words: dict[str, Any] = {"local_num_epochs": 3, "local_learning_rate": 0.2, "local_batch_size": 4}
    context = training_context(0, 1, NNTrainHyperParams(**(words | changes)))
    assert not context.do_evaluation, "pfl would score each user's model before and after training"
    return local_training(Rule(mu), model, context)


def test_the_steps_of_sgd_are_taken_over_with_their_clipping() -> None:
    assert asked() == LocalTraining(0.2, 3, 4, "none", 0.0, 0.0, None)
    momentum = partial(SGD, momentum=0.5, weight_decay=0.25)
    assert asked(momentum, mu=0.125) == LocalTraining(0.2, 3, 4, "none", 0.0, 0.125, None, 0.5, 0.25)
    assert asked(local_max_grad_norm=0.5) == LocalTraining(0.2, 3, 4, "global", 0.5, 0.0, None)
    by_variable = partial(PerVariableClippedSGD, max_norm=0.5)
    assert asked(by_variable) == LocalTraining(0.2, 3, 4, "variable", 0.5, 0.0, None)


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_steps_of_adam_are_taken_over_with_their_clipping(decoupled: bool) -> None:
    config = LocalSGDConfig(
        optimizer="adamw" if decoupled else "adam", beta1=0.5, beta2=0.75, epsilon=0.25, weight_decay=0.125
    )
    adaptive = Adaptive(0.5, 0.75, 0.25, decoupled)
    expected = LocalTraining(0.2, 3, 4, "none", 0.0, 0.0, None, weight_decay=0.125, adaptive=adaptive)
    assert asked(config.new_optimizer) == expected
    clipped = replace(config, max_grad_norm=0.5, clip_by="variable").new_optimizer
    assert type(clipped([nn.Parameter(torch.zeros(1))], 0.1)) is PerVariableClippedAdam
    assert asked(clipped) == replace(expected, clipping="variable", max_norm=0.5)


@pytest.mark.parametrize(
    "words, reason",
    [
        ({"optimizer": torch.optim.NAdam}, "NAdam"),
        ({"optimizer": partial(torch.optim.Adam, amsgrad=True)}, "AMSGrad"),
        ({"optimizer": partial(SGD, momentum=0.5, nesterov=True)}, "Nesterov"),
        ({"optimizer": partial(SGD, maximize=True)}, "ascent"),
        ({"optimizer": partial(SGD, momentum=0.5, dampening=0.5)}, "dampening"),
        ({"scaler": object()}, "gradient scaling"),
        ({"grad_accumulation_steps": 2}, "accumulation"),
        ({"local_num_steps": 2, "local_num_epochs": None}, "number of local steps"),
        (
            {"optimizer": partial(PerVariableClippedSGD, max_norm=0.5), "local_max_grad_norm": 0.5},
            "two kinds",
        ),
    ],
)
def test_each_other_kind_of_step_is_left_to_pfls_loop(words: dict[str, Any], reason: str) -> None:
    found = asked(**words)
    assert isinstance(found, str)
    assert reason in found


def test_a_bound_is_for_all_gradients_together_or_for_each_never_for_both() -> None:
    weight = nn.Parameter(torch.zeros(1))
    together, each = (LocalSGDConfig(max_grad_norm=0.5, clip_by=by) for by in ("global", "variable"))
    assert (together.global_max_grad_norm, each.global_max_grad_norm) == (0.5, None)
    assert type(together.new_optimizer([weight], 0.1)) is SGD
    optimizer = each.new_optimizer([weight], 0.1)
    assert isinstance(optimizer, PerVariableClippedSGD)
    assert optimizer.max_norm == 0.5
    assert LocalSGDConfig().global_max_grad_norm is None
