"""The steps of Adam on all of a lane's weights (Kingma and Ba 2015; AdamW: Loshchilov and Hutter 2019).

As in ``torch.optim.Adam``, with g a step's gradient and t its number in a user's training:
``m <- beta1 m + (1 - beta1) g``, ``v <- beta2 v + (1 - beta2) g^2``, and the direction of the step is
``m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)``. Letters: P parameters in all, V variables.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pfl_ext.engine.layout import PIECE, Layout
from pfl_ext.engine.training import Adaptive


class Moments:
    """A lane's m and v, which begin at 0 for each user.

    Nothing waits for the device or depends on values, so that a GPU can record a step and replay it.
    """

    def __init__(self, layout: Layout) -> None:
        self._m, self._v, self._g = layout.zeros(), layout.zeros(), layout.zeros()
        self._views = layout.views(self._g)
        self._powers = torch.ones(2, dtype=torch.float64, device=layout.device)  # of beta1 and beta2
        self._length = PIECE if layout.device.type == "cpu" else max(layout.num_parameters, 1)

    @property
    def tensors(self) -> list[Tensor]:
        """What a step writes and the next reads."""
        return [self._m, self._v, self._powers]

    @torch.no_grad()
    def direction(self, gradients: Sequence[Tensor], adam: Adaptive, first: bool) -> list[Tensor]:
        """The direction of a step, by variable, in memory that the next step overwrites.

        Args:
            gradients: V tensors.
            adam: the constants.
            first: whether this is a user's first step.
        """
        if first:
            self._powers.fill_(1.0)
        for power, beta in zip(self._powers, (adam.beta1, adam.beta2)):
            power.mul_(beta)
        rest, rest_of_squares = 1 - self._powers
        root = rest_of_squares.sqrt()
        torch._foreach_copy_(self._views, list(gradients))
        pieces = (torch.split(vector, self._length) for vector in (self._m, self._v, self._g))
        for m, v, g in zip(*pieces):
            if first:
                torch.mul(g, 1 - adam.beta1, out=m)
                torch.mul(g, g, out=v).mul_(1 - adam.beta2)
            else:
                m.lerp_(g, 1 - adam.beta1)
                v.mul_(adam.beta2).addcmul_(g, g, value=1 - adam.beta2)
            torch.sqrt(v, out=g)
            g.div_(root).add_(adam.epsilon)
            torch.div(m, g, out=g)
            g.div_(rest)
        return self._views
