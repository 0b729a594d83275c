"""Fed3R: ridge regression of the labels on the features
(Fani et al. 2024, "Accelerating Heterogeneous Federated Learning with Closed-form Classifiers",
arXiv 2406.01116).

With ``z = [features, 1]`` and y the labels of an image, users send ``A = sum z z'`` and ``B = sum z y'``. The
head is ``(A + ridge I)^-1 B``, the same as if all images were in one place. Then, as in the authors' code,
each class is divided by the norm of its weights, which can change the predicted class.

If an image can have several labels, an output is read as a logit, so a label is predicted above 0. The
regression is on 0 and 1, whose middle is 1/2. So 1/2 is subtracted from each label's bias, before the
division. With unit features the network still has features of other norms, so no threshold means anything.

A is symmetric, and a user sends its upper triangle.

With privacy A and B are clipped as one vector, with A as the whole matrix. An element off the diagonal and
its mirror image get independent noise, and their mean is used: the noise that the triangle needs. A itself
has no negative eigenvalues, so those that noise made negative are set to 0 (as in Google's DP least squares).
The default ridge is the largest eigenvalue that noise alone is expected to give A (`largest_of_noise`).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pfl_ext.algorithms.algorithm import Traffic, register
from pfl_ext.algorithms.by_rows import ByRows
from pfl_ext.algorithms.closed_form import FLOAT, NOISE, RIDGE, RidgeOptions, Sums, solved
from pfl_ext.rules import Refusals


@register("fed3r")
class Fed3R(ByRows):
    """Ridge regression of the labels on the features."""

    options: ClassVar[type] = RidgeOptions
    refusals: ClassVar[Refusals] = {}
    square_matrices: ClassVar[int] = 7  # the total, a round's sum, the symmetric part, and those of `eigh`

    def of_batch(self, features: Tensor, labels: Tensor) -> Sums:
        """A ``[D + 1, D + 1]`` and B ``[D + 1, K]``."""
        z = F.pad(features, (0, 1), value=1.0)
        return {"gram": z.T @ z, "cross": z.T @ labels}

    def of_scaled(self, features: Tensor, labels: Tensor, factors: Tensor) -> Sums:
        """A and B of rows z and y that are multiplied by the root of their image's factor."""
        roots = factors.sqrt()[:, None]
        z = F.pad(features, (0, 1), value=1.0) * roots
        return {"gram": z.T @ z, "cross": z.T @ (labels * roots)}

    def squared_norm(self, features: Tensor, labels: Tensor) -> Tensor:
        """The squared norm of A and B. With fewer images than features it is a sum over pairs of images:
        that of A is ``sum (z_i . z_j)^2``, and that of B ``sum (z_i . z_j) (y_i . y_j)``.
        """
        if len(features) > features.shape[1]:
            return super().squared_norm(features, labels)
        products = features @ features.T + 1  # products of z, whose last element is 1
        return (products * (products + labels @ labels.T)).sum()

    def head(self, total: Sums) -> tuple[Tensor, Tensor]:
        """The solution. Each label's part is divided by its norm if `normalise` is set."""
        gram, options = total["gram"], self.context.options
        ridge = options.ridge
        if ridge is None:
            ridge = largest_of_noise(float(total[NOISE]), len(gram)) if NOISE in total else RIDGE
        solution = solved(gram, total["cross"], ridge)
        weight, bias = solution[:-1].T, solution[-1]
        if not (self.context.model.pytorch_model.task.exclusive or options.unit_features):
            bias = bias - 0.5
        norms = weight.norm(dim=1) if options.normalise else torch.ones_like(bias)
        norms = torch.where(norms > 0, norms, 1.0)
        return weight / norms[:, None], bias / norms

    def bytes(self, state: Sums) -> Traffic:
        """Each user sends B and the upper triangle of A."""
        n = len(state["gram"])
        return Traffic(0, FLOAT * (n * (n + 1) // 2 + state["cross"].numel()))


def largest_of_noise(deviation: float, size: int) -> float:
    """The expected largest eigenvalue of the symmetric part of ``[size, size]`` independent noise.

    Elements off the diagonal have the variance ``deviation**2 / 2``. The rest is the semicircle law.
    """
    return deviation * math.sqrt(2 * size)
