"""Classifiers as encoders: their layers before the head compute maps of an image at several scales.

Layers keep their names from the classifier, so that its weights fit.

Shape letters: B images of a batch, S the side of the input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torchvision.models as zoo
from torch import Tensor, nn

from pfl_ext.models.efficientnet_lite import Convolution, EfficientNetLite

Steps = Sequence[Sequence[str]]
"""For each map the names of the modules that compute it, in order."""


@dataclass(frozen=True)
class Form:
    """A classifier's layers before its head, in five steps with maps of strides 2 to 32."""

    steps: Steps
    channels: tuple[int, ...]
    """Number of channels of each map."""
    last: str | None = None
    """The convolution after the last block, which widens the map for a classifier."""
    last_channels: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of torchvision's classifier that differ from its usual ones."""


def _blocks(stem: Sequence[str], container: str, ends: Sequence[int]) -> Steps:
    """Steps of blocks that are numbered within a container, each up to one of the ``ends``."""
    bounds = [0, *(end + 1 for end in ends)]
    steps = [[f"{container}.{i}" for i in range(a, b)] for a, b in pairwise(bounds)]
    return [[*stem, *steps[0]], *steps[1:]]


_RESNET: Steps = (("conv1", "bn1", "relu"), ("maxpool", "layer1"), ("layer2",), ("layer3",), ("layer4",))
_NARROW, _WIDE = Form(_RESNET, (64, 64, 128, 256, 512)), Form(_RESNET, (64, 256, 512, 1024, 2048))
FORMS: Mapping[str, Form] = {
    "resnet18": _NARROW,
    "resnet34": _NARROW,
    "resnet50": _WIDE,
    "resnet101": _WIDE,
    "mobilenet_v2": Form(
        _blocks((), "features", (1, 3, 6, 13, 17)), (16, 24, 32, 96, 320), "features.18", 1280
    ),
    "efficientnet_lite0": Form(
        _blocks(("stem",), "blocks", (0, 2, 4, 10, 15)), (16, 24, 40, 112, 320), "last", 1280
    ),
}
"""The classifiers that can be encoders, by their ``model.arch``."""


class Encoder(nn.Module):
    """The layers of a classifier that compute maps.

    Args:
        arch: one of `FORMS`. Its weights are drawn as the classifier's are.
        dilated: whether the last map has stride 16 (`dilate`) instead of 32.
        widened: whether the last map passes the convolution that follows it in the classifier, if there is
            one.
        form: the layers that compute maps; None: those of `FORMS`.
    """

    def __init__(
        self, arch: str, *, dilated: bool = False, widened: bool = False, form: Form | None = None
    ) -> None:
        super().__init__()
        form = form or FORMS[arch]
        steps, self.channels = [list(step) for step in form.steps], form.channels
        if widened and form.last is not None:
            steps[-1].append(form.last)
            self.channels = (*form.channels[:-1], form.last_channels)
        is_lite = arch == "efficientnet_lite0"
        network = EfficientNetLite(1) if is_lite else zoo.get_model(arch, weights=None, **form.options)
        self.arch, self.steps = arch, steps
        names = [name for step in steps for name in step]
        for child_name, child in network.named_children():
            within = [f"{child_name}.{part}" for part, _ in child.named_children()]
            if child_name in names:
                self.add_module(child_name, child)
            elif kept := [name for name in within if any(f"{n}.".startswith(f"{name}.") for n in names)]:
                self.add_module(child_name, nn.Sequential(*(network.get_submodule(name) for name in kept)))
        self.left_out = frozenset(network.state_dict()) - frozenset(self.state_dict())
        """The names of the classifier's tensors that the encoder does not have."""
        if dilated:
            dilate(self.get_submodule(name) for name in steps[-1])

    def forward(self, images: Tensor) -> list[Tensor]:
        """``[B, 3, S, S]`` -> maps of strides 2, 4, 8, 16 and 32 (16 if dilated), or those of the form."""
        maps, x = [], images
        for step in self.steps:
            for name in step:
                x = self.get_submodule(name)(x)
            maps.append(x)
        return maps


def dilate(modules: Iterable[nn.Module]) -> None:
    """Make the layers keep the size of their map: strides become 1, and later kernels are dilated.

    The output at every second position is the same as before, and there are new positions between (Chen et
    al. 2018, DeepLab, arXiv 1606.00915, section 3.1). Weights are not changed. There must be one stride of 2.

    Args:
        modules: the layers in the order in which they run; they are changed in place.
    """
    factor = 1
    for module in modules:
        for layer in list(module.modules()):
            if isinstance(layer, Convolution):
                layer.keep_size()
            elif isinstance(layer, nn.Conv2d):
                kernel = layer.kernel_size[0]
                is_strided = layer.stride != (1, 1)
                layer.stride, layer.dilation = (1, 1), (factor, factor)
                layer.padding = (factor * (kernel // 2), factor * (kernel // 2))
                factor = 2 if is_strided else factor
