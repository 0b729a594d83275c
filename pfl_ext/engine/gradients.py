"""The gradients of many users for one variable, without making each of them where that can be spared.

Letters: U users, B images of all users one after another, T positions of a layer's output, p inputs and d
outputs of a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pfl_ext.engine.cpu_layers import Convolution
from pfl_ext.engine.norms import squared_norm, squared_norms
from pfl_ext.transfer import sent

PASS = 100
"""Cost of writing a number of a user's gradient and reading it twice, in floating-point operations: below
it a Gram matrix is the cheaper way to a norm (an estimate for CPUs)."""
GRAM = 128  # positions that share one Gram matrix, if they are of several users


@dataclass(frozen=True)
class Users:
    """Whose the B images of a pass are: user u has the images ``starts[u]:starts[u + 1]``."""

    starts: tuple[int, ...]
    device: torch.device

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def spans(self) -> list[slice]:
        """Each user's images."""
        return [slice(a, b) for a, b in pairwise(self.starts)]

    def per_image(self, values: Tensor) -> Tensor:
        """``[U, ...]`` -> ``[B, ...]``."""
        return values[self._owners]

    @cached_property
    def _owners(self) -> Tensor:
        """``[B]``: whose each image is."""
        counts = torch.tensor([span.stop - span.start for span in self.spans])
        return sent(torch.arange(len(self)).repeat_interleave(counts), self.device)

    def sums(self, values: Tensor) -> Tensor:
        """Sums over each user's images: ``[B, ...]`` -> ``[U, ...]``."""
        return torch.stack([values[span].sum(0) for span in self.spans])


class Gradient:
    """The gradients of U users for one variable, in whatever form; add up to ``sum_u c_u g_u``."""

    def norm_bounds(self) -> Tensor | None:
        """Upper bounds of the U norms, float64, where they are cheaper than the norms."""
        return None

    def squared_norms(self) -> Tensor:
        """``[U]`` float64."""
        raise NotImplementedError

    def add_to(self, total: Tensor, coefficients: Tensor) -> None:
        """``total += sum_u coefficients[u] g_u``, ``[U]``."""
        raise NotImplementedError

    def refuse(self, users: Sequence[int]) -> None:
        """Make the gradients of these users zero, whatever they hold."""
        raise NotImplementedError


@dataclass
class Explicit(Gradient):
    """Of a small variable: ``[U, ...]``."""

    gradients: Tensor

    def squared_norms(self) -> Tensor:
        """``[U]`` float64."""
        return squared_norms(self.gradients)

    def add_to(self, total: Tensor, coefficients: Tensor) -> None:
        """One product."""
        c = coefficients.to(self.gradients.device, torch.float32)
        total.add_((c @ self.gradients.flatten(1).float()).view(total.shape))

    def refuse(self, users: Sequence[int]) -> None:
        """In place."""
        self.gradients[list(users)] = 0


@dataclass
class Weight(Gradient):
    """Of a convolution's or a linear layer's weights: input ``x`` ``[B, ...]``, output gradient ``e``."""

    layer: nn.Conv2d | nn.Linear
    x: Tensor
    e: Tensor
    users: Users
    _own: list[Tensor] = field(default_factory=list)

    @property
    def _positions(self) -> int:
        return self.e[0].numel() // self.layer.weight.shape[0]

    @property
    def by_gram(self) -> bool:
        """Whether norms come from Gram matrices, or from the users' gradients themselves."""
        weight = self.layer.weight
        if isinstance(self.layer, nn.Conv2d) and self.layer.groups > 1:
            return False
        d, p = weight.shape[0], weight[0].numel()
        squares = sum(((s.stop - s.start) * self._positions) ** 2 for s in self.users.spans)
        return bool(2 * (p + d) * squares < PASS * weight.numel() * len(self.users))

    def _gradient(self, x: Tensor, e: Tensor) -> Tensor:
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return e.reshape(-1, e.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        made: Tensor = convolution_backward(layer, x, e, (False, True))[1]
        return made

    def norm_bounds(self) -> Tensor | None:
        """``sum over a user's positions t of |x_t| |e_t|``, x_t being what the kernel meets there."""
        layer = self.layer
        channel = -1 if isinstance(layer, nn.Linear) else 1
        given, e = (t.float().square().sum(channel) for t in (self.x, self.e))  # torch's norm is slow here
        if isinstance(layer, nn.Conv2d):
            ones = torch.ones(1, 1, *layer.kernel_size, device=e.device)
            given = F.conv2d(given[:, None], ones, None, layer.stride, layer.padding, layer.dilation)[:, 0]
        products = (given.clamp(min=0) * e).sqrt().reshape(len(e), -1).sum(1)
        bounds: Tensor = self.users.sums(products.double()) * 1.001
        return bounds

    def squared_norms(self) -> Tensor:
        """By Gram matrices, or from the gradients themselves, which are then kept for `add_to`."""
        if self.by_gram:
            return self._gram_norms()
        self._own = [self._gradient(self.x[span], self.e[span]) for span in self.users.spans]
        return torch.stack([squared_norm(g) for g in self._own])

    def _gram_norms(self) -> Tensor:
        """``sum over positions s, t of (x_s . x_t)(e_s . e_t)``, neighbours sharing a matrix while small."""
        columns, signals = self._columns(), self._signals()
        out, start, count = [], 0, self._positions
        starts = self.users.starts
        while start < len(self.users):
            stop = start + 1
            while stop < len(self.users) and (starts[stop + 1] - starts[start]) * count <= GRAM:
                stop += 1
            rows = slice(starts[start] * count, starts[stop] * count)
            a, e = columns[rows], signals[rows]
            product = (a @ a.T).mul_(e @ e.T)
            edges = [(starts[u] - starts[start]) * count for u in range(start, stop + 1)]
            out += [product[i:j, i:j].double().sum() for i, j in pairwise(edges)]
            start = stop
        return torch.stack(out).clamp_(min=0)

    def _columns(self) -> Tensor:
        """``[B T, p]`` float32."""
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return self.x.reshape(-1, self.x.shape[-1]).float()
        x = self.x.float()
        if layer.kernel_size == (1, 1) and layer.padding == (0, 0):
            x = x[:, :, :: layer.stride[0], :: layer.stride[1]]
            return x.permute(0, 2, 3, 1).reshape(-1, x.shape[1])
        assert not isinstance(layer.padding, str)
        x = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        return x.transpose(1, 2).reshape(-1, x.shape[1])

    def _signals(self) -> Tensor:
        """``[B T, d]`` float32."""
        e = self.e.float()
        if isinstance(self.layer, nn.Linear):
            return e.reshape(-1, e.shape[-1])
        return e.permute(0, 2, 3, 1).reshape(-1, e.shape[1])

    def add_to(self, total: Tensor, coefficients: Tensor) -> None:
        """From the gradients if they were made, else in one dense product in float32."""
        if self._own:
            on_cpu = total.device.type == "cpu"
            for c, g in zip(coefficients.float().tolist() if on_cpu else coefficients.float(), self._own):
                if on_cpu:
                    total.add_(g, alpha=c)
                else:
                    total.add_(g * c)
            return
        c = self.users.per_image(coefficients.to(self.e.device, torch.float32))
        x, e = self.x.float(), self.e.float()
        total.add_(self._gradient(x, e * c.view(-1, *[1] * (e.ndim - 1))))

    def add_evenly(self, total: Tensor, coefficients: Tensor) -> None:
        """`add_to` in the precision of the pass, where no bound depends on the sum."""
        c = self.users.per_image(coefficients.to(self.e.device, torch.float32))
        weighted = self.e * c.view(-1, *[1] * (self.e.ndim - 1)).to(self.e.dtype)
        total.add_(self._gradient(self.x.to(self.e.dtype), weighted))

    def refuse(self, users: Sequence[int]) -> None:
        """In place: inputs too, as zero times infinity is not zero."""
        for user in users:
            self.x[self.users.spans[user]] = 0
            self.e[self.users.spans[user]] = 0
            if self._own:
                self._own[user].zero_()


def convolution_backward(
    layer: nn.Conv2d, x: Tensor, e: Tensor, wanted: tuple[bool, bool]
) -> tuple[Any, Any]:
    """Gradients of a convolution's input and weights, of which only those ``wanted`` are tensors."""
    if isinstance(layer, Convolution) and layer.takes(x) and e.dtype == x.dtype:
        return layer.gradients(x, e, wanted)
    out = torch.ops.aten.convolution_backward(
        e,
        x.to(e.dtype),
        layer.weight.to(e.dtype),
        None,
        layer.stride,
        layer.padding,
        layer.dilation,
        False,
        [0, 0],
        layer.groups,
        [*wanted, False],
    )
    return out[0], out[1]
