"""Networks of parties that hold different parts of every image: ``model.parties``.

Each party has a network of its own, of ``model.arch``, for its part of the image at the part's own size. The
outputs are the sum of the parties' outputs. Together this is an ordinary classifier: any algorithm can train
it, and its file is loaded and scored like any other. `pfl_ext.algorithms.vertical` trains it with each
party's network at the party.

Shape letters: B images of a batch, S side of the input, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


class PartyNetworks(nn.Module):
    """The sum over parties of the outputs of each party's network for its part of an image."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def parts(self, images: Tensor) -> list[Tensor]:
        """Each party's part of images ``[B, 3, S, S]``.

        Two parties have the left and the right half ``[B, 3, S, S / 2]``; four have the quadrants
        ``[B, 3, S / 2, S / 2]``: top left, top right, bottom left, bottom right.
        """
        # by index: torch.fx, by which the engine joins layers, cannot go through chunks one after another
        rows = images.chunk(len(self.networks) // 2, dim=2)
        return [rows[k // 2].chunk(2, dim=3)[k % 2] for k in range(len(self.networks))]

    def forward(self, images: Tensor) -> Tensor:
        """``[B, 3, S, S]`` -> ``[B, K]``."""
        outputs = [network(part) for network, part in zip(self.networks, self.parts(images))]
        return total_of(outputs)


def total_of(outputs: Sequence[Tensor]) -> Tensor:
    """The sum of all parties' outputs ``[B, K]``, in the order of the parties."""
    first, *others = outputs
    for other in others:
        first = first + other
    return first
