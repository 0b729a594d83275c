"""A task whose outputs and targets have a place in the image needs no change outside itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from dataset.arrays import IntArray
from pfl_ext.data.transforms import Framing, gathered
from pfl_ext.evaluation import LOSS, SCORES, CentralEvaluation
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.task import Task
from tests.pfl_ext.engine.setting import NoisyStore, Setting, distance, rounding_of
from tests.pfl_ext.samplings import local_sampling

CLASSES = 3


class Pixels(Task):
    """A class for each pixel: outputs ``[B, C, S, S]``, masks ``[B, H, W]`` and then ``[B, S, S]``."""

    headline = ("pixel accuracy",)

    def augment(
        self, images: Tensor, targets: Tensor, crops: Tensor | None, framing: Framing
    ) -> tuple[Tensor, Tensor]:
        height, width = images.shape[1:3]
        moves = torch.tensor([[0, 0, height, width, 0, 0]]).repeat(len(images), 1) if crops is None else crops
        masks = gathered(targets, moves, framing.input_size, framing.padding)
        return self.pixels(images, crops, framing), masks

    def image_losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.float(), targets.long(), reduction="none").mean((1, 2))

    def scored(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        right = (outputs.argmax(1) == targets).double().mean((1, 2))
        return self.image_losses(outputs, targets).double(), right

    def statistics(
        self, num_rows: int, rows: IntArray, predictions: Sequence[Tensor], annotations: Sequence[Any]
    ) -> Weighted:
        return Weighted(sum(float(part.sum()) for part in predictions), len(rows))

    def summarise(self, statistics: Weighted) -> dict[str, float]:
        return {"pixel accuracy": 100 * statistics.overall_value}


class Masks(NoisyStore):
    """Each pixel's class is the third that its red value lies in."""

    def read(self, rows: Any) -> tuple[Any, Any]:
        images = super().read(rows)[0]
        return images, images[..., 0] // 86

    def targets(self, rows: Any) -> Any:
        return self.read(rows)[1]


def backbone() -> nn.Module:
    draw = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, CLASSES, 1))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.4, generator=draw)
    return net


@pytest.mark.parametrize("crop", ["crop", "padded"])
def test_the_engine_trains_it_as_pfls_loop_does(crop: Any) -> None:
    sizes = [1, 3, 9, 2]
    sampling = local_sampling(num_epochs=2, batch_size=4, input_size=10, crop=crop)
    setting = Setting(sizes, sampling, task=Pixels(), store=Masks(sizes), backbone=backbone)
    assert distance(setting.run(True)[0], setting.run(False)[0]) <= rounding_of(setting)


@pytest.mark.parametrize("batch_size", [2, 100])
def test_it_is_scored_from_whole_images(batch_size: int) -> None:
    store, module = Masks([3, 2]), ImageClassifier(backbone(), task=Pixels(), input_size=12)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    metrics = CentralEvaluation(store, batch_size=batch_size)(model)
    images, masks = (torch.from_numpy(part) for part in store.read(np.arange(5)))
    outputs = module(images)
    expected = float((outputs.argmax(1) == masks).double().mean())
    assert 0 < expected < 1
    assert module.task.summarise(metrics[SCORES])["pixel accuracy"] == pytest.approx(100 * expected)
    assert metrics[LOSS].overall_value == pytest.approx(
        F.cross_entropy(outputs, masks.long()).item(), rel=1e-5
    )


def test_it_has_no_form_with_importance_weights() -> None:
    with pytest.raises(ValueError, match="Pixels has no form with importance weights: set federated"):
        Pixels().reweighted()
