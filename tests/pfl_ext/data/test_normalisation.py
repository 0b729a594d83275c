"""By what a network's input is scaled: exact numbers, in training as in evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pfl_ext.data import normalisation
from pfl_ext.data.normalisation import FIXED, scale_of
from pfl_ext.data.transforms import IMAGENET_MEAN, IMAGENET_STD, cropped, draw_crops, resize
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.single_label import SingleLabel
from tests.closeness import assert_close_as_vector


class Pixels:
    """Eleven images of noise, whose colours have other distributions."""

    user_ids = ("a", "b")
    user_offsets = np.array([0, 4, 11])

    def __init__(self, flat: bool = False) -> None:
        scale = np.array([255.0, 128, 0 if flat else 30])
        self.images = (np.random.default_rng(0).random((11, 6, 6, 3)) * scale).astype(np.uint8)

    def read(self, rows: Any) -> tuple[Any, Any]:
        return self.images[rows], self.targets(rows)

    def targets(self, rows: Any) -> Any:
        return np.ones((len(rows), 1), np.uint8)


@pytest.mark.parametrize("read", [1, 4, 100])
def test_the_datas_own_are_those_of_all_its_pixels(read: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalisation, "READ", read)
    store = Pixels()
    pixels = store.images.reshape(-1, 3) / 255
    found = scale_of(store)
    np.testing.assert_allclose(found.mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_allclose(found.std, pixels.std(0), rtol=1e-12)


def test_a_colour_that_is_the_same_everywhere_is_only_shifted() -> None:
    found = scale_of(Pixels(flat=True))
    assert (found.mean[2], found.std[2]) == (0.0, 1.0)


def test_the_fixed_ones() -> None:
    assert FIXED["imagenet"] == (IMAGENET_MEAN, IMAGENET_STD)
    assert FIXED["none"] == ((0, 0, 0), (1, 1, 1))
    assert FIXED["half"] == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert "data" not in FIXED


@pytest.mark.parametrize("scale", [*FIXED.values(), scale_of(Pixels())])
def test_training_and_evaluation_scale_the_pixels_alike(scale: normalisation.Scale) -> None:
    module = ImageClassifier(
        nn.Sequential(nn.Flatten(), nn.Linear(108, 2)),
        task=SingleLabel(),
        input_size=6,
        mean=scale.mean,
        std=scale.std,
        padding="reflect",
    )
    module.backbone = nn.Flatten()
    images = torch.from_numpy(Pixels().images)
    crops = torch.from_numpy(draw_crops(np.random.default_rng(1), 11, 6, 6, "padded", "both"))
    for pixels, crop in ((cropped(images, crops, 6, padding="reflect"), crops), (resize(images, 6), None)):
        expected = (pixels - torch.tensor(scale.mean)[:, None, None]) / torch.tensor(scale.std)[:, None, None]
        assert_close_as_vector(module(images, crop).view(11, 3, 6, 6), expected, 4)
        assert_close_as_vector(module.prepare(images, torch.ones(11, 1), crop)[0], expected, 4)
