"""A network's trainable parameters as one vector, with a view of it for each of them.

Letters: P numbers in all, V variables (parameter tensors).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

PIECE = 2**18
"""Numbers of a vector that a CPU's core takes up at once: a megabyte of float32 stays in its cache."""


@dataclass(frozen=True)
class Layout:
    """Where each of the V variables lies in a vector of P numbers, each in its own memory format."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    device: torch.device

    @staticmethod
    def of(module: nn.Module) -> Layout:
        """That of the parameters of ``module`` that are trained."""
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        assert named, "a network without trainable parameters"
        return Layout(
            tuple(name for name, _ in named),
            tuple(p.numel() for _, p in named),
            tuple(p.shape for _, p in named),
            tuple(p.stride() for _, p in named),
            named[0][1].device,
        )

    @property
    def num_parameters(self) -> int:
        """P."""
        return sum(self.sizes)

    def zeros(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """``[P]``."""
        return torch.zeros(self.num_parameters, dtype=dtype, device=self.device)

    def gather(self, module: nn.Module) -> Tensor:
        """Move the trained parameters of ``module`` into one vector ``[P]``, of which they become views."""
        vector = self.zeros()
        trained = (p for p in module.parameters() if p.requires_grad)
        for parameter, view in zip(trained, self.views(vector)):
            view.copy_(parameter.data)
            parameter.data = view
        return vector

    def views(self, vector: Tensor) -> list[Tensor]:
        """The V variables as views of ``vector`` ``[P]``."""
        assert vector.shape == (self.num_parameters,)
        parts = torch.split(vector, list(self.sizes))
        return [
            part.as_strided(shape, stride, part.storage_offset())
            for part, shape, stride in zip(parts, self.shapes, self.strides)
        ]
