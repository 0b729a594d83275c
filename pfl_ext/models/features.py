"""A classifier whose first layers stay as they are, split where its trained layers begin.

The frozen layers give the same numbers for an image in every round. These features can be computed once
(`Split.features`); after that the trained layers alone are run, by a `FeatureClassifier`. Random features
before the last layer are run with it: they are more numbers than the network's features, and these are the
same for any of them.

Shape letters: B images of a batch, H x W their stored size, D features of an image, K labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.random_features import OnRandomFeatures

Result = TypeVar("Result")


class _FromFeatures(nn.Module):
    """All layers of a backbone under their own names, of which only those after the split are run."""

    def __init__(self, backbone: nn.Module, trained: str) -> None:
        super().__init__()
        for name, child in backbone.named_children():
            self.add_module(name, child)
        self._trained = trained

    @property
    def trained(self) -> nn.Module:
        """The layers after the split."""
        return self.get_submodule(self._trained)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, D]`` -> ``[B, K]``."""
        return cast(Tensor, self.trained(features))


class FeatureClassifier(ImageClassifier):
    """The trained layers of a classifier, fed with features ``[B, D]`` where others have images.

    It shares all layers with ``whole`` and has the same parameters by the same names, so that a checkpoint
    of one is a checkpoint of the other.
    """

    def __init__(self, whole: ImageClassifier, trained: str, width: int) -> None:
        backbone = _FromFeatures(whole.backbone, trained)
        super().__init__(backbone, task=whole.task, input_size=whole.input_size)
        self.to(whole.mean.device)
        self._width = width

    @property
    def input_shape(self) -> tuple[int, ...]:
        """``[D]``."""
        return (self._width,)

    @property
    def trained_part(self) -> nn.Module:
        """The layers after the split."""
        return cast(_FromFeatures, self.backbone).trained

    @property
    def memory_format(self) -> torch.memory_format:
        """Features have no other."""
        return torch.contiguous_format

    @torch.no_grad()
    def prepare(self, images: Tensor, targets: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The features ``[B, D]`` and the targets, as they are."""
        return images.float(), targets

    def forward(self, images: Tensor, crops: Tensor | None = None) -> Tensor:
        """Outputs ``[B, K]`` of features ``[B, D]``."""
        return cast(Tensor, self.backbone(images.float()))


def entering(layer: nn.Module, run: Callable[[], Result], name: str = "") -> tuple[Tensor, Result]:
    """What enters a layer of a network while the network is run, float32, and what the run gives.

    Args:
        layer: of the network.
        run: runs it once.
        name: of the layer, for the error.

    Raises:
        ValueError: in a clause, when the layer is not used once, or takes several tensors.
    """
    entered: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    try:
        result = run()
    finally:
        hook.remove()
    if len(entered) != 1:
        raise ValueError(f"the layer {name} is used {len(entered)} times")
    if not isinstance(entered[0], Tensor):
        raise ValueError(f"the layer {name} takes several maps")
    return entered[0].float(), result


class Split:
    """Where a network's frozen layers end.

    Args:
        whole: the network, of which some parameters are trained.

    Raises:
        ValueError: in a clause that says why these layers cannot be split off: all of them are trained, the
            trained ones are not the last, or what enters them is no vector for each image.
    """

    def __init__(self, whole: ImageClassifier) -> None:
        self._whole = whole
        self.trained = _last_trained(whole.backbone)
        images = torch.arange(2 * whole.input_size**2 * 3).view(2, whole.input_size, whole.input_size, 3)
        made = (images * 37 % 256).to(torch.uint8).to(whole.mean.device)
        features, outputs = self._run(made)
        if features.ndim != 2:
            raise ValueError(f"the layer {self.trained} takes more than a vector for each image")
        self.width = features.shape[1]
        self.classifier = FeatureClassifier(whole, self.trained, self.width)
        with torch.no_grad():
            alone = self.classifier(features)
        if not torch.allclose(alone, outputs, rtol=1e-3, atol=1e-3 * float(outputs.abs().max())):
            raise ValueError(f"more than the layer {self.trained} follows the frozen layers")

    @torch.no_grad()
    def _run(self, images: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What enters the trained layers, and the outputs."""
        layer = self._whole.backbone.get_submodule(self.trained)
        return entering(layer, lambda: self._whole(images, crops), self.trained)

    def features(
        self, images: Tensor, crops: Tensor | None = None
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """``[B, D]`` of uint8 images ``[B, H, W, 3]``, each image by itself.

        Args:
            images: as they are stored.
            crops: ``[B, 6]``, as training sees them; None: as evaluation does.
        """
        device = self._whole.mean.device
        there = None if crops is None else crops.to(device)
        return self._run(images.to(device), there)[0].cpu().numpy()

    def digest(self) -> str:
        """SHA-256 of all that features depend on besides the images: layers, weights, and the transform."""
        whole, after = self._whole, f"backbone.{self.trained}."
        about = (self._layers(), whole.framing, whole.mean.tolist(), whole.std.tolist())
        found = hashlib.sha256(repr(about).encode())
        for name, tensor in whole.state_dict().items():
            if not name.startswith(after):
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def _layers(self) -> str:
        """The network in words; where random features follow the split, as it is without them."""
        backbone = self._whole.backbone
        last = backbone.get_submodule(self.trained)
        if not isinstance(last, OnRandomFeatures):
            return str(backbone)
        backbone.set_submodule(self.trained, last.plain())
        try:
            return str(backbone)
        finally:
            backbone.set_submodule(self.trained, last)


def _last_trained(backbone: nn.Module) -> str:
    """The name of the smallest module that holds every trained parameter, and random features before it."""
    names = [name for name, parameter in backbone.named_parameters() if parameter.requires_grad]
    assert names, "a network without trainable parameters"
    common = names[0].split(".")[:-1]
    for name in names[1:]:
        parts = name.split(".")[:-1]
        common = common[: next((i for i, pair in enumerate(zip(common, parts)) if pair[0] != pair[1]), None)]
        common = common[: len(parts)]
    layer = ".".join(common)
    inside = [name for name, _ in backbone.named_parameters() if layer and name.startswith(f"{layer}.")]
    if not layer or set(inside) != set(names):
        raise ValueError("its trained layers are not one module at its end")
    around = layer.rpartition(".")[0]
    return around if isinstance(backbone.get_submodule(around), OnRandomFeatures) else layer
