"""Networks that torch 2.15 does not train rightly in bfloat16 on a CPU.

Where taps of a convolution meet nothing but padding, torch may leave uninitialised memory in their bfloat16
gradient. On an AMD EPYC with AVX512-BF16, of kernels 3, 5 and 7, strides 1 and 2, dilations 1, 2 and 6 and
maps of up to 4 x 4 pixels, these were wrong: with a stride of 2, maps of one pixel; with a stride of 1 and
256 channels, kernel 5 on maps 1 pixel high, and kernel 7 on maps at most 2 pixels high. Dilated and depthwise
convolutions were right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.probing import before_each


@torch.no_grad()
def found_in(model: ImageClassifier) -> str | None:
    """The name of a convolution that bfloat16 would not train rightly, by a pass of zeros; None: there is
    none. Layers that the network itself keeps from bfloat16 do not count."""
    found: list[str] = []

    def look(name: str, layer: Any, inputs: tuple[Any, ...]) -> None:
        if torch.is_autocast_enabled("cpu") and _is_tiny(layer, inputs[0].shape[2:]):
            found.append(name)

    plain = [
        (name, layer)
        for name, layer in model.backbone.named_modules()
        if isinstance(layer, nn.Conv2d) and layer.groups == 1 and layer.dilation == (1, 1)
    ]
    with before_each(plain, look), torch.autocast("cpu", torch.bfloat16):
        model.backbone(torch.zeros(1, *model.input_shape, device=model.mean.device))
    return found[0] if found else None


def _is_tiny(layer: nn.Conv2d, sides: Sequence[int]) -> bool:
    if layer.stride == (1, 1):
        return any(side < kernel // 2 for side, kernel in zip(sides, layer.kernel_size))
    return tuple(sides) == (1, 1) and max(layer.kernel_size) > 1
