"""Standardises channels by statistics of the training images, which are set once before training.

Shape letters: B images of a batch, C channels, H x W the size of a map.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

EPS = 1e-5  # as BatchNorm's


class Standardised(nn.Module):
    """``(x - mean) * scale`` of each channel; the identity until `set` is called.

    It has buffers and no parameters, so training does not change it. The caller who sets it from users'
    images is responsible for their privacy (`pfl_ext.privacy.moments`).
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.num_channels = num_channels
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("scale", torch.ones(num_channels))

    def clear(self) -> None:
        """Reset it to the identity, for example after weights were loaded."""
        self.mean.zero_()
        self.scale.fill_(1)

    def set(self, mean: Tensor, mean_square: Tensor) -> None:
        """Set the moments ``[C]``. A channel whose variance is not above 0 becomes 0."""
        variance = mean_square - mean.square()
        self.mean.copy_(mean)
        self.scale.copy_(torch.where(variance > 0, (variance.clamp(min=0) + EPS).rsqrt(), 0.0))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, H, W]`` -> the same shape."""
        return (x - self.mean.view(-1, 1, 1)) * self.scale.view(-1, 1, 1)


def standardised_in(network: nn.Module) -> Standardised | None:
    """The `Standardised` layer of a network; None if it has none."""
    return next((layer for layer in network.modules() if isinstance(layer, Standardised)), None)
