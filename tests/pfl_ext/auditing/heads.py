"""Canaries in the private training of a last layer on frozen features, each user with one image.

The features get one more column for each canary, in which all real users have zero. A canary has one number
in its column and zeros elsewhere. So its gradient lies in its own column of the weights, except for a share
of one over that number in the bias. Its direction within the column depends on the layer's output for it,
which is known to anybody who sees the model. The real users, the cohorts, the joined training of users with
one row of features (`CohortEngine`), the clipping, the noise and the server's step are production code.

Letters: D features, m canaries, K outputs, n users that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics
from torch import Tensor, nn

from dataset.arrays import FloatArray, IntArray
from pfl_ext.auditing.bounds import Trials
from pfl_ext.auditing.canaries import Directions, Game, Release, attacks
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.data.user_images import Annotations
from pfl_ext.engine.cohort import CohortEngine
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.models.features import FeatureClassifier
from pfl_ext.privacy.central import PrivateMean
from pfl_ext.tasks.single_label import SingleLabel


class WideFeatures:
    """A store of canaries and then real users, with one row ``[D + m]`` each.

    Args:
        real: features of the real users, one row each.
        others: number of real users.
        canaries: m.
        labels: K.
        length: the number in a canary's column.
    """

    side = 1

    def __init__(self, real: ImageStore, others: int, canaries: int, labels: int, length: float) -> None:
        users = canaries + others
        self.user_ids, self.user_offsets = [str(u) for u in range(users)], np.arange(users + 1)
        self._real, self._canaries, self._labels, self._length = real, canaries, labels, length

    def read(self, rows: IntArray) -> tuple[np.ndarray[tuple[int, int], np.dtype[np.float32]], Annotations]:
        """See `ImageStore`."""
        canary = rows < self._canaries
        real, _ = self._real.read(rows[~canary] - self._canaries)
        width = real.shape[1]
        features = np.zeros((len(rows), width + self._canaries), np.float32)
        features[~canary, :width] = real
        features[canary, width + rows[canary]] = self._length
        return features, self.targets(rows)

    def targets(self, rows: IntArray) -> Annotations:
        """One label for each row; canaries have the labels in turn."""
        canary = rows < self._canaries
        targets = self.labels(rows, self._labels)
        targets[~canary] = self._real.targets(rows[~canary] - self._canaries)
        return targets

    @staticmethod
    def labels(canaries: IntArray, labels: int) -> Annotations:
        """The labels of these canaries, one-hot."""
        return np.eye(labels, dtype=np.uint8)[canaries % labels]


@dataclass(frozen=True, kw_only=True)
class HeadGame(Game):
    """A game of canaries among ``others`` real users.

    Args:
        head: the layer before its first step, from D features to K outputs.
        real: the others' features and labels, one row each.
    """

    directions: Directions = field(default_factory=partial(Directions, 0))
    """The shapes of the canaries' updates, whose directions are not fixed: see `seen`."""
    head: nn.Linear
    real: ImageStore

    @property
    def _length(self) -> float:
        """The number that a canary has in its column."""
        return self.length * self.calibration.config.clipping_bound / self.rates[0]

    def store(self) -> WideFeatures:
        """See `Game`. The fixed sampler would need canaries that send their opposite, which no image does."""
        assert self.sampler != "fixed"
        labels = self.head.out_features
        return WideFeatures(self.real, self.others, self.canaries, labels, self._length)

    @torch.no_grad()
    def classifier(self, side: int) -> FeatureClassifier:
        """The head, wider by the canaries' columns, which are zero."""
        width = self.head.in_features
        wide = nn.Linear(width + self.canaries, self.head.out_features)
        wide.weight.zero_()
        wide.weight[:, :width] = self.head.weight
        wide.bias.copy_(self.head.bias)
        whole = ImageClassifier(nn.Sequential(wide), task=SingleLabel(), input_size=side)
        return FeatureClassifier(whole, "0", wide.in_features)

    def engine(self, network: ImageClassifier) -> CohortEngine:
        """The engine of production."""
        return CohortEngine(network)

    def seen(self, model: PyTorchModel, mean: MappedVectorStatistics) -> FloatArray:
        """``[2 m + 1]`` numbers of a round's noisy mean, after which the server makes its step.

        The first m are along each canary's update at the model of this round. The next m are along its update
        at an untrained model, which is the same in all rounds. The last is the bias along the first canary's
        update.
        """
        network, width = model.pytorch_model, self.head.in_features
        layer = network.trained_part
        targets = torch.from_numpy(WideFeatures.labels(np.arange(self.canaries), self.head.out_features))

        def along(outputs: Tensor) -> Tensor:
            outputs = outputs.detach().requires_grad_()
            (gradients,) = torch.autograd.grad(network.task.image_losses(outputs, targets).sum(), outputs)
            return -nn.functional.normalize(gradients.double())

        units = along(layer.weight[:, width:].T * self._length + layer.bias)
        columns, bias = mean["backbone.0.weight"][:, width:].T, mean["backbone.0.bias"]
        found = [(columns * units).sum(1), (columns * along(torch.zeros(units.shape))).sum(1)]
        model.apply_model_update(mean)
        return torch.cat([*found, (bias * units[0]).sum()[None]]).numpy()

    def trials(self, release: Release) -> Trials:
        """See `Game`. Rounds are compared with each other along the direction that is the same in all.

        The bias is used only with a single canary; among many, one user's bias does not show.
        """
        same = replace(release, sums=release.sums[:, self.canaries :])
        outliers = "outliers among rounds"
        scores = attacks(self, release) | {outliers: attacks(self, same)[outliers]}
        if self.canaries == 1:
            scores["bias"] = release.sums[:, -1:].sum(0)
        return Trials(self.joined, scores)


class ClippedTogether(PrivateMean):
    """Users trained as one batch are clipped together, by the root of their mean squared norm."""

    def user_scales(self, names: Sequence[str], squared_norms: Tensor) -> tuple[Tensor, Tensor]:
        """What the engine calls."""
        return super().user_scales(names, squared_norms.mean(0, keepdim=True).expand_as(squared_norms))


class BiasNotClipped(PrivateMean):
    """The bias is left out of the norm, and sent without clipping."""

    def user_scales(self, names: Sequence[str], squared_norms: Tensor) -> tuple[Tensor, Tensor]:
        """What the engine calls."""
        bias = torch.tensor([name.endswith("bias") for name in names])
        scales, tally = super().user_scales(names, torch.where(bias, 0.0, squared_norms))
        return torch.where(bias, 1.0, scales), tally
