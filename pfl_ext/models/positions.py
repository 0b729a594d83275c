"""Position embeddings of vision transformers, interpolated for images of another size.

A vision transformer has an embedding of each patch's place in a grid. With images of another size the grid
has other sides, and weights do not fit. Dosovitskiy et al. 2021 (arXiv 2010.11929, Section 3.2) interpolate
the embeddings over the grid, and so does torchvision's function, bicubically, from corner to corner.

Shape letters: G patches on a side of the grid, D numbers of an embedding.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

_PLACE = "encoder.pos_embedding"
"""Where torchvision's vision transformer has its position embedding ``[1, 1 + G * G, D]``."""
_RESIZED = "resized_positions"
"""Attribute of a vision transformer whose position embedding is interpolated from that of its weights."""


@dataclass(frozen=True)
class Resized:
    """How a position embedding was interpolated."""

    before: int
    """G of the weights."""
    now: int
    """G of the network."""
    patch: int
    """Side of a patch in pixels."""

    def __str__(self) -> str:
        before, now = (f"{g} x {g} patches (images of {g * self.patch} pixels)" for g in self._sides)
        return f"the position embedding of the weights is for {before}: interpolated to {now}"

    @property
    def _sides(self) -> tuple[int, int]:
        return self.before, self.now

    @property
    def facts(self) -> dict[str, dict[str, int]]:
        """For the record of a run: patches on a side, and the side of an image in pixels."""
        each = zip(("from", "to"), self._sides)
        return {key: {"patches": g, "input_size": g * self.patch} for key, g in each}


def resize_positions(network: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with the position embeddings of vision transformers as large as the network's.

    The class token's embedding stays. What cannot be interpolated is returned as it is: an embedding with
    another D, of a grid that is not square, or from or to a single patch.

    Args:
        network: its vision transformers are torchvision's; `resized_in` says of them what was done.
        tensors: weights by their names in ``network``.
    """
    fitting = dict(tensors)
    for name, layer in network.named_modules():
        if not isinstance(layer, VisionTransformer):
            continue
        place = f"{name}.{_PLACE}" if name else _PLACE
        found, wanted = tensors.get(place), layer.encoder.pos_embedding
        resized = None if found is None else _resized(found, wanted, layer)
        if found is None or resized is None:
            continue
        sides = resized.now * resized.patch, resized.patch
        fitting[place] = interpolate_embeddings(*sides, OrderedDict({_PLACE: found.float()}))[_PLACE]
        vars(layer)[_RESIZED] = resized
    return fitting


def resized_in(network: nn.Module) -> Resized | None:
    """How the position embedding of a network was interpolated; None where it was not.

    Networks of parties have the same grid, and so the same answer.
    """
    found = (vars(layer).get(_RESIZED) for layer in network.modules())
    return next((resized for resized in found if isinstance(resized, Resized)), None)


def _resized(found: Tensor, wanted: Tensor, layer: VisionTransformer) -> Resized | None:
    """What is to be done to an embedding; None where nothing is, or where it cannot be interpolated."""
    if not found.dtype.is_floating_point or found.ndim != 3 or found.shape == wanted.shape:
        return None
    before, now = math.isqrt(max(found.shape[1] - 1, 0)), layer.image_size // layer.patch_size
    is_grid = found.shape == (1, 1 + before * before, wanted.shape[2])
    return Resized(before, now, layer.patch_size) if is_grid and min(before, now) > 1 else None
