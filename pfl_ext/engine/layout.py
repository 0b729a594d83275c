"""How the trained parameters of a network lie in one vector.

Letters: P parameters in all, V variables (parameter tensors).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from pfl_ext.data.transfer import sent

NetworkT = TypeVar("NetworkT", bound=nn.Module)
PIECE = 2**18
"""Elements of a vector that a CPU core processes at once: 1 MB of float32, which stays in its cache."""


@dataclass(frozen=True)
class Layout:
    """The position of each of the V variables in a vector of P numbers, and its memory format."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    strides: tuple[tuple[int, ...], ...]
    device: torch.device

    @staticmethod
    def of(module: nn.Module) -> Layout:
        """The layout of the parameters of ``module`` that are trained."""
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
        """P, the length of a vector."""
        return sum(self.sizes)

    @cached_property
    def owners(self) -> Tensor:
        """``[P]``: for each number the index of its variable; computed once for all lanes."""
        places = torch.arange(len(self.sizes), dtype=torch.int32)
        return sent(places.repeat_interleave(torch.tensor(self.sizes)), self.device)

    def zeros(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """A vector ``[P]`` of zeros."""
        return torch.zeros(self.num_parameters, dtype=dtype, device=self.device)

    def gather(self, module: nn.Module) -> Tensor:
        """Copy the trained parameters of ``module`` into one vector ``[P]``, and make them views of it."""
        vector = self.zeros()
        for parameter, view in zip(trained(module), self.views(vector)):
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


def in_same_memory(module: NetworkT) -> NetworkT:
    """A copy of a network whose parameters and buffers are others in the same memory."""
    parameters = {id(p): nn.Parameter(p.data, p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, {**parameters, **{id(buffer): buffer.data for buffer in module.buffers()}})


def trained(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that training changes."""
    return [p for p in module.parameters() if p.requires_grad]
