"""Some of a network's variables as one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


class FlatVariables:
    """Maps some of a network's variables to one vector ``[P]`` and back.

    Args:
        module: the network.
        names: the variables, in their order in the vector.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        variables = dict(module.named_parameters())
        self.shapes = {name: variables[name].shape for name in names}
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.device = next(iter(variables.values())).device

    @property
    def length(self) -> int:
        """P, the length of the vector."""
        return sum(self.sizes)

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Views of a vector by variable."""
        parts = torch.split(vector, self.sizes)
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts)}

    def flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The vector ``[P]`` of these tensors; tensors of other variables are left out."""
        parts = [tensors[name].reshape(-1) for name in self.shapes]
        return torch.cat(parts) if parts else torch.zeros(0, device=self.device)
