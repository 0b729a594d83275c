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


def two_images(side: int) -> Tensor:
    """Two different images, uint8 ``[2, S, S, 3]``."""
    return (torch.arange(2 * side**2 * 3).view(2, side, side, 3) * 37 % 256).to(torch.uint8)


def agree(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether these outputs of a network are the same up to rounding, relative to the largest of them."""
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))
