"""Splits a classifier with frozen first layers where its trained layers begin.

The frozen layers compute the same features for an image in every round. So features can be computed once
(`Split.features`), and then a `FeatureClassifier` runs only the trained layers. Random features before the
last layer are computed together with it: they are more numbers than the network's features, which in turn are
the same for any random features.

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
from pfl_ext.models.prefix import MapClassifier
from pfl_ext.models.probing import agree, before_each, nothing_zero, two_images
from pfl_ext.models.random_features import OnRandomFeatures

Result = TypeVar("Result")


class _FromFeatures(nn.Module):
    """All layers of a backbone under their own names. Only those after the split run."""

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


class FeatureClassifier(MapClassifier):
    """The trained layers of a classifier, which take features ``[B, D]`` instead of images.

    It shares all layers with ``whole`` and has the same parameters under the same names. So a checkpoint of
    one is a checkpoint of the other.
    """

    def __init__(self, whole: ImageClassifier, trained: str, width: int) -> None:
        super().__init__(whole, _FromFeatures(whole.backbone, trained), (width,))

    @property
    def trained_part(self) -> nn.Module:
        """The layers after the split."""
        return cast(_FromFeatures, self.backbone).trained

    @property
    def memory_format(self) -> torch.memory_format:
        """The contiguous format, the only one for features."""
        return torch.contiguous_format


def entering(layer: nn.Module, run: Callable[[], Result], name: str = "") -> tuple[Tensor, Result]:
    """The input of a layer while its network runs, as float32, and the result of the run.

    Args:
        layer: the layer.
        run: runs the network once.
        name: the layer's name, for the error.

    Raises:
        ValueError: one clause, when the layer is not used exactly once, or takes several tensors.
    """
    entered: list[Tensor] = []
    with before_each([(name, layer)], lambda _, __, inputs: entered.append(inputs[0])):
        result = run()
    if len(entered) != 1:
        raise ValueError(f"the layer {name} is used {len(entered)} times")
    if not isinstance(entered[0], Tensor):
        raise ValueError(f"the layer {name} takes several maps")
    return entered[0].float(), result


class Split:
    """The split of a network into frozen and trained layers.

    Args:
        whole: the network; some of its parameters are trained.

    Raises:
        ValueError: one clause that says why it cannot be split: all layers are trained, the trained ones are
            not the last, or their input is not one vector for each image.
    """

    def __init__(self, whole: ImageClassifier) -> None:
        self.whole = whole
        """The network."""
        self.trained = _last_trained(whole.backbone)
        with nothing_zero(whole.backbone):
            features, outputs = self._run(two_images(whole.input_size).to(whole.mean.device))
            if features.ndim != 2:
                raise ValueError(f"the layer {self.trained} takes more than a vector for each image")
            self.width = features.shape[1]
            self.classifier = FeatureClassifier(whole, self.trained, self.width)
            with torch.no_grad():
                alone = self.classifier(features)
        if not agree(alone, outputs, 1e-3):
            raise ValueError(f"more than the layer {self.trained} follows the frozen layers")

    @torch.no_grad()
    def _run(self, images: Tensor, crops: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The input of the trained layers, and the outputs."""
        layer = self.whole.backbone.get_submodule(self.trained)
        return entering(layer, lambda: self.whole(images, crops), self.trained)

    def features(
        self, images: Tensor, crops: Tensor | None = None
    ) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """Features ``[B, D]`` of uint8 images ``[B, H, W, 3]``, independent of the batch.

        Args:
            images: the stored images.
            crops: ``[B, 6]``, as in training; None: the transform of evaluation.
        """
        device = self.whole.mean.device
        there = None if crops is None else crops.to(device)
        return self._run(images.to(device), there)[0].cpu().numpy()

    def digest(self) -> str:
        """SHA-256 of what features depend on besides the images: layers, weights, and the transform."""
        whole, after = self.whole, f"backbone.{self.trained}."
        about = (self._layers(), whole.framing, whole.mean.tolist(), whole.std.tolist())
        found = hashlib.sha256(repr(about).encode())
        for name, tensor in whole.state_dict().items():
            if not name.startswith(after):
                found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def _layers(self) -> str:
        """The network in words, without random features that follow the split."""
        backbone = self.whole.backbone
        last = backbone.get_submodule(self.trained)
        if not isinstance(last, OnRandomFeatures):
            return str(backbone)
        backbone.set_submodule(self.trained, last.plain())
        try:
            return str(backbone)
        finally:
            backbone.set_submodule(self.trained, last)


def _last_trained(backbone: nn.Module) -> str:
    """The name of the smallest module with every trained parameter, and with random features before them."""
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
