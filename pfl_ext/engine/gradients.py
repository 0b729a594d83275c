"""The gradients of many users for one variable, without computing each of them where that is not needed.

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

from pfl_ext.data.transfer import sent
from pfl_ext.engine.cpu.convolutions import Convolution, FewChannels, by_torch
from pfl_ext.engine.cpu.depthwise import Depthwise
from pfl_ext.privacy.mechanisms import MARGIN

ROW = 1024  # squares are summed in float32 within rows of so many numbers, in float64 across rows
PASS = 100
"""Cost of writing a number of a user's gradient and reading it twice, in floating-point operations. A Gram
matrix that costs less is the cheaper way to a norm (an estimate for CPUs)."""
GRAM = 128  # positions of one Gram matrix that several users share
UNIT = 2.0**-24  # of rounding, in float32
LARGEST_INPUT = 1e15  # norm of an input above which its product with a subnormal number counts


@dataclass(frozen=True)
class Users:
    """The owners of the B images of a pass: user u has the images ``starts[u]:starts[u + 1]``."""

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
        """``[B]``: the owner of each image."""
        counts = torch.tensor([span.stop - span.start for span in self.spans])
        return sent(torch.arange(len(self)).repeat_interleave(counts), self.device)

    def sums(self, values: Tensor) -> Tensor:
        """Sums over each user's images: ``[B, ...]`` -> ``[U, ...]``."""
        return torch.stack([values[span].sum(0) for span in self.spans])


class Gradient:
    """The gradients g_u of U users for one variable, in some form that can add up ``sum_u c_u g_u``."""

    def norm_bounds(self) -> Tensor | None:
        """Upper bounds of the U norms, float64; None where they are not cheaper than the norms."""
        return None

    def squared_norms(self) -> Tensor:
        """``[U]`` float64."""
        raise NotImplementedError

    def add_to(self, total: Tensor, coefficients: Tensor) -> None:
        """``total += sum_u coefficients[u] g_u``, with coefficients ``[U]``."""
        raise NotImplementedError

    def add_evenly(self, total: Tensor, coefficients: Tensor) -> None:
        """`add_to` in the precision of the pass, where no bound depends on the sum."""
        self.add_to(total, coefficients)

    def refuse(self, users: Sequence[int]) -> None:
        """Make the gradients of these users zero, whatever they hold."""
        raise NotImplementedError


@dataclass
class Explicit(Gradient):
    """Gradients of a small variable, stored as ``[U, ...]``."""

    gradients: Tensor

    def squared_norms(self) -> Tensor:
        """``[U]`` float64."""
        return squared_norms(self.gradients)

    def add_to(self, total: Tensor, coefficients: Tensor) -> None:
        """Add them in one product."""
        c = coefficients.to(self.gradients.device, torch.float32)
        total.add_((c @ self.gradients.flatten(1).float()).view(total.shape))

    def refuse(self, users: Sequence[int]) -> None:
        """Set them to zero in place."""
        self.gradients[list(users)] = 0


@dataclass
class Weight(Gradient):
    """Gradients of a convolution's or linear layer's weights, from input ``x`` and output gradient ``e``."""

    layer: nn.Conv2d | nn.Linear
    x: Tensor
    e: Tensor
    users: Users
    _computed: dict[int, Tensor] = field(default_factory=dict)

    @property
    def _positions(self) -> int:
        return self.e[0].numel() // self.layer.weight.shape[0]

    @property
    def by_gram(self) -> bool:
        """Whether norms are computed from Gram matrices instead of the users' gradients.

        Never on a GPU: the CPU would have to wait to learn for which users a Gram matrix is not exact enough.
        """
        weight = self.layer.weight
        if self.e.device.type != "cpu":
            return False
        if isinstance(self.layer, nn.Conv2d) and self.layer.groups > 1:
            return False
        d, p = weight.shape[0], weight[0].numel()
        count = self._positions
        squares = sum(((stop - start) * count) ** 2 for start, stop in pairwise(self.users.starts))
        return bool(2 * (p + d) * squares < PASS * weight.numel() * len(self.users))

    def _gradient(self, x: Tensor, e: Tensor) -> Tensor:
        layer = self.layer
        if isinstance(layer, nn.Linear):
            return e.reshape(-1, e.shape[-1]).T @ x.reshape(-1, x.shape[-1])
        gradient: Tensor = convolution_backward(layer, x, e, (False, True))[1]
        return gradient

    def norm_bounds(self) -> Tensor | None:
        """``sum over a user's positions t of |x_t| |e_t|``, with x_t the kernel's inputs at t."""
        layer = self.layer
        channel = -1 if isinstance(layer, nn.Linear) else 1
        inputs, e = (t.float().square().sum(channel) for t in (self.x, self.e))  # torch's norm is slow here
        if isinstance(layer, nn.Conv2d):
            ones = torch.ones(1, 1, *layer.kernel_size, device=e.device)
            inputs = F.conv2d(inputs[:, None], ones, None, layer.stride, layer.padding, layer.dilation)[:, 0]
        products = (inputs.clamp(min=0) * e).sqrt().reshape(len(e), -1).sum(1)
        bounds: Tensor = self.users.sums(products.double()) * 1.001
        return bounds

    def squared_norms(self) -> Tensor:
        """Squared norms by Gram matrices, or from the users' gradients, which are then kept for `add_to`."""
        if self.by_gram:
            found, reliable = self._gram_norms()
            explicit = (~reliable).nonzero().flatten().tolist()
        else:
            found = torch.empty(len(self.users), dtype=torch.float64, device=self.e.device)
            explicit = list(range(len(self.users)))
        for user in explicit:
            span = self.users.spans[user]
            self._computed[user] = self._gradient(self.x[span], self.e[span]).float()
            found[user] = squared_norm(self._computed[user])
        return found

    def _gram_norms(self) -> tuple[Tensor, Tensor]:
        """``sum over positions s, t of (x_s . x_t)(e_s . e_t)`` and whether it is exact enough, both ``[U]``.

        These sums are float64, but `add_to` adds in float32. There a user's product of T positions has an
        error of at most ``(T + 2) UNIT sum over t of |x_t| |e_t|``, in any order of the sum (Higham 2002,
        section 3.1; one rounding for the coefficient and one for its product with ``e``). Where positions
        cancel, the error may exceed the margin of the norm. Then the user's gradient must be computed.
        """
        columns, signals = self._columns(), self._signals()
        starts, count = self.users.starts, self._positions
        if count == 1 and starts == tuple(range(len(self.users) + 1)):
            return _single_norms(columns, signals)
        norms, reliable, start = [], [], 0
        while start < len(self.users):
            stop = start + 1
            while stop < len(self.users) and (starts[stop + 1] - starts[start]) * count <= GRAM:
                stop += 1
            rows = slice(starts[start] * count, starts[stop] * count)
            a, e = columns[rows].double(), signals[rows].double()
            inputs = a @ a.T
            product = inputs * (e @ e.T)
            edges = [(starts[u] - starts[start]) * count for u in range(start, stop + 1)]
            for i, j in pairwise(edges):
                square = product[i:j, i:j].sum().clamp(min=0)
                error = (j - i + 2) * UNIT * product.diagonal()[i:j].clamp(min=0).sqrt().sum()
                normal = inputs.diagonal()[i:j].amax() <= LARGEST_INPUT**2
                norms.append(square)
                reliable.append((error <= MARGIN * square.sqrt()) & normal)
            start = stop
        return torch.stack(norms), torch.stack(reliable)

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
        """Add computed gradients one by one, and the others in one dense product in float32."""
        on_cpu = total.device.type == "cpu"
        factors = coefficients.to(self.e.device, torch.float32)
        for user, gradient in self._computed.items():
            if on_cpu:
                total.add_(gradient, alpha=float(factors[user]))
            else:
                total.add_(gradient * factors[user])
        if len(self._computed) == len(self.users):
            return
        if self._computed:
            factors[list(self._computed)] = 0
        c = self.users.per_image(factors)
        if self.by_gram:
            signals = self._signals() * c.repeat_interleave(self._positions)[:, None]
            total.add_((signals.T @ self._columns()).view(total.shape))
        else:  # no norms were asked for
            e = self.e.float() * c.view(-1, *[1] * (self.e.ndim - 1))
            total.add_(self._gradient(self.x.float(), e))

    def add_evenly(self, total: Tensor, coefficients: Tensor) -> None:
        """`add_to` in the precision of the pass, where no bound depends on the sum."""
        c = self.users.per_image(coefficients.to(self.e.device, torch.float32))
        weighted = self.e * c.view(-1, *[1] * (self.e.ndim - 1)).to(self.e.dtype)
        total.add_(self._gradient(self.x.to(self.e.dtype), weighted))

    def refuse(self, users: Sequence[int]) -> None:
        """Set them to zero in place. Inputs are zeroed too, since zero times infinity is not zero."""
        for user in users:
            self.x[self.users.spans[user]] = 0
            self.e[self.users.spans[user]] = 0
            if user in self._computed:
                self._computed[user].zero_()


def _single_norms(columns: Tensor, signals: Tensor) -> tuple[Tensor, Tensor]:
    """`Weight._gram_norms` for users with one position each, whose Gram matrix is a single number."""
    inputs, e = (torch.linalg.vector_norm(t, dim=1, dtype=torch.float64) for t in (columns, signals))
    norms = inputs * e
    return norms.square(), (3 * UNIT * norms <= MARGIN * norms) & (inputs <= LARGEST_INPUT)


def convolution_backward(
    layer: nn.Conv2d, x: Tensor, e: Tensor, wanted: tuple[bool, bool]
) -> tuple[Any, Any]:
    """Gradients of a convolution's input and weights. Those that are not ``wanted`` are not tensors."""
    if isinstance(layer, Convolution | FewChannels | Depthwise) and layer.takes(x) and e.dtype == x.dtype:
        return layer.gradients(x, e, wanted)
    return by_torch(layer, x, e, wanted)


def squared_norm(x: Tensor) -> Tensor:
    """The squared norm of ``x``, float64, without a sync. Its relative rounding error is at most 2^-15."""
    flat = x.detach().reshape(-1).float()
    whole = len(flat) - len(flat) % ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, ROW), dim=1).double()
    rest = torch.linalg.vector_norm(flat[whole:]).double()
    total: Tensor = rows.square().sum() + rest.square()
    return total


def squared_norms_of(variables: list[Tensor]) -> Tensor:
    """Squared norms of V variables, ``[V]`` float64. A GPU sums in a tree, which is more exact than rows."""
    if variables[0].device.type == "cpu":
        return torch.stack([squared_norm(v) for v in variables])
    return torch.stack(list(torch._foreach_norm(variables))).double().square()


def squared_norms(xs: Tensor) -> Tensor:
    """The squared norm of each ``xs[u]``: ``[U, ...]`` -> ``[U]`` float64. For small variables."""
    return xs.detach().flatten(1).double().square().sum(1)
