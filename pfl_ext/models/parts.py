"""Cuts a network into parts that run separately.

A part has only the parameters of its own modules, so parts can be on different machines. The input of the
next part's first module is what must be sent. Parts share parameters and modules with the network, which
remains usable as a whole.

Shape letters: B images of a batch, K labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.prefix import Reached, substituted
from pfl_ext.models.probing import agree, before_each
from pfl_ext.models.trained import blocks_of, new_part


class _Stop(nn.Module):
    """Replaces the first module of the next part, and ends the run there."""

    def forward(self, x: Tensor) -> Tensor:
        """Raise the next part's input."""
        raise Reached(x)


class Part:
    """Some successive modules of a network.

    Attributes:
        parameters: its own parameters, by their names in the whole network.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self.parameters = dict(network.named_parameters())

    def __call__(self, x: Tensor) -> Tensor:
        """The next part's input; for the last part, the outputs ``[B, K]``."""
        try:
            return cast(Tensor, self._network(x))
        except Reached as end:
            return cast(Tensor, end.args[0])


def parts_of(module: ImageClassifier, cut: int, keep_head: bool = False) -> list[Part]:
    """The part up to a block and the part after it.

    Args:
        module: a classifier.
        cut: number of blocks (`pfl_ext.models.trained.blocks_of`) of the first part, at least 1.
        keep_head: whether the last layer (with a bottleneck before it, if there is one) is a third part.

    Raises:
        ValueError: one clause, when there are fewer blocks, or the parts do not compute what the network
            does.
    """
    backbone = module.backbone
    head = new_part(backbone)
    blocks = blocks_of(backbone, head)
    if cut > len(blocks) - keep_head:
        raise ValueError(
            f"it has {len(blocks)} blocks before its last layer, of which {len(blocks) - keep_head} "
            "at most can stay with the client"
        )
    starts = [*[block[0] for block in blocks], head]
    begins = [starts[cut], *([head] if keep_head else [])]
    memory = module.memory_format
    images = torch.randn(2, *module.input_shape, generator=torch.Generator().manual_seed(0))
    images = images.to(module.mean.device).contiguous(memory_format=memory)
    with torch.no_grad():
        entered, expected = _run_in_order(backbone, images)
        if not set(begins) <= set(entered):
            raise ValueError("its blocks are not all run as modules")
        parts = [_part(backbone, entered, *ends) for ends in pairwise((None, *begins, None))]
        names = [name for part in parts for name in part.parameters]
        try:
            found = images
            for part in parts:
                found = part(found)
        except Exception as fault:  # whatever the network's own code says of such an input
            raise ValueError("its parts cannot be run by themselves") from fault
    whole = sorted(name for name, _ in backbone.named_parameters())
    if sorted(names) != whole or found.shape != expected.shape or not agree(found, expected, 1e-4):
        raise ValueError("its parts one after another are not the network")
    return parts


def _run_in_order(backbone: nn.Module, images: Tensor) -> tuple[list[str], Tensor]:
    """The names of the modules in the order in which they are first run, and the outputs."""
    entered: dict[str, None] = {}  # in the order of the first runs
    named = [(name, layer) for name, layer in backbone.named_modules() if name]
    with before_each(named, lambda name, *_: entered.setdefault(name)):
        outputs: Tensor = backbone(images)
    return list(entered), outputs


def _part(backbone: nn.Module, entered: Sequence[str], begin: str | None, end: str | None) -> Part:
    """The part from module ``begin`` (None: the first) to just before ``end`` (None: to the last)."""

    def outside(names: Sequence[str], edge: str) -> list[str]:
        return [name for name in names if not edge.startswith(f"{name}.")]

    by: dict[str, Callable[[nn.Module], nn.Module]] = {}
    if begin is not None:
        by |= dict.fromkeys(outside(entered[: entered.index(begin)], begin), lambda _: nn.Identity())
    if end is not None:
        later = outside(entered[entered.index(end) + 1 :], end)
        by |= dict.fromkeys([n for n in later if not n.startswith(f"{end}.")], lambda _: nn.Identity())
        by[end] = lambda _: _Stop()
    return Part(substituted(backbone, by))
