"""LEAF's network for FEMNIST (Caldas et al. 2018, arXiv 1812.01097), for colour images."""

from __future__ import annotations

from torch import nn

from pfl_ext.models.small import NETWORKS


@NETWORKS.register("leaf_cnn")
def leaf_cnn(num_labels: int, input_size: int) -> nn.Sequential:
    """Two 5 x 5 convolutions of 32 and 64 channels, each before a 2 x 2 max-pooling, then 2048 units."""
    side = input_size // 2 // 2
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * side * side, 2048), nn.ReLU(), nn.Linear(2048, num_labels)),
    )
