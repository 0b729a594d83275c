"""Users who train for an algorithm with a loop of its own: known answers with a model small enough."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

from pfl_ext.algorithms.clients import Clients
from pfl_ext.data.federated_dataset import FederatedImageDataset
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.stores import NumberedStore
from tests.pfl_ext.test_backend import WHOLE, Linear, gradient


def clients(store: NumberedStore) -> Clients:
    module = Linear()
    means: Any = SimpleNamespace(
        model=PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        users=FederatedImageDataset(store, WHOLE, seed=1),
        score=lambda model: Metrics(),
        local=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=0.5, local_batch_size=WHOLE.batch_size
        ),
        seed=1,
        postprocessors=[WeightByDatapoints()],
        engine=None,
        accumulate=torch.float32,
        config_hash="",
    )
    return Clients(means)


def test_the_mean_is_of_the_users_that_are_named_and_weighs_them_by_their_images() -> None:
    store = NumberedStore([2, 5, 6])
    ours = clients(store)
    update, line = ours.mean_update(ours.weights(), np.array([0, 2]), 3)
    start = Linear().weight.detach()
    steps = [gradient(start, *store.read(np.arange(*rows))) for rows in ((0, 2), (7, 13))]
    moved = start.double() - 0.5 * (steps[0] / 4 + steps[1] * 3 / 4)
    assert_close_as_vector(start + update["weight"], moved, 50)
    assert (line["users"], line["images"]) == (2, 8)


def test_users_without_images_move_nothing() -> None:
    ours = clients(NumberedStore([0, 0, 6]))
    for users in (np.array([0, 1]), np.empty(0, np.int64)):
        update, line = ours.mean_update(ours.weights(), users, 0)
        assert not update["weight"].any()
        assert line["images"] == 0
