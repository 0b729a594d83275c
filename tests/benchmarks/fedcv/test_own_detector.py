"""A backbone, a loss and an augmentation of one's own for boxes: the example of docs/extending.md."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from pfl_ext.data.transforms import Framing
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.detection import Detection
from tests.benchmarks.fedcv.test_detection import SHORT, SMALL
from tests.benchmarks.fedcv.test_detection import boxes_file as boxes_file
from tests.benchmarks.run_files import lines, results
from tests.benchmarks.sparing import run_into

NAME = "tests.dropped.traffic"


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, whose network is forgotten after the test."""
    NETWORKS.names()
    monkeypatch.setattr(NETWORKS, "_things", dict(NETWORKS._things))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return importlib.import_module(NAME)


def test_it_trains_and_scores(traffic: ModuleType, boxes_file: Path, tmp_path: Path) -> None:
    sides = ("--data.image_size=32", "--model.input_size=32", "--model.groups=32", "--runtime.engine=stock")
    words = (f"--data_path={boxes_file}", *SMALL, *SHORT, *sides, "--federated.cohort_size=1")
    directory = run_into(traffic.main, tmp_path / "run", *words, "--model.arch=fcos_convnext")
    assert results(directory)["test"]["loss"] > 0
    assert lines(directory)[0]["train_loss"] > 0
    assert results(directory)["parameters"] > 27e6


def test_images_are_darkened_by_their_keys_alone(traffic: ModuleType) -> None:
    task, framing = traffic.ByNight(3), Framing(8)
    images = torch.full((4, 8, 8, 3), 255, dtype=torch.uint8)
    boxes = torch.zeros((4, 1, 6))
    whole = torch.tensor([[0, 0, 8, 8, 0, 0]]).float().expand(4, 6)
    keys = torch.arange(8.0).view(4, 2)
    dark = task.augment(images, boxes, torch.cat([whole, keys], 1), framing)[0]
    light = dark.mean((1, 2, 3))
    assert len(set(light.tolist())) == 4
    assert 0.3 <= light.min() < light.max() <= 1
    again = task.augment(images[2:], boxes[2:], torch.cat([whole, keys], 1)[2:], framing)[0]
    assert torch.equal(again, dark[2:]), "whatever the batch is"
    for crops in (None, whole):
        assert torch.equal(task.augment(images, boxes, crops, framing)[0], torch.ones(4, 3, 8, 8))


def test_the_parts_of_the_loss_add_up(traffic: ModuleType) -> None:
    """Of FCOS; with twice the loss of boxes, the difference is that of boxes."""
    random = torch.Generator().manual_seed(0)
    places = torch.tensor([[8.0, 8, 8, 0, 1e8], [24, 8, 8, 0, 1e8]]).expand(3, 2, 5)
    outputs = torch.cat([torch.rand((3, 2, 8), generator=random), places], 2)  # 3 classes
    targets = torch.tensor([[[2.0, 2, 14, 14, 1, 0]], [[18, 2, 30, 14, 2, 0]], [[0, 0, 0, 0, -1, 0]]])
    plain, own = Detection(3), traffic.ByNight(3)
    classes, boxes, centres, count = plain.sums(outputs, targets)
    assert count.tolist() == [1, 1, 1]
    assert boxes[2] == centres[2] == 0
    loss = plain.image_losses(outputs, targets)
    assert torch.equal(loss, (classes + boxes + centres) / count)
    difference = (own.image_losses(outputs, targets) - loss).numpy()
    np.testing.assert_allclose(difference, boxes.numpy(), atol=1e-6)
