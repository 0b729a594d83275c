"""A classifier whose last blocks are trained on the outputs (maps) of its frozen blocks.

If an image is the same in every step, so are its maps. The frozen blocks run once a round for all images of a
user (`Prefix.maps`), however many steps and epochs the user makes; a `MapClassifier` then runs the rest.
Unlike the features that a head takes, maps are too large to be kept for all images.

Shape letters: B images of a batch, H x W their stored size, D numbers of a map, K labels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from pfl_ext.models.classifier import ImageClassifier, memory_format
from pfl_ext.models.probing import agree, nothing_zero, two_images

LARGEST_MAP = 4
"""Largest size of a map relative to its image, both in bytes; beyond, maps are not worth their memory."""


class Holding(nn.Module):
    """Holds a module's layers, parameters and buffers, with the same names and order."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        for name, child in module.named_children():
            self.add_module(name, child)
        for name, parameter in module.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        for name, buffer in module.named_buffers(recurse=False):
            self.register_buffer(name, buffer, persistent=name in module.state_dict())


class Passed(Holding):
    """Holds a module's layers, but runs none: it returns its input."""

    def forward(self, x: Tensor) -> Tensor:
        """The input, unchanged."""
        return x


class MapClassifier(ImageClassifier):
    """The layers after a network's frozen blocks, which take flat maps ``[B, D]`` instead of images.

    It shares all layers with ``whole`` and has the same parameters, with the same names and order.
    """

    def __init__(self, whole: ImageClassifier, backbone: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__(backbone, task=whole.task, input_size=whole.input_size)
        self.depths = whole.depths
        self.to(whole.mean.device)
        self._shape = shape

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of a map."""
        return self._shape

    def _laid(self, maps: Tensor) -> Tensor:
        maps = maps.float().view(-1, *self._shape)
        return maps.contiguous(memory_format=self.memory_format) if maps.ndim == 4 else maps

    @torch.no_grad()
    def prepare(self, images: Tensor, targets: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The maps in their shape, and the targets unchanged."""
        return self._laid(images), targets

    def forward(self, images: Tensor, crops: Tensor | None = None) -> Tensor:
        """Outputs of flat maps ``[B, D]``."""
        return cast(Tensor, self.backbone(self._laid(images)))


class Reached(Exception):
    """Is raised at the end of the blocks, with their output."""


class _End(nn.Module):
    """Runs a layer, and ends the pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Raise the layer's output."""
        raise Reached(self.layer(*args, **kwargs))


class Prefix:
    """The frozen blocks at a network's beginning.

    Args:
        whole: the network, on a CPU.
        faster: makes a copy of a block run faster.

    Raises:
        ValueError: one clause, when the blocks cannot run alone: there are none, their output is too large,
            or other parts of the network are before the trained ones.
    """

    def __init__(
        self, whole: ImageClassifier, faster: Callable[[nn.Module], nn.Module] = lambda network: network
    ) -> None:
        names = list(_frozen_first(whole.backbone, ""))
        blocks = [name for name in names if [*whole.backbone.get_submodule(name).parameters()]]
        if not blocks:
            raise ValueError("the first block is trained")
        self.last = blocks[-1]
        self._whole = whole
        self._network = network = copy.deepcopy(whole.backbone).requires_grad_(False)
        for name in blocks:
            network.set_submodule(name, faster(network.get_submodule(name)))
        weight = next((p for p in network.parameters() if p.ndim == 4), None)
        self._format = torch.contiguous_format if weight is None else memory_format(weight)
        network.set_submodule(self.last, _End(network.get_submodule(self.last)))
        side = whole.input_size
        made = two_images(side)
        self._shape = tuple(self._run(made).shape[1:])
        maps = torch.from_numpy(self.maps(made))
        if maps.shape[1] * 4 > LARGEST_MAP * side**2 * 3:
            raise ValueError(f"what {self.last} gives is more than {LARGEST_MAP} times as large as the image")
        passed = frozenset(names[: names.index(self.last) + 1])
        backbone = substituted(whole.backbone, dict.fromkeys(passed, Passed))
        self.classifier = MapClassifier(whole, backbone, self._shape)
        try:
            with torch.no_grad(), nothing_zero(whole.backbone):
                alone, outputs = self.classifier(maps), whole(made)
        except Exception as fault:  # whatever the network's own code says of such an input
            raise ValueError(f"the layers after {self.last} cannot be run by themselves") from fault
        if not agree(alone, outputs, 1e-3):
            raise ValueError(f"more than the blocks up to {self.last} stands before the trained ones")

    def maps(self, images: Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Flat ``[B, D]`` of uint8 images ``[B, H, W, 3]``, as evaluation sees them; from any thread."""
        if not len(images):
            return np.empty((0, math.prod(self._shape)), np.float32)
        found: np.ndarray[Any, np.dtype[np.float32]] = self._run(images).flatten(1).numpy()
        return found

    @torch.no_grad()
    def _run(self, images: Tensor) -> Tensor:
        whole = self._whole
        x = whole._normalised(whole.task.pixels(images, None, whole.framing))
        try:
            self._network(x.contiguous(memory_format=self._format))
        except Reached as end:
            (maps,) = end.args
            return cast(Tensor, maps.float().contiguous())
        raise ValueError(f"{self.last} is not run")


def _frozen_first(module: nn.Module, prefix: str) -> Iterator[str]:
    """Children in order, up to the first trained one. A child that is partly trained is taken apart."""
    for child_name, child in module.named_children():
        name, learn = prefix + child_name, [p.requires_grad for p in child.parameters()]
        if any(learn):
            if not all(learn):
                yield from _frozen_first(child, f"{name}.")
            return
        yield name


def substituted(
    module: nn.Module, by: Mapping[str, Callable[[nn.Module], nn.Module]], prefix: str = ""
) -> nn.Module:
    """A shallow copy in which some modules are replaced; the others are shared.

    Args:
        module: the module, which is not changed.
        by: for the name of a place, a function from its module to the replacement.
        prefix: prefix of the module's names in ``by``.
    """
    shallow = copy.copy(module)
    shallow._modules = {}
    for child_name, child in module.named_children():
        name = prefix + child_name
        if name in by:
            shallow._modules[child_name] = by[name](child)
        elif any(other.startswith(f"{name}.") for other in by):
            shallow._modules[child_name] = substituted(child, by, f"{name}.")
        else:
            shallow._modules[child_name] = child
    return shallow
