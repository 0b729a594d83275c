"""FedIR: importance-reweighted client objectives (Hsu, Qi, Brown 2020, Section 5.2).

A user's images are drawn from its own label distribution q and not from the target distribution p, so each
image has the weight ``p / q``. The weights are put into the targets, and the task (`pfl_ext.tasks`)
normalises them over each mini-batch (equation 4). q never leaves the user; p is K numbers from the server.

Private training is refused: p is computed from the exact label counts of all training images, and enters
every user's loss.

Shape letters: n images that take part, N all images of the user, K labels.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from dataset.arrays import Float32Array
from pfl_ext.configs import STRICT
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.tasks.task import Task, WeightedTask


@dataclass(frozen=True, config=STRICT)
class ImportanceOptions:
    """The options of FedIR, which can be combined with any algorithm on pfl's loop."""

    reweight: Literal["none", "fedir"] = "none"
    """Weight of class k for user u; fedir: its share of all images over its share of u's (Hsu et al. 5.2)."""
    max_importance: PositiveFloat | None = None
    """Maximum weight in FedIR; none: no limit."""


class ImportanceWeights:
    """Turns a user's plain targets into weighted ones, for a task that takes weights.

    * `pfl_ext.tasks.single_label.SingleLabel`, the paper's form: an image of class y has the weight
      ``p(y) / q(y)``, with q the class frequencies among all images of the user. In a batch of one class the
      weights change nothing.
    * `pfl_ext.tasks.multi_label.WeightedMultiLabel`, our form, which treats each label as a task of two
      classes: an image has for label c the weight ``p_c / q_c`` if it has the label, else
      ``(1 - p_c) / (1 - q_c)``.

    Where q equals p every weight is exactly 1. Weights above ``cap`` become ``cap``: truncated importance
    sampling (Ionides 2008), with some bias for less variance, where a user has a label on very few images.
    """

    def __init__(
        self, target_distribution: npt.ArrayLike, task: WeightedTask, *, cap: float | None = None
    ) -> None:
        """``target_distribution`` ``[K]``: shares of the classes, or for each label its share of all images.

        Raises:
            ValueError: when it is no distribution.
        """
        label_shares = np.asarray(target_distribution, np.float64)
        task.check_target(label_shares)
        self._task, self._cap, self._num_labels = task, cap, len(label_shares)
        self._p = task.event_shares(label_shares)

    @classmethod
    def of_counts(
        cls, label_counts: npt.ArrayLike, num_images: int, task: WeightedTask, **options: Any
    ) -> ImportanceWeights:
        """Weights towards the distribution of ``num_images`` images with these ``label_counts`` ``[K]``."""
        return cls(np.asarray(label_counts, np.float64) / num_images, task, **options)

    def __call__(self, targets: npt.ArrayLike, of_user: npt.ArrayLike) -> Float32Array:
        """Weighted targets ``[n, K]`` of a user's images that take part.

        Args:
            targets: their plain targets, ``[n, K]`` of 0 and 1.
            of_user: the targets of all the user's images, ``[N, K]``, from which q is counted.

        Raises:
            ValueError: when the user has a label with p = 0, or lacks one with p = 1.
        """
        everything = np.asarray(of_user)
        q = self._task.event_shares(everything.sum(0, dtype=np.float64) / max(len(everything), 1))
        lost = np.flatnonzero((q > 0) & (self._p == 0))
        if len(lost):
            does, label = self._task.event(int(lost[0]), self._num_labels)
            raise ValueError(
                f"a user has an image that {does} label {label}, but no image of FedIR's target "
                "distribution is like this: compute the distribution from data with all labels, or "
                "leave these images out"
            )
        ratio = np.divide(self._p, q, out=np.zeros_like(q), where=q > 0)
        weights = ratio if self._cap is None else np.minimum(ratio, self._cap)
        return self._task.weighted(np.asarray(targets), weights)


def weighted_task(options: ImportanceOptions, plain: Task) -> Task:
    """The task ``plain``, or with FedIR its form that takes weights."""
    return plain if options.reweight == "none" else plain.reweighted()


def importance_weights(options: ImportanceOptions, store: ImageStore, task: Task) -> ImportanceWeights | None:
    """The weights towards the label distribution of all training images; None without FedIR."""
    if options.reweight == "none":
        return None
    assert isinstance(task, WeightedTask), "see weighted_task"
    num_images = int(store.user_offsets[-1])
    blocks = [np.arange(i, min(i + 8192, num_images)) for i in range(0, num_images, 8192)]
    counts = np.sum([store.targets(rows).sum(0, dtype=np.int64) for rows in blocks], axis=0)
    return ImportanceWeights.of_counts(counts, num_images, task, cap=options.max_importance)
