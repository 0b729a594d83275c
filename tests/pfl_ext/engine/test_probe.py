"""Which networks train several users in one pass: those of which no image has an effect on another one."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.engine.probe import fusable
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.single_label import SingleLabel


class ByHand(nn.Module):
    """Two linear layers; ``between`` makes the second one's input of the first one's output."""

    def __init__(
        self, inputs: int, between: Callable[[Tensor], Tensor], cut: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(inputs, 6, bias=False), nn.Linear(6, 3)
        self.between, self.cut = between, cut

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, 8, 8]`` -> ``[B, 3]``."""
        out: Tensor = self.last(torch.relu(self.between(self.first(self.cut(images)))))
        return out


NETWORKS = {
    "plain": (192, lambda z: z, lambda x: x.flatten(1)),
    "mean over the batch": (192, lambda z: z - z.mean(0), lambda x: x.flatten(1)),
    "positions first": (96, lambda z: z.sum(0), lambda x: torch.stack(x.flatten(1).chunk(2, 1))),
    "rows as images": (
        24,
        lambda z: z.view(-1, 8, 6).sum(1),
        lambda x: x.transpose(1, 2).flatten(2).flatten(0, 1),
    ),
}


@pytest.mark.parametrize("kind", NETWORKS)
def test_users_share_a_pass_only_where_each_has_the_gradient_that_it_has_alone(kind: str) -> None:
    """Else the clipping of a private run would bound something else than one user's effect on the sum."""
    torch.manual_seed(0)
    net = ByHand(*NETWORKS[kind])
    nn.init.zeros_(net.last.weight)  # as in torchvision's ViT: then no other layer has a gradient
    module = ImageClassifier(net, task=SingleLabel(), input_size=8)
    assert fusable(module) == (kind == "plain")
    assert not net.last.weight.any()


def test_a_gradient_that_is_only_rounding_does_not_keep_users_apart() -> None:
    """A bias before a norm of each channel has none: a run that is taken up would train in another way."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(8, 8), nn.Flatten(), nn.Linear(8 * 6 * 6, 3))
    module = ImageClassifier(net, task=SingleLabel(), input_size=8)
    assert fusable(module)


@pytest.mark.parametrize("weight", [math.nan, 0.0, 1e-30, 1e30])
def test_the_verdict_does_not_depend_on_the_weights(weight: float) -> None:
    """A run that is taken up has other weights than at its beginning, and must train in the same way."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 6 * 6, 3))
    for parameter in net.parameters():
        nn.init.constant_(parameter, weight)
    module = ImageClassifier(net, task=SingleLabel(), input_size=8)
    assert fusable(module)
    for parameter in net.parameters():
        assert torch.equal(parameter.nan_to_num(), torch.full_like(parameter, weight).nan_to_num())
