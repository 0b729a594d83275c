"""Users who train alone, each from weights of its own."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pfl_ext as pfl_ext  # before pfl, see there

# isort: split
import numpy as np
import pytest
import torch
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext
from pfl_ext.algorithms.clients import Clients, Weights
from pfl_ext.algorithms.own_steps import OwnSteps
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.user_images import UserImages
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.workers.distributed import connected, current
from tests.launching import command, run
from tests.pfl_ext.engine.setting import TASKS, NoisyStore, distance, small_backbone
from tests.pfl_ext.samplings import local_sampling

SIZES = [3, 11, 0, 20, 2, 1, 9, 1]
SAMPLING = local_sampling(2, 4, None, straddle=False, input_size=10)


def clients(fast: bool, steps: type[OwnSteps] | None = None) -> Clients:
    """The clients of users with `SIZES` images, with the engine if ``fast``; ``steps``: how they train."""
    module = ImageClassifier(small_backbone(), input_size=10, exact_crops=True, task=TASKS[0])
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    context: Any = SimpleNamespace(
        model=PyTorchModel(module, torch.optim.SGD, optimizer),
        users=FederatedImageDataset(NoisyStore(SIZES), SAMPLING, seed=3),
        local=NNTrainHyperParams(local_num_epochs=2, local_learning_rate=0.2, local_batch_size=4),
        local_rate=None,
        seed=1,
        postprocessors=[WeightByDatapoints()],
        engine=CohortEngine(module, lanes=1) if fast else None,
        check=None,
        accumulate=torch.float32,
        config_hash="",
        kernels=None,
    )
    context.backend, context.local_in = (
        partial(RunContext.backend, context),
        partial(RunContext.local_in, context),
    )
    return Clients(context, None if steps is None else steps(context))


def starts(ours: Clients, number: int) -> list[Weights]:
    """As many different weights."""
    draw, first = torch.Generator().manual_seed(4), ours.weights()
    return [
        {name: w + 0.05 * torch.randn(w.shape, generator=draw) for name, w in first.items()}
        for _ in range(number)
    ]


USERS = np.array([6, 2, 0, 3, 5, 7])  # 2 has no images


@pytest.mark.parametrize("fast", [False, True])
def test_each_update_is_the_mean_update_of_one_user_from_its_weights(fast: bool) -> None:
    ours = clients(fast)
    weights = starts(ours, len(USERS))
    updates, line = ours.each_update(weights, USERS, 3)
    lines = []
    for start, user, update in zip(weights, USERS, updates, strict=True):
        alone, of_user = ours.mean_update(start, np.array([user]), 3)
        lines.append(of_user)
        assert distance(update, alone) <= 1e-6
        assert any(bool(t.any()) for t in update.values()) == bool(SIZES[user])
    images = [of_user["images"] for of_user in lines]
    assert (line["users"], line["images"]) == (len(USERS), sum(images)) == (6, 34)
    loss = np.average([of_user.get("train_loss", 0.0) for of_user in lines], weights=images)
    assert line["train_loss"] == pytest.approx(loss, abs=2e-6)


def test_a_users_loss_is_that_of_the_round_whatever_was_trained_before() -> None:
    """A resumed process has trained nothing yet."""
    ours, resumed = clients(False), clients(False)
    weights = ours.weights()
    ours.each_update([weights], USERS[:1], 3)
    losses = []
    for each in (ours, resumed):
        each.model(weights)
        losses.append([each.loss_of(3, number) for number in (1, 2)])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[0][1], "each round has crops and images of its own"


def test_steps_of_ones_own_begin_with_users_who_have_images() -> None:
    """The others, and the placeholder of a worker without users, have nothing that such code could count."""
    sizes: list[int] = []

    class Noting(OwnSteps):
        def begin_user(self, user: UserImages) -> None:
            sizes.append(len(user.targets))

    ours = clients(False, Noting)
    _, line = ours.mean_update(ours.weights(), USERS, 0)
    assert (sorted(sizes), line["users"]) == ([1, 1, 3, 9, 20], len(USERS))


def test_nobody_has_no_update() -> None:
    assert clients(False).each_update([], np.empty(0, np.int64), 0) == ([], {"users": 0, "images": 0})


def of_all(fast: bool) -> dict[str, Tensor]:
    """What a worker has after two rounds in a row, by name; one user is alone in the second."""
    ours = clients(fast)
    weights = starts(ours, len(USERS))
    first, line = ours.each_update(weights, USERS, 3)
    second, _ = ours.each_update(first[:1], USERS[:1], 4)
    found = {f"{i}/{name}": t for i, update in enumerate([*first, *second]) for name, t in update.items()}
    return found | {"loss": torch.tensor(line["train_loss"]), "images": torch.tensor(line["images"])}


def test_two_workers_both_have_every_update_that_one_has(tmp_path: Path) -> None:
    """Exactly, although they send sums of the model as bf16."""
    run(command("torchrun", 2, "tests.pfl_ext.algorithms.test_clients", str(tmp_path)))
    for fast in (False, True):
        alone = of_all(fast)
        for rank in range(2):
            found = torch.load(tmp_path / f"{fast}-{rank}.pt", weights_only=True)
            assert found.keys() == alone.keys()
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, alone[name], rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with connected("auto", threads=1, timeout=60, compress=True):
        workers = current()
        assert workers is not None
        for with_engine in (False, True):
            torch.save(of_all(with_engine), Path(sys.argv[1]) / f"{with_engine}-{workers.global_rank}.pt")
