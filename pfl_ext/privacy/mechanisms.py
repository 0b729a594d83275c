"""Clipping and Gaussian noise on a whole update at once, as a pfl mechanism.

Letters: P parameters, G layers, C bound of one update's L2 norm.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from pfl.hyperparam import HyperParamClsOrFloat
from pfl.hyperparam.base import get_param_value
from pfl.metrics import Metrics, StringMetricName, Weighted
from pfl.privacy.privacy_mechanism import CentrallyApplicablePrivacyMechanism
from pfl.stats import MappedVectorStatistics
from pydantic import Field
from torch import Tensor

from dataset.arrays import Float32Array
from pfl_ext.randomness import stream

Clipping = Literal["flat", "per_layer"]

ROW = 1024  # norms are summed in float32 within rows of so many elements, in float64 across rows
MARGIN = 2.0**-14
"""Relative margin that is kept from a bound. Rounding in a row of 1024 is at most 2^-15 of a norm; that of a
sum clipped by norms in float64 (`engine.gradients`) is kept below this; that of scales is at most 2^-22."""
LARGEST = 1e19
"""Norm above which an update is refused: squares would overflow float32, scales underflow."""
BOUND_RANGE = (1e-9, 1e9)
"""Least and largest clipping bound. Numbers below 2^-63 do not count in a norm, since their squares underflow
float32. 10^9 of them are 3e-15 long, which adds less than 1e-11 of its length to a vector as long as such a
bound."""
ClippingBound = Annotated[float, Field(ge=BOUND_RANGE[0], le=BOUND_RANGE[1])]
NOISE_CHUNK = 2**20


@dataclass(frozen=True)
class Clipped:
    """A clipped update. Scalars are 0-dim tensors on the update's device, not yet read."""

    tensors: list[Tensor]  # float32, shapes as given
    norm: Tensor  # float64, before clipping
    whole: Tensor  # bool: no layer exceeded its bound
    finite: Tensor  # bool: otherwise the tensors are zero


def layers_of(names: Sequence[str], clipping: Clipping) -> list[int]:
    """The number of successive tensors in each layer: all in one for ``flat``, else those of one module."""
    if clipping == "flat":
        return [len(names)]
    return [len(list(run)) for _, run in groupby(names, key=lambda name: name.rpartition(".")[0])]


def layer_limit(bound: float, layers: int, order: int = 2) -> float:
    """The largest norm of each of ``layers`` layers for which all together are within ``bound``.

    Raises:
        ValueError: for a bound outside `BOUND_RANGE`.
    """
    if not BOUND_RANGE[0] <= bound <= BOUND_RANGE[1]:
        raise ValueError(f"the clipping bound is {bound}: it must lie in {BOUND_RANGE}")
    return bound * (1 - MARGIN) / float(layers ** (1 / order))


@torch.no_grad()
def clip(tensors: Sequence[Tensor], layers: Sequence[int], bound: float, order: int = 2) -> Clipped:
    """New float32 tensors with a joint L2 norm of at most ``bound``, and each layer's of ``bound / sqrt(G)``.

    With ``order`` 1, the joint L1 norm is at most ``bound``, and that of each layer ``bound / G``.

    The bound holds exactly, measured in float64, for inputs of any precision: a margin of 2^-14 leaves room
    for rounding. Shorter tensors are not changed. NaN, infinity and a norm above 1e19 make the whole update
    zero. Nothing is read back from a GPU.

    Raises:
        ValueError: for a bound outside `BOUND_RANGE`.
    """
    device, parts, places, rows_of_layer, start, end = tensors[0].device, [], [], [], 0, 0
    for count in layers:
        first = end
        for tensor in tensors[start : start + count]:
            parts.append(tensor.detach().reshape(-1).float())
            places.append(end)
            end += tensor.numel()
        parts.append(torch.zeros(-end % ROW, device=device))  # so that a row has only one layer
        end += -end % ROW
        rows_of_layer.append((end - first) // ROW)
        start += count
    rows = torch.cat(parts).view(-1, ROW)
    row_norms = torch.linalg.vector_norm(rows, order, dim=1, dtype=torch.float64 if order == 1 else None)
    split = list(torch.split(row_norms.double(), rows_of_layer))
    norms = torch.stack(torch._foreach_norm(split, order))  # [G]
    limit = layer_limit(bound, len(layers), order)
    over = norms > limit
    finite = (norms <= LARGEST).all()  # not so for NaN
    scales = torch.where(over, limit / norms, 1.0).float()
    torch._foreach_mul_(list(torch.split(rows, rows_of_layer)), list(scales.unbind()))
    if device.type != "cpu":
        rows.masked_fill_(~finite, 0.0)
    elif not bool(finite):
        rows.zero_()
    flat = rows.view(-1)
    out = [flat[place : place + t.numel()].view(t.shape) for place, t in zip(places, tensors)]
    return Clipped(out, torch.linalg.vector_norm(norms, order), ~over.any(), finite)


def in_chunks(size: int, threads: int, draw: Callable[[int, Float32Array], None]) -> Tensor:
    """``[size]`` float32 on the CPU; ``draw(chunk number, part)`` fills each `NOISE_CHUNK` numbers."""
    out = np.empty(size, np.float32)
    chunks = range(-(-size // NOISE_CHUNK))

    def fill(chunk: int) -> None:
        draw(chunk, out[chunk * NOISE_CHUNK : (chunk + 1) * NOISE_CHUNK])

    if min(threads, len(chunks)) <= 1:  # a thread costs more than a small user's noise
        for chunk in chunks:
            fill(chunk)
    else:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill, chunks))
    return torch.from_numpy(out)


def gaussian_noise(seed: int, size: int, threads: int = 1) -> Tensor:
    """``[size]`` standard normal float32 on the CPU, a function of ``seed`` alone (any number of bits).

    It is the same on every worker and for every device. Threads only share the work: each chunk of 2^20
    numbers has its own stream. Measured on one core: 16 ns a value.
    """

    def draw(chunk: int, out: Float32Array) -> None:
        stream(seed, "gaussian noise", chunk).standard_normal(dtype=np.float32, out=out)

    return in_chunks(size, threads, draw)


class VectorMechanism(CentrallyApplicablePrivacyMechanism, ABC):
    """Clipping and noise on a whole update as one vector, in the two steps of pfl's mechanisms.

    A device uses both steps. `pfl_ext.privacy.central.NoisyMean` uses the clipping, and draws the noise on
    the sum by itself.

    Args:
        clipping_bound: C, a bound of the norm of order `order`.
        clipping: whether the bound limits the whole update or each layer.
    """

    order: ClassVar[int]
    """Order of the norm that is clipped."""
    unit_std: ClassVar[float]
    """Standard deviation of the noise at scale 1."""

    def __init__(self, clipping_bound: HyperParamClsOrFloat, *, clipping: Clipping = "flat") -> None:
        self._clipping_bound, self._clipping = clipping_bound, clipping

    @property
    def bound(self) -> float:
        """C."""
        return float(get_param_value(self._clipping_bound))

    @property
    @abstractmethod
    def scale(self) -> float:
        """The current scale of the noise."""

    @abstractmethod
    def unit_noise(self, seed: int, size: int) -> Tensor:
        """``[size]`` float32 of scale 1 on the CPU, a function of ``seed`` alone."""

    def clip(self, statistics: MappedVectorStatistics) -> Clipped:
        """Clip in place (the mapping, not the tensors)."""
        names = list(statistics.keys())
        layers = layers_of(names, self._clipping)
        clipped = clip(list(statistics.values()), layers, self.bound, self.order)
        for name, tensor in zip(names, clipped.tensors):
            statistics[name] = tensor
        return clipped

    @torch.no_grad()
    def add(
        self,
        statistics: MappedVectorStatistics,
        noise: Tensor,
        unit_std: float,
        name_formatting_fn: Callable[[str], StringMetricName] = StringMetricName,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Add noise ``[P]`` of this standard deviation, times `scale`, in place (the mapping)."""
        names, tensors, std = list(statistics.keys()), list(statistics.values()), self.scale * unit_std
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
        signal = float(torch.linalg.vector_norm(flat))
        flat.add_(noise.to(flat.device), alpha=self.scale)
        for name, tensor, part in zip(names, tensors, torch.split(flat, [t.numel() for t in tensors])):
            statistics[name] = part.view(tensor.shape)
        expected = std * math.sqrt(flat.numel())
        return statistics, Metrics(
            [
                (name_formatting_fn("DP noise std. dev."), Weighted.from_unweighted(std)),
                (name_formatting_fn("signal-to-DP-noise ratio"), Weighted.from_unweighted(signal / expected)),
            ]
        )

    def constrain_sensitivity(
        self,
        statistics: MappedVectorStatistics,
        name_formatting_fn: Callable[[str], StringMetricName] = StringMetricName,
        seed: int | None = None,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Clip, and report the norm and whether it was clipped."""
        clipped = self.clip(statistics)
        finite = bool(clipped.finite)
        metrics = [
            (f"l{self.order} norm bound", self.bound, 1),
            ("fraction of clipped norms", float(not clipped.whole), 1),
            ("refused updates", float(not finite), 1),
            ("norm before clipping", float(clipped.norm) if finite else 0.0, int(finite)),
        ]
        return statistics, Metrics([(name_formatting_fn(n), Weighted(v, w)) for n, v, w in metrics])

    def add_noise(
        self,
        statistics: MappedVectorStatistics,
        cohort_size: int,
        name_formatting_fn: Callable[[str], StringMetricName] = StringMetricName,
        seed: int | None = None,
    ) -> tuple[MappedVectorStatistics, Metrics]:
        """Add noise that is a function of ``seed``, in place (the mapping, not the tensors)."""
        assert seed is not None, "noise without a seed would differ between workers"
        noise = self.unit_noise(seed, sum(t.numel() for t in statistics.values()))
        return self.add(statistics, noise, self.unit_std, name_formatting_fn)


class FlatGaussianMechanism(VectorMechanism):
    """Gaussian noise on an update that is clipped in L2 norm; its standard deviation is relative to C."""

    order, unit_std = 2, 1.0

    def __init__(
        self,
        clipping_bound: HyperParamClsOrFloat,
        relative_noise_stddev: float,
        *,
        clipping: Clipping = "flat",
    ) -> None:
        super().__init__(clipping_bound, clipping=clipping)
        self._relative_noise_stddev = relative_noise_stddev

    @property
    def scale(self) -> float:
        """The standard deviation."""
        return self.bound * self._relative_noise_stddev

    def unit_noise(self, seed: int, size: int) -> Tensor:
        """`gaussian_noise`."""
        return gaussian_noise(seed, size)

    def user_scales(
        self, names: Sequence[str], squared_norms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`clip` for U users at once, from the squared norms ``[U, V]`` of their V variables.

        Returns factors ``[U, V]``, 0 for a refused user; norms ``[U]``; whether each was whole; and finite.
        """
        counts = layers_of(names, self._clipping)
        together = len(counts) == 1  # which a GPU does in few launches
        parts = [squared_norms] if together else torch.split(squared_norms, counts, 1)
        layers = torch.cat([part.sum(1, keepdim=True) for part in parts], 1)  # [U, G]
        norms = layers.sqrt()
        limit = layer_limit(self.bound, len(counts))
        over, finite = norms > limit, (norms <= LARGEST).all(1)
        scales = torch.where(finite[:, None], torch.where(over, limit / norms, 1.0), 0.0)
        if together:
            return scales.expand(-1, counts[0]), norms[:, 0], ~over[:, 0], finite
        return (
            torch.cat([scale[:, None].expand(-1, n) for scale, n in zip(scales.unbind(1), counts)], 1),
            layers.sum(1).sqrt(),
            ~over.any(1),
            finite,
        )
