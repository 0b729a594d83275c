"""Momentum and weight decay of local SGD: by hand, in the engine, and where its shortcuts would go wrong."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.engine.training import LocalTraining, PerVariableClippedSGD
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.privacy.central import TALLY
from pfl_ext.privacy.mechanisms import Clipping
from pfl_ext.tasks.multi_label import MultiLabel
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.engine.setting import NoisyStore, Setting, distance, private, rounding_of, small_backbone
from tests.pfl_ext.samplings import local_sampling


def test_clipped_sgd_decays_after_clipping() -> None:
    x = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = PerVariableClippedSGD([x], lr=0.1, max_norm=1.0, momentum=0.5, weight_decay=0.2)
    x.grad = torch.tensor([6.0, 8.0])  # clipped to 0.6, 0.8
    optimizer.step()
    v = torch.tensor([0.6 + 0.2 * 3, 0.8 + 0.2 * 4])
    after = torch.tensor([3.0, 4.0]) - 0.1 * v
    assert_close_as_vector(x, after, 12)  # a norm, and five operations on each side
    x.grad = torch.tensor([0.3, 0.0])
    optimizer.step()
    v = 0.5 * v + torch.tensor([0.3, 0.0]) + 0.2 * after
    assert_close_as_vector(x, after - 0.1 * v, 24)


@pytest.mark.parametrize("clipping", ["none", "variable", "global"])
def test_users_of_one_step_share_a_pass_with_decay_and_momentum(clipping: str) -> None:
    setting = Setting([1, 2, 1, 2, 9], clipping=clipping, max_norm=0.1, momentum=0.9, weight_decay=0.3)
    assert distance(setting.run(True, lanes=2)[0], setting.run(False)[0]) <= rounding_of(setting)
    plain = Setting([1, 2, 1, 2, 9], clipping=clipping, max_norm=0.1, momentum=0.9)
    assert distance(plain.run(True)[0], setting.run(True)[0]) > 0.01


def test_a_users_momentum_is_not_the_next_ones() -> None:
    """Two rounds of several users in one lane: a velocity left over would show."""
    setting = Setting([9, 11, 13], momentum=0.9, rounds=2)
    assert distance(setting.run(True, lanes=1)[0], setting.run(False)[0]) <= rounding_of(setting)


def test_dead_taps_decay_too() -> None:
    """They have no gradient, but weight decay: the engine must not leave them out then."""
    module = ImageClassifier(small_backbone(), task=MultiLabel(), input_size=10, exact_crops=True)
    engine = CohortEngine(module, lanes=1)
    trimmed = {n.removesuffix(".weight") for n in engine._trimmed._sides}
    assert trimmed, "a network with dead taps is tried"
    data = FederatedImageDataset(NoisyStore([9]), local_sampling(input_size=10, batch_size=4), seed=0)
    for local, whole in ((local_of(0.0), False), (local_of(0.1), True), (local_of(0.0), True)):
        done = engine.train(data, engine.tasks(data.members(1), local), local, lambda _: 1.0, None)
        assert (engine._model is module) == whole
        for name in trimmed:
            update = done.update[f"{name}.weight"]
            assert bool((update == 0).any()) == (not local.weight_decay)
    assert all(p.data_ptr() == q.data_ptr() for p, q in zip(module.parameters(), engine._model.parameters()))


def local_of(weight_decay: float) -> LocalTraining:
    return LocalTraining(0.1, 2, 4, "none", 0.0, 0.0, None, weight_decay=weight_decay)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_private_users_with_decay_are_clipped_as_by_pfls_loop(clipping: Clipping) -> None:
    """An update with decay in it has another norm than the gradient's: such users go one by one."""

    def setting() -> Setting:
        more = [private(5, clipping=clipping, noisy=False)]
        return Setting([1, 2, 1, 2, 9], more=more, by_images=False, momentum=0.5, weight_decay=0.2)

    theirs, ours = setting().run(False)[0], setting().run(True, lanes=2)[0]
    assert TALLY not in ours
    assert distance(ours, theirs) <= rounding_of(setting())
