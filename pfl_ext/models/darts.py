"""The networks of DARTS: one in which an architecture is searched for, and the one derived from it
(Liu et al. 2019, "DARTS: Differentiable Architecture Search", arXiv 1806.09055).

A network is a 3 x 3 convolution, cells one after another, the mean over the image, and a linear layer. A cell
sees the outputs of the two cells before it; its own is all its nodes side by side, of c channels each. The
cells at one and at two thirds of the depth halve the image and double c.

* ``darts_search``: every edge mixes all operations o, ``sum_o softmax(alpha)_o o(x)``. The rows of alpha are
  parameters of the network, ``alpha_normal`` and ``alpha_reduce`` (``[14, 8]``), which all cells of a kind
  share.
* ``darts``: each node has the two edges of ``model.genotype`` (`pfl_ext.models.genotype`).

As in the paper norms have no scale and shift in the search, and a pooling has a norm there and none
afterwards. The paper's BatchNorm becomes GroupNorm, as in all networks here that train from scratch. A group
must have several channels: the last layer takes each channel's mean over the image, which a norm of that
channel alone would make a constant. The paper's auxiliary head and drop path are left out.

Shape letters: B images of a batch, S side of the input, C and c channels, K labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn

from pfl_ext.models.config import ModelConfig
from pfl_ext.models.genotype import EDGES, NODES, OPERATIONS, Edge, Genotype, read_genotype, strongest
from pfl_ext.models.small import NETWORKS, Configured

ALPHA_DEVIATION = 1e-3
"""Standard deviation of the first alphas, which are normal; the authors'."""
STEM_FACTOR = 3
"""Channels of the first convolution over those of the first cell; the authors'."""


class HalvingSkip(nn.Module):
    """Two 1 x 1 convolutions of stride 2, one of which begins a pixel later, side by side."""

    def __init__(self, before: int, after: int, affine: bool) -> None:
        super().__init__()
        self.relu = nn.ReLU()
        self.even = nn.Conv2d(before, after // 2, 1, stride=2, bias=False)
        self.odd = nn.Conv2d(before, after - after // 2, 1, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(after, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, C, S, S]`` with an even S -> ``[B, after, S / 2, S / 2]``."""
        x = self.relu(x)
        return cast(Tensor, self.norm(torch.cat((self.even(x), self.odd(x[:, :, 1:, 1:])), 1)))


class Nothing(nn.Module):
    """The operation "none"."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Zeros in the place of ``x``, or of every second pixel."""
        return x[:, :, :: self.stride, :: self.stride] * 0.0


def _pointwise(before: int, after: int, affine: bool) -> nn.Sequential:
    convolution = nn.Conv2d(before, after, 1, bias=False)
    return nn.Sequential(nn.ReLU(), convolution, nn.BatchNorm2d(after, affine=affine))


def _depthwise(channels: int, kernel: int, stride: int, dilation: int, affine: bool) -> list[nn.Module]:
    """ReLU, a convolution of each channel, one of 1 x 1, norm."""
    padding = dilation * (kernel // 2)
    each = nn.Conv2d(
        channels, channels, kernel, stride, padding, dilation=dilation, groups=channels, bias=False
    )
    both = nn.Conv2d(channels, channels, 1, bias=False)
    return [nn.ReLU(), each, both, nn.BatchNorm2d(channels, affine=affine)]


def operation(name: str, channels: int, stride: int, *, searched: bool) -> nn.Module:
    """One of `OPERATIONS`, ``[B, C, S, S]`` -> ``[B, C, S / stride, S / stride]``.

    Args:
        name: of the operation.
        channels: C.
        stride: 1 or 2.
        searched: norms have no scale and shift, and poolings have a norm.
    """
    if name == "none":
        return Nothing(stride)
    if name == "skip_connect":
        return nn.Identity() if stride == 1 else HalvingSkip(channels, channels, not searched)
    if name.endswith("pool_3x3"):
        pool = (
            nn.MaxPool2d(3, stride, 1)
            if name.startswith("max")
            else nn.AvgPool2d(3, stride, 1, count_include_pad=False)
        )
        return nn.Sequential(pool, nn.BatchNorm2d(channels, affine=False)) if searched else pool
    kernel = int(name[-1])
    if name.startswith("dil"):
        return nn.Sequential(*_depthwise(channels, kernel, stride, 2, not searched))
    twice = (_depthwise(channels, kernel, s, 1, not searched) for s in (stride, 1))
    return nn.Sequential(*(layer for layers in twice for layer in layers))


class MixedOperation(nn.Module):
    """The operations of an edge, summed with their shares."""

    def __init__(self, channels: int, stride: int) -> None:
        super().__init__()
        self.operations = nn.ModuleList(operation(o, channels, stride, searched=True) for o in OPERATIONS)

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        """Their sum, each times its share ``[8]``."""
        total = torch.stack([share * one(x) for one, share in zip(self.operations, shares.unbind())])
        return total.sum(0)


class Cell(nn.Module):
    """The inputs of a cell brought to its channels, before its edges.

    Args:
        inputs: channels of the outputs of the two cells before it.
        channels: c.
        halves: whether this cell halves the image.
        after_halving: whether the cell before it did, so that its inputs have two sizes.
        affine: whether norms have scale and shift.
    """

    def __init__(
        self, inputs: tuple[int, int], channels: int, halves: bool, after_halving: bool, affine: bool
    ) -> None:
        super().__init__()
        self.halves = halves
        first = HalvingSkip if after_halving else _pointwise
        self.before_last = first(inputs[0], channels, affine)
        self.last = _pointwise(inputs[1], channels, affine)

    def stride(self, source: int) -> int:
        """The stride of an edge from this input or node."""
        return 2 if self.halves and source < 2 else 1


class SearchCell(Cell):
    """A cell of the search, with all edges."""

    def __init__(self, inputs: tuple[int, int], channels: int, halves: bool, after_halving: bool) -> None:
        super().__init__(inputs, channels, halves, after_halving, affine=False)
        sources = [source for node in range(NODES) for source in range(2 + node)]
        self.edges = nn.ModuleList(MixedOperation(channels, self.stride(source)) for source in sources)

    def forward(self, before_last: Tensor, last: Tensor, shares: Tensor) -> Tensor:
        """Outputs of two cells and the shares ``[14, 8]`` -> ``[B, 4 c, S, S]``."""
        states, edge = [self.before_last(before_last), self.last(last)], 0
        for node in range(NODES):
            parts = [self.edges[edge + i](state, shares[edge + i]) for i, state in enumerate(states)]
            states.append(torch.stack(parts).sum(0))
            edge += 2 + node
        return torch.cat(states[2:], 1)


class DerivedCell(Cell):
    """A cell with the edges of a genotype."""

    def __init__(
        self,
        inputs: tuple[int, int],
        channels: int,
        halves: bool,
        after_halving: bool,
        edges: Sequence[Edge],
    ) -> None:
        super().__init__(inputs, channels, halves, after_halving, affine=True)
        self.sources = [edge.input for edge in edges]
        self.edges = nn.ModuleList(
            operation(edge.operation, channels, self.stride(edge.input), searched=False) for edge in edges
        )

    def forward(self, before_last: Tensor, last: Tensor) -> Tensor:
        """Outputs of two cells -> ``[B, 4 c, S, S]``."""
        states = [self.before_last(before_last), self.last(last)]
        for node in range(NODES):
            one, other = (self.edges[i](states[self.sources[i]]) for i in (2 * node, 2 * node + 1))
            states.append(one + other)
        return torch.cat(states[2:], 1)


class CellNetwork(nn.Module):
    """What both networks have besides their cells, ``[B, 3, S, S]`` -> ``[B, K]``; S is a multiple of 4.

    Args:
        num_labels: K.
        num_cells: at least 3.
        channels: c of the first cell.
        genotype: of the cells; None: they are those of the search.
    """

    def __init__(self, num_labels: int, num_cells: int, channels: int, genotype: Genotype | None) -> None:
        super().__init__()
        halving = [cell in (num_cells // 3, 2 * num_cells // 3) for cell in range(num_cells)]
        stem = STEM_FACTOR * channels
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, padding=1, bias=False), nn.BatchNorm2d(stem))
        self.cells, inputs = nn.ModuleList(), (stem, stem)
        for after_halving, halves in pairwise((False, *halving)):
            channels *= 2 if halves else 1
            where = inputs, channels, halves, after_halving
            edges = None if genotype is None else genotype.reduce if halves else genotype.normal
            self.cells.append(SearchCell(*where) if edges is None else DerivedCell(*where, edges))
            inputs = inputs[1], NODES * channels
        self.classifier = nn.Linear(inputs[1], num_labels)

    def forward(self, images: Tensor) -> Tensor:
        """The logits."""
        before_last = last = self.stem(images)
        for cell in self.cells:
            before_last, last = last, self.run(cell, before_last, last)
        return cast(Tensor, self.classifier(last.mean((2, 3))))

    def run(self, cell: nn.Module, before_last: Tensor, last: Tensor) -> Tensor:
        """The output of a cell."""
        return cast(Tensor, cell(before_last, last))


class SearchNetwork(CellNetwork):
    """The network of the search."""

    def __init__(self, num_labels: int, num_cells: int, channels: int) -> None:
        super().__init__(num_labels, num_cells, channels, None)
        self.alpha_normal = nn.Parameter(ALPHA_DEVIATION * torch.randn(EDGES, len(OPERATIONS)))
        self.alpha_reduce = nn.Parameter(ALPHA_DEVIATION * torch.randn(EDGES, len(OPERATIONS)))

    @property
    def alphas(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The alphas of normal and of halving cells."""
        return self.alpha_normal, self.alpha_reduce

    def run(self, cell: nn.Module, before_last: Tensor, last: Tensor) -> Tensor:
        """The output of a cell with the shares of its kind."""
        alpha = self.alpha_reduce if cell.halves else self.alpha_normal
        return cast(Tensor, cell(before_last, last, alpha.softmax(1)))

    def genotype(self) -> Genotype:
        """What alpha says now."""
        return Genotype(*(strongest(alpha.detach().double().tolist()) for alpha in self.alphas))


def _check_groups(config: ModelConfig) -> None:
    if not config.has_fixed_statistics and config.groups >= config.cell_channels:
        raise ValueError(
            f"model.groups is {config.groups}, and a norm of {config.cell_channels} channels, "
            "model.cell_channels, would have one channel a group, which leaves the last layer nothing of the "
            f"image: set model.groups to at most {config.cell_channels // 2}"
        )


def _searched(num_labels: int, config: ModelConfig) -> SearchNetwork:
    _check_groups(config)
    return SearchNetwork(num_labels, config.cells, config.cell_channels)


def _derived(num_labels: int, config: ModelConfig) -> CellNetwork:
    if config.genotype is None:
        raise ValueError(
            f"model.arch is {config.arch}, and model.genotype is none: give the results.json of a search"
        )
    _check_groups(config)
    return CellNetwork(num_labels, config.cells, config.cell_channels, read_genotype(config.genotype))


NETWORKS.add("darts_search", Configured(_searched, ("cells", "cell_channels")))
NETWORKS.add("darts", Configured(_derived, ("cells", "cell_channels", "genotype")))
