"""A network in compiled layers that shares its variables with the network it was made of."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator

from pfl.model.pytorch import PyTorchModel
from torch import nn

from pfl_ext.engine.cpu.choice import described
from pfl_ext.engine.cpu.crops import Crops
from pfl_ext.engine.cpu.kernels import CpuKernels
from pfl_ext.engine.cpu.layers import layers_for
from pfl_ext.models.classifier import ImageClassifier


class CompiledTwin:
    """Computes a classifier's network by compiled layers while `in_place`, for loops other than the engine's.

    The twin's variables are the classifier's own, with the same names, so a step on one is a step on both.
    Convolutions' weights become channels-last. In bfloat16, and where training runs on stored features, there
    is no twin, and torch computes.

    Args:
        model: the model whose network is computed.
        kernels: the compiled functions; None: `in_place` changes nothing.
    """

    def __init__(self, model: PyTorchModel, kernels: CpuKernels | None) -> None:
        self._module: ImageClassifier = model.pytorch_model
        module, layers = self._module, layers_for(kernels, None)
        whole = module.trained_part is module.backbone and model.amp_context is None
        self._parts: tuple[nn.Module, Crops | None] | None = None
        if layers is not None and whole:
            shared = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
            network = layers.replaced(copy.deepcopy(module.backbone, shared), module.input_size)
            self._parts = network, Crops(module, layers.kernels) if Crops.know(module) else None

    @property
    def arithmetic(self) -> str | None:
        """How the twin computes, in one line; None if there is none."""
        return None if self._parts is None else f"{described(self._parts[0], None)}, in pfl's own loop"

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """In this context the classifier's network is the twin."""
        if self._parts is None:
            yield
            return
        module = self._module
        before = module.backbone, module.cropping
        module.backbone, module.cropping = self._parts
        try:
            yield
        finally:
            module.backbone, module.cropping = before
