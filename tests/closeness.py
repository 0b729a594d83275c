"""When two results of floating-point arithmetic count as the same, on any processor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Vector = Tensor | np.ndarray[Any, Any] | Mapping[str, Tensor] | Sequence[Tensor]


def assert_close_as_vector(actual: Vector, expected: Vector, roundings: float) -> None:
    """``|actual - expected| <= roundings u |expected|``, in the norm of the whole vector.

    Processors differ in the order of sums, in whether a product and a sum are rounded together, and in exp.
    This changes a single element without limit where terms cancel, but the whole vector by some units u.

    Args:
        actual: what the code computed; several tensors are one vector.
        expected: the same shapes, by the same names, in the same or in a wider format.
        roundings: how often a value is rounded on its way from the inputs, on both sides together. A sum of n
            terms counts n, and an element-wise function of the library counts 4.

    Raises:
        AssertionError: with the distance in units u; for other shapes; for values that are not finite.
    """
    ours, theirs = tensors(actual), tensors(expected)
    assert ours.keys() == theirs.keys(), f"{sorted(ours)} instead of {sorted(theirs)}"
    for name, tensor in theirs.items():
        assert ours[name].shape == tensor.shape, f"{name}: {ours[name].shape} instead of {tensor.shape}"
    unit = max(torch.finfo(t.dtype).eps / 2 for t in (*ours.values(), *theirs.values()) if t.numel())
    gap = norm([ours[name].double() - theirs[name].double() for name in theirs])
    size = norm(list(theirs.values()))
    allowed = roundings * unit * size if math.isfinite(size) else -1.0
    assert gap <= allowed, (
        f"apart by {gap / max(unit * size, 1e-300):.3g} units of rounding, where {roundings:g} are allowed"
    )


def tensors(vector: Vector) -> dict[str, Tensor]:
    """Its parts by name."""
    if isinstance(vector, Mapping):
        return {name: tensor.detach() for name, tensor in vector.items()}
    parts = [vector] if isinstance(vector, Tensor | np.ndarray) else vector
    return {str(i): torch.as_tensor(part).detach() for i, part in enumerate(parts)}


def norm(parts: Sequence[Tensor]) -> float:
    """L2 norm of all parts as one vector, in float64."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))
