# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""The end of a training step on a GPU in five launches, and that of a private user's training in three.

Operations by variable need one or more launches each. Of 442 launches of a step of ResNet-18 in bfloat16 on
an H100, 53 converted between number formats, and 62 scaled clipped gradients.

Letters: P parameters, V variables. A block is a piece of one variable. Its row of the table has six numbers:
its variable; its first place in a vector ``[P]``; that among gradients of its type; how many elements it has
if its gradient is short, and if it is not (the other is 0); its first place in `ShortWeights.short`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from pfl_ext.data.transfer import sent
from pfl_ext.engine.layout import Layout
from pfl_ext.engine.short_weights import ShortWeights, padded
from pfl_ext.engine.training import LocalTraining

BLOCK = 4096
"""Most elements of a block."""
SUMMED = 1024
"""Blocks whose sums of squares are read at once."""


@triton.jit
def _places(table, BLOCK: tl.constexpr):
    """A block's places in a vector ``[P]``, which of them it has, and its variable."""
    row = table + tl.program_id(0) * 6
    count = tl.load(row + 3) + tl.load(row + 4)
    elements = tl.arange(0, BLOCK)
    return tl.load(row + 1) + elements, elements < count, tl.load(row)


@triton.jit
def _gradient(short, full, table, BLOCK: tl.constexpr):
    """A block's gradient in float32, and the row of its table."""
    row = table + tl.program_id(0) * 6
    origin, of_short, of_full = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    elements = tl.arange(0, BLOCK)
    g = tl.load(short + origin + elements, mask=elements < of_short, other=0.0).to(tl.float32)
    g += tl.load(full + origin + elements, mask=elements < of_full, other=0.0)
    return g, row


@triton.jit
def _squares(short, full, table, partial, BLOCK: tl.constexpr):
    g, _ = _gradient(short, full, table, BLOCK)
    tl.store(partial + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _factors(partial, first, factors, most, TOGETHER: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """The factor of each variable's gradient (``TOGETHER``: of all) whose norm is then at most ``most``."""
    variable = tl.program_id(0)
    start, end = tl.load(first + variable), tl.load(first + variable + 1)
    total = 0.0
    for step in tl.static_range(STEPS):
        blocks = start + step * BLOCK + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(partial + blocks, mask=blocks < end, other=0.0), 0)
    norm = tl.sqrt(total)
    if TOGETHER:
        factor = most / (norm + 1e-6)
        factor = tl.where(factor > 1.0, 1.0, factor)  # NaN stays NaN
    else:
        factor = tl.where(norm <= most, 1.0, most / norm)
    tl.store(factors + variable, factor)


@triton.jit
def _descend(
    short,
    full,
    table,
    clipping,
    rates,
    rate,
    source,
    weights,
    narrow,
    velocity,
    learning_rate,
    momentum,
    decay,
    CLIP: tl.constexpr,
    TOGETHER: tl.constexpr,
    DECAY: tl.constexpr,
    MOMENTUM: tl.constexpr,
    FIRST: tl.constexpr,
    RATES: tl.constexpr,
    READ: tl.constexpr,
    NARROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One SGD step from ``source`` to ``weights``, of which ``narrow`` becomes a copy in a shorter type."""
    g, row = _gradient(short, full, table, BLOCK)
    places, inside, variable = _places(table, BLOCK)
    w = tl.load(source + places, mask=inside, other=0.0)
    if CLIP:
        g *= tl.load(clipping + (0 if TOGETHER else variable))
    if DECAY:
        g += decay * w
    if MOMENTUM:
        if not FIRST:
            g += momentum * tl.load(velocity + places, mask=inside, other=0.0)
        tl.store(velocity + places, g, mask=inside)
    if RATES:
        g *= tl.load(rates + variable)
    if READ:
        g *= tl.load(rate)
    w -= learning_rate * g
    tl.store(weights + places, w, mask=inside)
    if NARROW:
        elements = tl.arange(0, BLOCK)
        there = tl.load(row + 5) + elements
        tl.store(narrow + there, w.to(narrow.dtype.element_ty), mask=elements < tl.load(row + 3))


@triton.jit
def _update_squares(local, start, table, partial, BLOCK: tl.constexpr):
    places, inside, _ = _places(table, BLOCK)
    moved = tl.load(local + places, mask=inside, other=0.0) - tl.load(start + places, mask=inside, other=0.0)
    tl.store(partial + tl.program_id(0), tl.sum(moved * moved, 0))


@triton.jit
def _by_variable(partial, first, squares, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    variable = tl.program_id(0)
    start, end = tl.load(first + variable), tl.load(first + variable + 1)
    total = tl.zeros((BLOCK,), tl.float64)
    for step in tl.static_range(STEPS):
        blocks = start + step * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(partial + blocks, mask=blocks < end, other=0.0).to(tl.float64)
    tl.store(squares + variable, tl.sum(total, 0))


@triton.jit
def _add(local, start, table, scales, sums, weight, BLOCK: tl.constexpr):
    places, inside, variable = _places(table, BLOCK)
    scale = tl.load(scales + variable)
    moved = tl.load(local + places, mask=inside, other=0.0) - tl.load(start + places, mask=inside, other=0.0)
    moved = tl.where(scale == 0, 0.0, weight * (moved * scale))  # a refused update may be infinite
    before = tl.load(sums + places, mask=inside, other=0.0)
    tl.store(sums + places, before + moved, mask=inside)


class Steps:
    """SGD steps on vectors ``[P]`` of one layout.

    Args:
        layout: of the V variables.
        short: which variables' gradients come in a shorter type than float32.
    """

    def __init__(self, layout: Layout, short: Sequence[bool]) -> None:
        self._forms, self._short = list(zip(layout.shapes, layout.strides)), list(short)
        rows, first, at, read, narrow = [], [0], 0, [0, 0], 0
        for variable, (size, is_short) in enumerate(zip(layout.sizes, short)):
            for done in range(0, size, BLOCK):
                count = min(BLOCK, size - done)
                counts = [count, 0] if is_short else [0, count]
                rows.append([variable, at + done, read[is_short] + done, *counts, narrow + done])
            at, read[is_short] = at + size, read[is_short] + size
            narrow += padded(size) if is_short else 0
            first.append(len(rows))
        tables = (torch.tensor(t, dtype=torch.int32) for t in (rows, first, [0, len(rows)]))
        self._table, self._first, self._all = (sent(table, layout.device) for table in tables)
        self._blocks, self._most = len(rows), max(b - a for a, b in pairwise(first))
        self._partial = torch.empty(len(rows), device=layout.device)
        self._factors = torch.empty(len(layout.sizes), device=layout.device)
        self._rates: dict[tuple[float, ...], Tensor] = {}

    @staticmethod
    def know(local: LocalTraining) -> bool:
        """Whether the steps of this training are done here."""
        return not local.mu and local.correction is None and local.adaptive is None

    def prepare(self, local: LocalTraining) -> None:
        """Make what a recording needs and must not make itself."""
        if local.factors and local.factors not in self._rates:
            self._rates[local.factors] = sent(torch.tensor(local.factors), self._table.device)

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor],
        local: LocalTraining,
        first: bool,
        source: Tensor,
        becomes: ShortWeights,
        velocity: Tensor | None,
        rate: Tensor | None,
    ) -> None:
        """Make one step, as `LocalTraining` says.

        Args:
            gradients: by variable.
            first: whether it is a user's first step, before which ``velocity`` has no meaning.
            source: ``[P]``, the weights at which the gradients are.
            becomes: becomes the weights after the step, in both types.
            velocity: ``[P]``, of momentum.
            rate: what the learning rate is multiplied by, of no dimensions.
        """
        flat = [_in_order(g, *form) for g, form in zip(gradients, self._forms)]
        parts = [[g for g, becomes in zip(flat, self._short) if becomes is kind] for kind in (True, False)]
        short, full = (torch.cat(part) if part else source for part in parts)
        clip, together = local.clipping != "none", local.clipping == "global"
        grid = (self._blocks,)
        if clip:
            _squares[grid](short, full, self._table, self._partial, BLOCK)
            blocks, most = (self._all, self._blocks) if together else (self._first, self._most)
            count = 1 if together else len(self._forms)
            options = together, SUMMED, triton.cdiv(most, SUMMED)
            _factors[(count,)](self._partial, blocks, self._factors, local.max_norm, *options)
        _descend[grid](
            short,
            full,
            self._table,
            self._factors,
            self._rates[local.factors] if local.factors else self._factors,
            self._factors if rate is None else rate,
            source,
            becomes.weights,
            becomes.weights if becomes.short is None else becomes.short,
            becomes.weights if velocity is None else velocity,
            local.learning_rate,
            local.momentum,
            local.weight_decay,
            clip,
            together,
            local.weight_decay > 0,
            velocity is not None,
            first,
            bool(local.factors),
            rate is not None,
            becomes.short is not None,
            BLOCK,
        )

    def rehearse(self, sums: Tensor, weights: Tensor) -> None:
        """Launch what private users need, so that no two threads are the first to; nothing is added."""
        norms = self.squared_norms(weights, weights)
        self.add(weights, weights, torch.zeros_like(norms), 0.0, sums)

    def squared_norms(self, local: Tensor, start: Tensor) -> Tensor:
        """Squared norms of the variables of an update, ``local - start``: ``[V]`` float64."""
        _update_squares[(self._blocks,)](local, start, self._table, self._partial, BLOCK)
        squares = torch.empty(len(self._forms), dtype=torch.float64, device=local.device)
        options = SUMMED, triton.cdiv(self._most, SUMMED)
        _by_variable[(len(self._forms),)](self._partial, self._first, squares, *options)
        return squares

    def add(self, local: Tensor, start: Tensor, scales: Tensor, weight: float, sums: Tensor) -> None:
        """Add an update, ``local - start``, to ``sums`` ``[P]``, times a weight and each variable's scale.

        Where a scale is 0, nothing is added, also if the update is not finite.
        """
        scales = scales.float().contiguous()
        _add[(self._blocks,)](local, start, self._table, scales, sums, weight, BLOCK)


def _in_order(gradient: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """The elements in the order in which a vector has them."""
    if any(a != b for a, b, n in zip(gradient.stride(), strides, shape) if n > 1):
        there = torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device)
        gradient = there.copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,), gradient.storage_offset())
