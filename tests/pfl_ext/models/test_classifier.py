"""The network with its loss and its scores, as pfl trains it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pfl_ext.models.classifier import (
    ImageClassifier,
    probe_checksum,
)
from pfl_ext.tasks.multi_label import MultiLabel
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.models.test_models import RESNET18, batch, build


def test_loss_is_binary_cross_entropy_meaned_over_images_and_labels() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    images, targets, crops = batch()
    p = torch.sigmoid(model(images, crops).double())
    expected = -(targets * p.log() + (1 - targets.double()) * (1 - p).log()).mean()
    assert model.loss(images, targets, crops).item() == pytest.approx(expected.item(), rel=1e-5)
    assert model.loss(images, targets, crops).requires_grad


def test_metrics_add_up_over_batches_of_any_size() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    images, targets, _ = batch(5)
    whole = model.metrics(images, targets)["loss"]
    parts = model.metrics(images[:2], targets[:2])["loss"] + model.metrics(images[2:], targets[2:])["loss"]
    assert whole.weight == parts.weight == 5
    for same in (parts.overall_value, model.loss(images, targets).item()):
        assert whole.overall_value == pytest.approx(same, rel=RESNET18 * 2.0**-24)


def test_without_crops_the_whole_image_is_seen_and_with_them_a_part() -> None:
    model = ImageClassifier(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 2)),
        task=MultiLabel(),
        input_size=32,
        mean=(0, 0, 0),
    )
    images, targets, crops = batch()
    whole = F.interpolate(images.permute(0, 3, 1, 2) / 255, (32, 32), mode="bilinear", antialias=True)
    std = torch.tensor((0.229, 0.224, 0.225))[:, None, None]
    assert_close_as_vector(model(images), model.backbone(whole / std), 2 * 56 + 8)  # sums of 3,072 terms
    top, left = int(crops[0, 0]), int(crops[0, 1])
    cut = images[0, top : top + 32, left : left + 32].permute(2, 0, 1) / 255
    cut = cut.flip([axis for axis, flag in ((2, crops[0, 4]), (1, crops[0, 5])) if flag])
    assert_close_as_vector(model.prepare(images, targets, crops)[0][0], cut / std, 4)


def test_the_saved_state_holds_the_network_and_nothing_else() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    assert set(model.state_dict()) == {f"backbone.{name}" for name in model.backbone.state_dict()}


def test_channels_last_changes_nothing_but_the_memory() -> None:
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    expected = model(*batch()[::2])
    assert model.prepare(*batch())[0].is_contiguous()
    last = model.to(memory_format=torch.channels_last)
    assert_close_as_vector(last(*batch()[::2]), expected, RESNET18)
    assert last.prepare(*batch())[0].is_contiguous(memory_format=torch.channels_last)


def test_pfl_trains_the_classifier_by_its_own_bridge() -> None:
    from pfl.data.dataset import Dataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.internal.bridge.pytorch.sgd import PyTorchSGDBridge
    from pfl.model.pytorch import PyTorchModel

    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    reference = copy.deepcopy(model)
    wrapped = PyTorchModel(model, torch.optim.SGD, torch.optim.SGD(model.parameters(), lr=1.0))
    parameters = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.1, local_batch_size=4)
    PyTorchSGDBridge.do_sgd(wrapped, Dataset(raw_data=list(batch(4))), parameters)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    torch.autograd.backward(reference.loss(*batch(4)))
    optimizer.step()
    assert_close_as_vector(list(model.parameters()), list(reference.parameters()), RESNET18)
    metrics = wrapped.evaluate(Dataset(raw_data=list(batch(4)[:2])))
    assert "loss" in str(metrics)


def test_the_probe_tells_models_apart_and_repeats_itself() -> None:
    def checksum(seed: int = 0, **changes: Any) -> str:
        return probe_checksum(ImageClassifier(build(seed=seed), task=MultiLabel(), input_size=32, **changes))

    assert checksum() == checksum()
    assert len({checksum(), checksum(seed=1), checksum(mean=(0.5, 0.5, 0.5))}) == 3
    model = ImageClassifier(build(), task=MultiLabel(), input_size=32)
    assert probe_checksum(model) == probe_checksum(model.train()) == checksum()
