"""The network that users train: the central one, or a copy of it in the form that trains fastest.

The copy has the memory layout and the layers that suit the device (`cpu.layers`, `gpu_layers`). Taps of its
convolutions that meet nothing but padding are cut off.

For example, on a map of one pixel a 3 x 3 kernel with a padding of one uses only its centre. The other eight
taps meet zeros and have no gradient, so local training without weight decay never changes them. With images
of 32 pixels ResNet-18's last stage works on single pixels, and such taps are two thirds of its weights. Local
training gives the same result without them. The server's model keeps them, since noise and other inputs reach
them there.

Letters: k taps of a kernel along one side.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from pfl_ext.engine.cpu.crops import Crops
from pfl_ext.engine.cpu.layers import CpuLayers
from pfl_ext.engine.gpu_layers import GpuLayers
from pfl_ext.models.classifier import ImageClassifier, memory_format
from pfl_ext.models.probing import before_each

Sides = tuple[slice, slice]


def live_taps(size: int, kernel: int, stride: int, padding: int, dilation: int) -> range:
    """The taps that meet some pixel along a side of ``size`` pixels, a range without gaps."""
    outputs = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    live = [
        k
        for k in range(kernel)
        if any(0 <= o * stride - padding + k * dilation < size for o in range(outputs))
    ]
    return range(live[0], live[-1] + 1) if live else range(kernel)


class Trimmed:
    """A copy of a classifier for local training, whose convolutions have only live taps.

    Where a copy would gain nothing, ``model`` is the classifier itself; `refresh` and `expand` then do
    nothing.

    Args:
        whole: whether to keep dead taps.
        layers: the compiled layers of a CPU, or those of a GPU.
    """

    def __init__(
        self,
        central: ImageClassifier,
        whole: bool = False,
        layers: CpuLayers | GpuLayers | None = None,
    ) -> None:
        self._central = central
        self._sides: dict[str, Sides] = {}
        convolutions = {} if whole else _trimmable(central)
        if not convolutions and layers is None:
            self.model = central
            return
        self.model = copy.deepcopy(central)
        for name, sides in convolutions.items():
            layer = self.model.get_submodule(name)
            assert isinstance(layer, nn.Conv2d)
            self._sides[f"{name}.weight"] = sides
            self.model.set_submodule(name, _cut(layer, sides))
        if layers is not None:
            self.model.backbone = layers.replaced(self.model.backbone, central.input_size)
        if isinstance(layers, CpuLayers) and Crops.know(central):
            self.model.cropping = Crops(central, layers.kernels)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the central weights into the trimmed network."""
        if self.model is not self._central:
            theirs = self._central.state_dict()
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(self.live(name, theirs[name]))

    def live(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a variable that the trimmed network has."""
        sides = self._sides.get(name)
        return tensor if sides is None else tensor[:, :, sides[0], sides[1]]

    @torch.no_grad()
    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """A variable of the trimmed network in the whole network's shape, with zeros where it was cut."""
        if name not in self._sides:
            return tensor
        wide = torch.zeros_like(self._central.get_parameter(name), dtype=tensor.dtype, requires_grad=False)
        self.live(name, wide).copy_(tensor)
        return wide

    def expand(self, update: dict[str, Tensor]) -> dict[str, Tensor]:
        """An update of the trimmed network in the whole network's shapes."""
        return {name: self.whole(name, tensor) for name, tensor in update.items()}


def _cut(layer: nn.Conv2d, sides: Sides) -> nn.Conv2d:
    """A copy of the layer with these taps."""
    shorter = copy.deepcopy(layer)
    weight = layer.weight.detach()[:, :, sides[0], sides[1]]
    kept = weight.clone(memory_format=memory_format(layer.weight))
    shorter.weight = nn.Parameter(kept, requires_grad=layer.weight.requires_grad)
    shorter.kernel_size = (weight.shape[2], weight.shape[3])
    low = zip(_padding(layer), sides, layer.dilation)
    shorter.padding = tuple(p - side.start * d for p, side, d in low)
    return shorter


def _padding(layer: nn.Conv2d) -> tuple[int, ...]:
    assert not isinstance(layer.padding, str)
    return layer.padding


@torch.no_grad()
def _trimmable(central: ImageClassifier) -> dict[str, Sides]:
    """The live taps of each convolution that has dead ones, found with one image."""
    convolutions = {name: m for name, m in central.named_modules() if isinstance(m, nn.Conv2d)}
    sizes: dict[str, list[tuple[int, int]]] = {}

    def note(name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        sizes.setdefault(name, []).append((inputs[0].shape[2], inputs[0].shape[3]))

    with before_each(convolutions.items(), note):
        central.backbone(torch.zeros(1, *central.input_shape, device=central.mean.device))
    found = {}
    for name, seen in sizes.items():
        layer = convolutions[name]
        if len(set(seen)) != 1 or isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            continue
        forms = zip(seen[0], layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        taps = [live_taps(*form) for form in forms]
        sides = (slice(taps[0].start, taps[0].stop), slice(taps[1].start, taps[1].stop))
        if _same_outputs(layer, seen[0], sides):
            found[name] = sides
    return found


def _same_outputs(layer: nn.Conv2d, size: tuple[int, int], sides: Sides) -> bool:
    """Whether some taps are dead and the cut layer, with equal padding on both sides, has as many outputs."""
    if all(side == slice(0, k) for side, k in zip(sides, layer.kernel_size)):
        return False
    for n, k, s, p, d, side in zip(
        size, layer.kernel_size, layer.stride, _padding(layer), layer.dilation, sides
    ):
        cut, less = side.stop - side.start, p - side.start * d
        before, after = n + 2 * p - d * (k - 1) - 1, n + 2 * less - d * (cut - 1) - 1
        if less < 0 or before // s != after // s:
            return False
    return True
