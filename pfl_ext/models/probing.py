"""What shows how a network is built: the order in which its layers run, and made-up images to run it on.

Shape letters: S side of the input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


@contextlib.contextmanager
def before_each(
    layers: Iterable[tuple[str, nn.Module]], call: Callable[[str, nn.Module, tuple[Any, ...]], object]
) -> Iterator[None]:
    """In this context ``call`` gets name, layer and inputs whenever one of the layers is about to run."""

    def run(layer: nn.Module, inputs: tuple[Any, ...], name: str) -> None:
        call(name, layer, inputs)

    hooks = [layer.register_forward_pre_hook(partial(run, name=name)) for name, layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def nothing_zero(network: nn.Module) -> Iterator[None]:
    """In this context trained parameters that are all 0 are not: they would hide what is before them.

    The last layer of torchvision's ViT begins with zeros, as does B of LoRA.
    """
    zero = [p for p in network.parameters() if p.requires_grad and not p.any()]
    try:
        for p in zero:
            steps = torch.arange(p.numel(), device=p.device, dtype=torch.float32)
            p.data.copy_((torch.sin(steps * 0.71) * 0.1).view(p.shape))
        yield
    finally:
        for p in zero:
            p.data.zero_()


def two_images(side: int) -> Tensor:
    """Two different images, uint8 ``[2, S, S, 3]``."""
    return (torch.arange(2 * side**2 * 3).view(2, side, side, 3) * 37 % 256).to(torch.uint8)


def agree(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether these outputs of a network are the same up to rounding, relative to the largest of them.

    Of a network that has diverged, outputs that are not finite say nothing: training reports it.
    """
    largest = float(expected.abs().nan_to_num().max())
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
