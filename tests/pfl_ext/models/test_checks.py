"""Networks that do not fit the data, or the values that were given for them, are refused when they are built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from pfl_ext.models.classifier import build_backbone
from pfl_ext.models.config import ModelConfig
from pfl_ext.models.small import NETWORKS


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is forgotten after it."""
    NETWORKS.names()
    monkeypatch.setattr(NETWORKS, "_things", dict(NETWORKS._things))
    yield


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("more", [-1, 0, 12])
def test_a_network_with_other_outputs_than_classes_is_refused(more: int) -> None:
    @NETWORKS.register("of_other_outputs")
    def of_other_outputs(num_labels: int, input_size: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * input_size**2, num_labels + more))

    def build() -> nn.Module:
        return build_backbone(ModelConfig("of_other_outputs", 8), 5, torch.Generator().manual_seed(0))

    if not more:
        assert build()(torch.zeros(2, 3, 8, 8)).shape == (2, 5)
        return
    with pytest.raises(ValueError) as refused:
        build()
    assert str(refused.value) == (
        f"model.arch is of_other_outputs, which has {5 + more} outputs, but there are 5 classes: give its "
        "last layer as many outputs, or choose another network"
    )


@pytest.mark.usefixtures("registered")
def test_masks_of_other_classes_are_refused() -> None:
    def of_pixels(num_labels: int, input_size: int) -> nn.Module:
        return nn.Conv2d(3, num_labels + 1, 1)

    of_pixels.outputs = "pixels"  # type: ignore[attr-defined]
    NETWORKS.register("of_pixels")(of_pixels)
    with pytest.raises(ValueError, match="which has 6 outputs, but there are 5 classes"):
        build_backbone(ModelConfig("of_pixels", 8), 5, torch.Generator().manual_seed(0))
