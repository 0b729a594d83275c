"""From stored images to a network's input in one pass, where crops have the input's size.

Shape letters: B images of a batch, H x W their stored size, S the side of the network's input.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pfl_ext.data.transforms import normalise
from pfl_ext.engine.cpu.kernels import CpuKernels
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.task import Task


class Crops:
    """What `ImageClassifier.prepare` does to the images of a batch, by `CpuKernels.cropped`, bit by bit."""

    def __init__(self, model: ImageClassifier, kernels: CpuKernels) -> None:
        self._kernels, self._framing = kernels, model.framing
        values = torch.arange(256.0).div_(255).expand(1, 3, 1, 256)
        self._table = (values if model.is_plain else normalise(values, model.mean, model.std)).contiguous()

    @staticmethod
    def know(task: Task) -> bool:
        """Whether the targets of this task do not depend on where the crops are."""
        return type(task).augment is Task.augment and type(task).pixels is Task.pixels

    def __call__(self, images: Tensor, crops: Tensor) -> Tensor | None:
        """uint8 ``[B, H, W, 3]`` and ``[B, 6]`` or more -> ``[B, 3, S, S]``; None: crops are of another size."""
        size, reflect = self._framing.input_size, self._framing.padding == "reflect"
        exact = self._framing.exact or reflect
        if self._framing.exact is None and not reflect:
            exact = bool((crops[:, 2:4] == size).all())
        if not exact or images.dtype != torch.uint8:
            return None
        return self._kernels.cropped(images, crops, self._table, size, reflect)
