"""Genotypes of the DARTS space: the two operations that lead to each node of a cell
(Liu et al. 2019, "DARTS: Differentiable Architecture Search", arXiv 1806.09055, Sections 2.1 and 2.4).

A cell is a graph of 2 inputs, numbered 0 and 1, and `NODES` nodes, numbered from 2. Every earlier input or
node has an edge to a node, with one of `OPERATIONS` on it; a node is the sum over its edges. There are normal
cells, and cells that halve the image. Letters: E edges of a cell, O operations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

OPERATIONS = (
    "none",
    "max_pool_3x3",
    "avg_pool_3x3",
    "skip_connect",
    "sep_conv_3x3",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "dil_conv_5x5",
)
"""Operations of an edge, in the order of a row of alpha."""
NODES = 4
EDGES = sum(2 + node for node in range(NODES))
KINDS = ("normal", "reduce")
"""Kinds of cells."""
FORM = "normal=OPERATION@INPUT,... reduce=OPERATION@INPUT,..."


class Edge(NamedTuple):
    """An operation of a derived cell."""

    operation: str
    input: int
    """Its start: 0 and 1 are outputs of the cell before last and of the last; from 2, nodes of this cell."""


class Genotype(NamedTuple):
    """The two edges of each node, node by node, for both kinds of cells."""

    normal: tuple[Edge, ...]
    reduce: tuple[Edge, ...]

    @property
    def text(self) -> str:
        """The text that ``model.genotype`` takes: `FORM`."""
        parts = (",".join(f"{edge.operation}@{edge.input}" for edge in cell) for cell in self)
        return " ".join(f"{kind}={part}" for kind, part in zip(KINDS, parts))


def strongest(alphas: Sequence[Sequence[float]]) -> tuple[Edge, ...]:
    """A derived cell: for each node its two strongest edges, with their strongest operation except "none".

    The strength of an operation is its share of the softmax over the edge's row, which includes "none". The
    first of equal ones is taken.

    Args:
        alphas: ``[E, O]`` of one kind of cell.
    """
    edges: list[Edge] = []
    first = 0
    for node in range(NODES):
        found = []
        for source, row in enumerate(alphas[first : first + 2 + node]):
            highest = max(row)
            shares = [math.exp(a - highest) for a in row]
            best = max(range(1, len(row)), key=lambda o: row[o])
            found.append((shares[best] / sum(shares), Edge(OPERATIONS[best], source)))
        two = sorted(found, key=lambda pair: -pair[0])[:2]
        edges += sorted((edge for _, edge in two), key=lambda edge: edge.input)
        first += 2 + node
    return tuple(edges)


def read_genotype(given: str) -> Genotype:
    """The genotype in ``model.genotype``, which is its text or the path of a search's ``results.json``.

    Raises:
        ValueError: one line, for anything else.
    """
    if "=" in given and not given.endswith(".json"):
        return _parsed(given)
    try:
        held = json.loads(Path(given).read_text(encoding="utf-8"))
        text = held["genotype"]
    except (OSError, ValueError, KeyError, TypeError) as fault:
        reason = str(fault).partition("\n")[0] or type(fault).__name__
        raise ValueError(
            f"model.genotype is {given!r}, from which no genotype can be read ({reason}): give {FORM}, or "
            "the results.json of a search"
        ) from fault
    return _parsed(str(text))


def _parsed(text: str) -> Genotype:
    try:
        cells = dict(part.split("=") for part in text.split())
        normal, reduce = (_cell(cells.pop(kind)) for kind in KINDS)
        if cells:
            raise ValueError(f"there is no kind of cell {next(iter(cells))}")
    except (ValueError, KeyError) as fault:
        reason = f"no cell {fault}" if isinstance(fault, KeyError) else str(fault)
        raise ValueError(
            f"model.genotype is {text!r}, which is no genotype ({reason}): give {FORM}"
        ) from fault
    return Genotype(normal, reduce)


def _cell(text: str) -> tuple[Edge, ...]:
    edges = []
    for place, part in enumerate(text.split(",")):
        operation, _, source = part.partition("@")
        if operation not in OPERATIONS[1:]:
            raise ValueError(f"{operation!r} is none of {', '.join(OPERATIONS[1:])}")
        if not source.isdecimal() or int(source) >= 2 + place // 2:
            raise ValueError(f"node {2 + place // 2} has no input {source!r}")
        edges.append(Edge(operation, int(source)))
    pairs = list(zip(edges[::2], edges[1::2]))
    if len(edges) != 2 * NODES or any(one.input == other.input for one, other in pairs):
        raise ValueError(f"a cell has {NODES} nodes with two different inputs each")
    return tuple(edges)
