"""FedNCM: the head of a class is the direction of its mean
(Legate et al. 2023, "Guiding The Last Layer in Federated Learning with Pre-Trained Models",
arXiv 2306.03937).

The weights of class c are ``w_c = mu_c / |mu_c|``, with ``mu_c`` the mean of the features over all images of
the class; there is no bias. The mean has the direction of the sum, so users send only sums ``[K, D]``. An
image with several labels counts for each of them (the paper has one label an image).
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_ext.algorithms.algorithm import register
from pfl_ext.algorithms.by_rows import ByRows
from pfl_ext.algorithms.closed_form import Sums
from pfl_ext.rules import Refusals


@register("fedncm")
class FedNCM(ByRows):
    """A head of normalised class means."""

    refusals: ClassVar[Refusals] = {}

    def of_batch(self, features: Tensor, labels: Tensor) -> Sums:
        """The sum of the features of each label, ``[K, D]``."""
        return {"sums": labels.T @ features}

    def of_scaled(self, features: Tensor, labels: Tensor, factors: Tensor) -> Sums:
        """The sum of the features of each label, each image times its factor."""
        return {"sums": (labels * factors[:, None]).T @ features}

    def head(self, total: Sums) -> tuple[Tensor, Tensor]:
        """The sums divided by their norms; zeros for a label without images."""
        sums = total["sums"]
        return F.normalize(sums), torch.zeros(len(sums), dtype=sums.dtype)
