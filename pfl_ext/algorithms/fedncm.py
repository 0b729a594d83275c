"""FedNCM: the head of a class is the direction of its mean
(Legate et al. 2023, "Guiding The Last Layer in Federated Learning with Pre-Trained Models",
arXiv 2306.03937).

With z the features of an image, ``w_c = mu_c / |mu_c|`` for the mean ``mu_c`` over all images of class c, and
no bias. The direction of the mean is that of the sum, so that sums ``[K, D]`` are all that users send. For
images with several labels (the paper has one), an image counts for each of its labels.
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
    """Class means."""

    refusals: ClassVar[Refusals] = {}

    def of_batch(self, features: Tensor, labels: Tensor) -> Sums:
        """The sum of the features of each label, ``[K, D]``."""
        return {"sums": labels.T @ features}

    def of_scaled(self, features: Tensor, labels: Tensor, factors: Tensor) -> Sums:
        """The sum of the features of each label, each image times its factor."""
        return {"sums": (labels * factors[:, None]).T @ features}

    def head(self, total: Sums) -> tuple[Tensor, Tensor]:
        """The directions of the sums; zeros for a label without images."""
        sums = total["sums"]
        return F.normalize(sums), torch.zeros(len(sums), dtype=sums.dtype)
