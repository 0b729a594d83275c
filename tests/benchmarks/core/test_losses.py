"""Tasks of one's own whose images change each other's training, or whose loss the engine does not compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.core.losses import check_losses
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.task import Task
from tests.benchmarks.conftest import Refused, Train
from tests.benchmarks.core.test_private import PRIVATE
from tests.pfl_ext.engine.setting import SIDE, TASKS, NoisyStore, small_backbone
from tests.pfl_ext.samplings import local_sampling

STOCK = "--runtime.engine=stock"


def contrasted(task: Task, outputs: Tensor, targets: Tensor) -> Any:
    losses = real("image_losses")(task, outputs, targets)
    return losses - 0.5 * losses.mean()


def mixed_pairs(task: Task, images: Tensor, targets: Tensor, crops: Tensor | None, framing: Any) -> Any:
    """Mixup of a training batch, by hand."""
    x, targets = real("augment")(task, images, targets, crops, framing)
    return (x if crops is None else 0.7 * x + 0.3 * x.flip(0)), targets


def permuted(task: Task, images: Tensor, targets: Tensor, crops: Tensor | None, framing: Any) -> Any:
    """Mixup as it is often written, with pairs from numpy's own generator."""
    x, targets = real("augment")(task, images, targets, crops, framing)
    return 0.7 * x + 0.3 * x[np.random.permutation(len(x))], targets  # noqa: NPY002


def noisy_in_numpy(task: Task, outputs: Tensor, targets: Tensor) -> Any:
    return real("image_losses")(task, outputs + 1e-6 * np.random.random(), targets)  # noqa: NPY002


def smoothed(task: Task, outputs: Tensor, targets: Tensor) -> Any:
    return real("loss")(task, outputs, targets) + 0.1 * outputs.square().mean()


def noisy(task: Task, outputs: Tensor, targets: Tensor) -> Any:
    return real("image_losses")(task, outputs + 1e-6 * torch.randn(outputs.shape), targets)


OWN: dict[str, tuple[str, Callable[..., Any]]] = {
    "MultiLabel.image_losses gives an image another loss": ("image_losses", contrasted),
    "MultiLabel.augment gives an image other pixels or targets": ("augment", mixed_pairs),
    "MultiLabel.augment gives an image other pixels": ("augment", permuted),
    "MultiLabel draws random numbers from a": ("image_losses", noisy_in_numpy),
    "MultiLabel.loss is not the sum of image_losses": ("loss", smoothed),
    "MultiLabel draws random numbers": ("image_losses", noisy),
}
METHODS: dict[str, Callable[..., Any]] = {name: getattr(MultiLabel, name) for name, _ in OWN.values()}


def real(name: str) -> Callable[..., Any]:
    return METHODS[name]


@pytest.mark.parametrize("task", TASKS)
def test_the_shipped_tasks_train_each_image_by_itself(task: Task) -> None:
    module = ImageClassifier(small_backbone(), task=task, input_size=SIDE)
    check_losses(module, NoisyStore([1, 1], task), local_sampling(input_size=SIDE), private=True, engine=True)


@pytest.mark.parametrize("message", OWN)
@pytest.mark.parametrize("setting", ["--config=pfl-r-17", "--config=fl-r-17"])
def test_what_the_engine_would_train_otherwise_is_refused(
    setting: str, message: str, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiLabel, *OWN[message])
    refused(message, setting)


@pytest.mark.parametrize("message", [message for message in OWN if "draws" not in message])
def test_pfls_own_loop_trains_users_one_by_one(
    message: str, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiLabel, *OWN[message])
    train(STOCK, "--federated.num_rounds=1", name="stock")


def test_a_loss_of_ones_own_is_private_without_the_engine(
    train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MultiLabel, "loss", smoothed)
    train(*PRIVATE, STOCK, "--federated.num_rounds=1", name="private")
