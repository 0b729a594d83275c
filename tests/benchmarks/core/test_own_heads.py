"""Networks of one's own whose last layer takes several vectors for each image, or runs twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pfl_ext.models.small import NETWORKS
from pfl_ext.models.trained import features_in
from tests.benchmarks.conftest import Refused

HEAD = ("--model.trained=head", "--augment.flip=none", "--evaluation.best_by=last")


class Tokens(nn.Module):
    """The last layer runs on every token, and the outputs are the mean."""

    def __init__(self, labels: int, _: int) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 4, stride=4), nn.Linear(8, labels)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, K]``."""
        found: Tensor = self.last(self.first(x).flatten(2).transpose(1, 2)).mean(1)
        return found


class Twice(Tokens):
    """The last layer runs on two vectors of an image."""

    def forward(self, x: Tensor) -> Tensor:
        """``[B, K]``."""
        maps = self.first(x)
        found: Tensor = self.last(maps.mean((2, 3))) + self.last(maps.amax((2, 3)))
        return found


@pytest.fixture(autouse=True)
def _networks(monkeypatch: pytest.MonkeyPatch) -> None:
    NETWORKS.names()  # complete
    monkeypatch.setattr(NETWORKS, "_things", {**NETWORKS._things, "tokens": Tokens, "twice": Twice})


@pytest.mark.parametrize(
    "arch, words, message",
    [
        ("tokens", (*HEAD, "--federated.algorithm=fedncm"), "FedNCM needs a last layer of one vector"),
        ("tokens", (*HEAD, "--federated.algorithm=fed3r"), "Fed3R needs a last layer of one vector"),
        ("twice", (*HEAD, "--federated.algorithm=fedncm"), "but the layer last is used 2 times"),
        ("twice", ("--federated.algorithm=moon",), "the last layer of this network runs 2 times"),
        ("twice", ("--federated.algorithm=split",), "its parts cannot be run by themselves"),
    ],
)
def test_an_algorithm_that_cannot_take_such_a_layer_refuses_it(
    arch: str, words: tuple[str, ...], message: str, refused: Refused
) -> None:
    assert not refused(message, f"--model.arch={arch}", *words).exists()


@pytest.mark.parametrize("convolution", [False, True])
def test_features_at_several_positions_count_as_their_mean(convolution: bool) -> None:
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))  # two images, five positions
    head = nn.Conv2d(3, 4, 1) if convolution else nn.Linear(3, 4)
    network = nn.Sequential(head)
    with features_in(network) as found:
        network(x.transpose(1, 2)[..., None] if convolution else x)
    torch.testing.assert_close(found, [x.mean(1)])
