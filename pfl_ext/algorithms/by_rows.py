"""Closed forms that add up many users in one product.

Here a user sends a sum over its images of products of two rows, ``sum_i a_i b_i'``. Each user's sum is scaled
by a factor c_u, which is 1 or comes from clipping. Then the sum over all users is a sum of scaled rows,

    sum_u c_u sum_{i of u} a_i b_i' = sum_i (c_i a_i) b_i',   with c_i the factor of the user of image i,

so no user's own matrix is computed. A user's norm follows from its rows.

Privacy is argued in `pfl_ext.algorithms.closed_form`: each user's vector is scaled to a norm of at most the
bound, by a factor that depends on no other user's images. Rows, norms and sums are float64. Their rounding
error is far below the margin of 2^-14 that is kept from the bound (`pfl_ext.privacy.mechanisms`). A user
whose norm is not finite is left out, with its rows.

Shape letters: B images, one user's after another's; D features; K labels.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from pfl_ext.algorithms.closed_form import ClosedForm, Sums, UserByUser
from pfl_ext.backend import AddsUsers
from pfl_ext.data.federated_dataset import FederatedImageDataset, Member
from pfl_ext.data.user_images import UserImages
from pfl_ext.privacy.central import PrivateMean

BLOCK = 1024
"""Rows of a product. A user with more of them is clipped by the matrix that it would send."""


class ByRows(ClosedForm):
    """A closed form whose users send sums of products of rows."""

    @abstractmethod
    def of_scaled(self, features: Tensor, labels: Tensor, factors: Tensor) -> Sums:
        """`of_batch`, with the term of image b times ``factors[b]``; ``factors`` ``[B]`` are above 0."""

    def squared_norm(self, features: Tensor, labels: Tensor) -> Tensor:
        """The squared norm of `of_batch` for all images of one user."""
        return _squared_norm(self.of_batch(features, labels))

    def asking(self) -> UserByUser:
        """What the backend asks: many users at a time where it can."""
        return _Together(self)


class _Together(UserByUser, AddsUsers):
    """What the backend asks: the sum over many users."""

    def __init__(self, algorithm: ByRows) -> None:
        super().__init__(algorithm)
        self._by_rows = algorithm

    @torch.no_grad()
    def sum_of(
        self, users: FederatedImageDataset, members: Sequence[Member], scaling: PrivateMean | None
    ) -> tuple[Sums, Tensor]:
        """The sum over users, and the tallies of the users who have images."""
        form = self._by_rows
        total = _Total(form, scaling)
        for first in range(0, len(members), BLOCK):
            group = members[first : first + BLOCK]
            batch = users.single_features(group)
            if batch is not None:
                total.add(*form.rows_of(batch), [1] * len(group))
                continue
            for images in users.read_all([member for member in group if member.num_images]):
                if scaling is None:
                    _add_batches(total, form, images)
                elif len(images) > BLOCK:
                    alone = _Total(form, None)
                    _add_batches(alone, form, images)
                    total.add_sums(alone.finished())
                else:
                    features, labels = (torch.cat(parts) for parts in zip(*form.rows(images)))
                    total.add(features, labels, [len(features)])
        return total.finished(), total.tally


class _Total:
    """A sum over users, to which blocks of rows are added."""

    def __init__(self, form: ByRows, scaling: PrivateMean | None) -> None:
        self._form, self._scaling = form, scaling
        self._sums = {name: zeros.to(form.wide) for name, zeros in form.zeros().items()}
        self._waiting: list[tuple[Tensor, Tensor]] = []
        self._sizes: list[int] = []
        self.tally = torch.zeros(5, dtype=torch.float64)

    def add(self, features: Tensor, labels: Tensor, sizes: list[int]) -> None:
        """Some users with all of their images: ``[B, D]``, ``[B, K]``, and how many each has."""
        self._waiting.append((features, labels))
        self._sizes += sizes
        if sum(len(part) for part, _ in self._waiting) >= BLOCK:
            self._add_waiting()

    def add_sums(self, sums: Sums) -> None:
        """One user, by all that it sends."""
        scale = float(self._scales([_squared_norm(sums)]))
        for name in sums if scale else ():  # a refused user's sums may not be finite
            self._sums[name].add_(sums[name], alpha=scale)

    def finished(self) -> Sums:
        """The sum over all users that were added."""
        if self._waiting:
            self._add_waiting()
        return self._sums

    def _add_waiting(self) -> None:
        features, labels = (torch.cat(parts) for parts in zip(*self._waiting))
        sizes = self._sizes
        self._waiting, self._sizes = [], []
        if self._scaling is None:
            part = self._form.of_batch(features, labels)
        else:
            each = zip(torch.split(features, sizes), torch.split(labels, sizes))
            scales = self._scales([self._form.squared_norm(*pair) for pair in each])
            factors = scales.repeat_interleave(torch.tensor(sizes, device=scales.device))
            kept = factors > 0
            part = self._form.of_scaled(features[kept], labels[kept], factors[kept])
        for name, total in self._sums.items():
            total += part[name]

    def _scales(self, squared_norms: list[Tensor]) -> Tensor:
        """The factor of each user's sums, ``[U]``; also adds to `tally`."""
        assert self._scaling is not None
        scales, tally = self._scaling.user_scales(["sums"], torch.stack(squared_norms)[:, None])
        self.tally += tally.double().sum(0).cpu()
        return scales[:, 0]


def _add_batches(total: _Total, form: ByRows, images: UserImages) -> None:
    """Add a user's images batch by batch, which is possible where no norm is needed."""
    for features, labels in form.rows(images):
        total.add(features, labels, [len(features)])


def _squared_norm(sums: Sums) -> Tensor:
    return torch.stack([tensor.square().sum() for tensor in sums.values()]).sum()
