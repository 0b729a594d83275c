"""FedCOF: a head from the classes' covariances, which are estimated from users' class means
(Salami et al. 2024, "Closed-Form Feature-Based Federated Learning from Class Means", arXiv 2412.14326).

For each class c of which user k has images, it sends their number ``n_kc`` and the mean of their features
``mu_kc``. The users' means vary about the class mean as images do, with ``1 / n_kc`` of their variance:

    S_c = sum_k n_kc (mu_kc - mu_c)(mu_kc - mu_c)' / (K_c - 1) + shrinkage I

over the ``K_c`` users that have the class (divided by 1 where one user has it). The head is ``G^+ B`` with
``G = sum_c (N_c - 1) S_c + N mu mu'`` and ``B = sum_c N_c mu_c e_c'``. Its columns are divided by their
norms, and it has no bias. The scatter between classes is left out of G, as in the paper.

The server needs each user's own means, so secure aggregation, which reveals only sums, cannot be used.

Shape letters: P pairs of a user and a class that it has, D features, K classes.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from pfl.internal.ops.selector import get_default_framework_module as get_ops
from pydantic import NonNegativeFloat
from pydantic.dataclasses import dataclass
from torch import Tensor

from pfl_ext.algorithms.algorithm import RunContext, Setup, Traffic, register
from pfl_ext.algorithms.closed_form import FLOAT, ClosedForm, HeadOptions, Sums, solved
from pfl_ext.configs import STRICT
from pfl_ext.data.user_images import UserImages

PAIRS = ("means", "counts", "classes", "users")
"""Names of the state's tensors. The first is ``[P, D]``, the others are ``[P]``."""


@dataclass(frozen=True, config=STRICT)
class FedCOFOptions(HeadOptions):
    """`HeadOptions` and a shrinkage."""

    shrinkage: NonNegativeFloat = 0.1
    """Gamma, which is added to the diagonal of each class's covariance (the authors: 0.1 or 1)."""


@register("fedcof")
class FedCOF(ClosedForm):
    """A head from covariances that are estimated from users' class means."""

    options: ClassVar[type] = FedCOFOptions
    square_matrices: ClassVar[int] = 6  # G, its symmetric part, and those of `eigh`

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self._numbers = context.users.partition.numbers
        self._sent: list[Tensor] = []

    @classmethod
    def check(cls, setup: Setup) -> None:
        """Refuse what `ClosedForm` refuses, and images with several labels."""
        super().check(setup)
        if not setup.module.task.exclusive:
            raise ValueError("FedCOF needs images with exactly one label each: choose fed3r or fedncm")

    def init(self, seed: int) -> Sums:
        """The state without any pair."""
        empty = torch.zeros(0, dtype=torch.float64)
        return {"means": empty.view(0, self.layer.in_features), **dict.fromkeys(PAIRS[1:], empty)}

    def of_batch(self, features: Tensor, labels: Tensor) -> Sums:
        """For each class the sum of features, ``[K, D]``, and the number of images, ``[K]``."""
        return {"sums": labels.T @ features, "counts": labels.sum(0)}

    def of_user(self, images: UserImages) -> Sums:
        """The number of images of each class. The user's pairs are kept here until the end of the round."""
        sums = super().of_user(images)
        has = sums["counts"].nonzero()[:, 0]
        counts = sums["counts"][has, None]
        user = torch.full_like(counts, self._numbers.get(str(images.user_id), -1))
        self._sent.append(torch.cat([sums["sums"][has] / counts, counts, has[:, None], user], 1).cpu())
        return {"counts": sums["counts"]}

    def added(self, state: Sums, sums: Sums) -> Sums:
        """The pairs so far and those of this round, the same on every worker."""
        workers = get_ops().distributed
        mine = torch.cat([*self._sent, torch.zeros(0, self.layer.in_features + 3, dtype=torch.float64)])
        self._sent.clear()
        heights = torch.zeros(workers.world_size, dtype=torch.float64)
        heights[workers.global_rank] = len(mine)
        (heights,) = workers.all_reduce([heights])
        ends = heights.cumsum(0).long().tolist()
        pairs = torch.zeros(ends[-1], mine.shape[1], dtype=torch.float64)
        pairs[ends[workers.global_rank] - len(mine) : ends[workers.global_rank]] = mine
        (pairs,) = workers.all_reduce([pairs])
        pairs = pairs[(pairs[:, -1] * self.layer.out_features + pairs[:, -2]).argsort()]
        new = {"means": pairs[:, :-3], "counts": pairs[:, -3], "classes": pairs[:, -2], "users": pairs[:, -1]}
        return {name: torch.cat([state[name], new[name]]) for name in PAIRS}

    def head(self, total: Sums) -> tuple[Tensor, Tensor]:
        """``G^+ B``, each class divided by its norm."""
        means, counts, classes = total["means"], total["counts"], total["classes"].long()
        num_classes, width = self.layer.out_features, means.shape[1]
        sums = torch.zeros(num_classes, width, dtype=means.dtype)
        sums.index_add_(0, classes, means * counts[:, None])
        images = torch.bincount(classes, counts, num_classes)
        users = torch.bincount(classes, minlength=num_classes)
        apart = means - (sums / images.clamp(min=1)[:, None])[classes]
        factors = (images - 1).clamp(min=0) / (users - 1).clamp(min=1)
        gram = apart.T @ (apart * (counts * factors[classes])[:, None])
        gram.diagonal().add_(self.context.options.shrinkage * (images - 1).clamp(min=0).sum())
        gram += torch.outer(sums.sum(0), sums.sum(0)) / images.sum().clamp(min=1)
        weight = solved(gram, sums.T).T
        return F.normalize(weight), torch.zeros(num_classes, dtype=weight.dtype)

    def bytes(self, state: Sums) -> Traffic:
        """A mean and a number for each class that a user has; averaged over users."""
        pairs, width = state["means"].shape
        users = max(len(set(state["users"].tolist())), 1)
        return Traffic(0, math.ceil(FLOAT * pairs * (width + 1) / users))
