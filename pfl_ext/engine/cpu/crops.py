"""Turns stored images into a network's input in one pass, where crops have the input's size.

Shape letters: B images of a batch, H x W their stored size, S the side of the network's input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_ext.data.transforms import normalise
from pfl_ext.engine.cpu.kernels import CpuKernels, empty
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.task import Task


class Crops:
    """Does by `cropped` what `ImageClassifier.prepare` does to a batch's images, with the same bits."""

    def __init__(self, model: ImageClassifier, kernels: CpuKernels) -> None:
        self._kernels, self._framing = kernels, model.framing
        values = torch.arange(256.0).div_(255).expand(1, 3, 1, 256)
        self._table = (values if model.is_plain else normalise(values, model.mean, model.std)).contiguous()

    @staticmethod
    def know(model: ImageClassifier) -> bool:
        """Whether the task's targets are independent of the crops, and pixels are only normalised."""
        kind = type(model.task)
        plain = kind.augment is Task.augment and kind.pixels is Task.pixels
        return plain and not model.changes.of_pixels

    def __call__(self, images: Tensor, crops: Tensor) -> Tensor | None:
        """uint8 ``[B, H, W, 3]`` and ``[B, 6]`` or more -> ``[B, 3, S, S]``; None for other sizes."""
        size, reflect = self._framing.input_size, self._framing.padding == "reflect"
        exact = self._framing.exact or reflect
        if self._framing.exact is None and not reflect:
            exact = bool((crops[:, 2:4] == size).all())
        if not exact or images.dtype != torch.uint8:
            return None
        return cropped(self._kernels, images, crops, self._table, size, reflect)


def cropped(
    kernels: CpuKernels, images: Tensor, crops: Tensor, table: Tensor, size: int, reflect: bool
) -> Tensor:
    """Crops of exactly ``size`` pixels, as `pfl_ext.data.transforms.cropped` makes them.

    uint8 ``[N, H, W, 3]`` and crops ``[N, 6]`` or more -> ``[N, 3, size, size]``. ``table`` ``[3, 256]`` maps
    a pixel's values to those of the output.
    """
    images, crops = images.contiguous(), crops.float().contiguous()
    n, h, w, _ = images.shape
    out = empty((n, 3, size, size), torch.float32)
    kernels.call("crop_images", (images, crops, table, out), n, h, w, size, crops.shape[1], reflect)
    return out
