"""A file of weights as torchvision publishes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torchvision
from torch import Tensor, nn


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    """A state_dict as torchvision publishes it, BatchNorm and 1,000 classes, with telling statistics."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        network = torchvision.models.resnet18()
    generator = torch.Generator().manual_seed(7)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(0, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
    state = network.state_dict()
    assert isinstance(state, dict)
    return state


@pytest.fixture
def weights_file(published: dict[str, Tensor], tmp_path: Path) -> Path:
    path = tmp_path / "resnet18.pth"
    torch.save(published, path)
    return path
