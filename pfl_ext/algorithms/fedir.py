"""FedIR: importance-reweighted client objectives (Hsu, Qi, Brown 2020, Section 5.2).

A user's images are drawn from its own distribution of labels q and not from the target's p, so each counts
``p / q``. That is all: the weights stand in the targets, and the task (`pfl_ext.tasks`) normalises them over
each mini-batch (equation 4). q never leaves the user; p is K numbers from the server.

Not for private training: p holds the label counts of all training images, exactly, and enters every
user's loss.

Shape letters: n images that take part, N all images of the user, K labels.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import PositiveFloat
from pydantic.dataclasses import dataclass

from pfl_ext.configs import STRICT
from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.tasks.task import Task, WeightedTask


@dataclass(frozen=True, config=STRICT)
class ImportanceOptions:
    """The options of FedIR, which goes with any algorithm of pfl's loop."""

    reweight: Literal["none", "fedir"] = "none"
    """Weight of class k for user u; fedir: its share of all images over that of u's (Hsu et al., 5.2)."""
    max_importance: PositiveFloat | None = None
    """Greatest weight that FedIR gives; none: any."""


class ImportanceWeights:
    """Turns a user's plain targets into weighted ones, for a task that takes weights.

    * `pfl_ext.tasks.single_label.SingleLabel`, the paper's: an image of class y has the weight
      ``p(y) / q(y)``, q the frequencies of the classes among all images of the user. A batch of one class is
      as without weights.
    * `pfl_ext.tasks.multi_label.WeightedMultiLabel`, ours, each label a task of two classes: an image has for
      label c the weight ``p_c / q_c`` if it has the label, else ``(1 - p_c) / (1 - q_c)``.

    Where q is p every weight is exactly 1. Weights above ``cap`` become ``cap`` (truncated importance
    sampling, Ionides 2008: some bias for less variance), for a label that a user has once in many images.
    """

    def __init__(
        self, target_distribution: npt.ArrayLike, task: WeightedTask, *, cap: float | None = None
    ) -> None:
        """``target_distribution`` ``[K]``: of the classes, or of each label the share of images with it.

        Raises:
            ValueError: when it is none, or ``cap`` is not positive.
        """
        label_shares = np.asarray(target_distribution, np.float64)
        task.check_target(label_shares)
        if cap is not None and not cap > 0:
            raise ValueError(f"FedIR's greatest weight is {cap} and must be positive; None caps nothing")
        self._task, self._cap, self._num_labels = task, cap, len(label_shares)
        self._p = task.event_shares(label_shares)

    @classmethod
    def of_counts(
        cls, label_counts: npt.ArrayLike, num_images: int, task: WeightedTask, **options: Any
    ) -> ImportanceWeights:
        """Weights towards the distribution of images of which ``label_counts`` ``[K]`` have each label."""
        return cls(np.asarray(label_counts, np.float64) / num_images, task, **options)

    def __call__(self, targets: npt.ArrayLike, of_user: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Weighted targets ``[n, K]`` of those images of a user that take part.

        Args:
            targets: theirs, ``[n, K]`` of 0 and 1.
            of_user: those of all the user's images, ``[N, K]``; q is counted there.

        Raises:
            ValueError: when the user has a label, or lacks one, that the target distribution never does.
        """
        everything = np.asarray(of_user)
        q = self._task.event_shares(everything.sum(0, dtype=np.float64) / max(len(everything), 1))
        lost = np.flatnonzero((q > 0) & (self._p == 0))
        if len(lost):
            does, label = self._task.event(int(lost[0]), self._num_labels)
            raise ValueError(
                f"a user has an image that {does} label {label}, which in FedIR's target distribution none "
                "does: take the distribution from data with all labels, or leave these images out"
            )
        ratio = np.divide(self._p, q, out=np.zeros_like(q), where=q > 0)
        weights = ratio if self._cap is None else np.minimum(ratio, self._cap)
        return self._task.weighted(np.asarray(targets), weights)


def weighted_task(options: ImportanceOptions, plain: Task) -> Task:
    """A benchmark's own task, or the form of it that takes FedIR's weights."""
    return plain if options.reweight == "none" else plain.reweighted()


def importance_weights(options: ImportanceOptions, store: ImageStore, task: Task) -> ImportanceWeights | None:
    """The weights towards the labels' distribution over all training images; None without FedIR."""
    if options.reweight == "none":
        return None
    assert isinstance(task, WeightedTask), "see weighted_task"
    num_images = int(store.user_offsets[-1])
    blocks = [np.arange(i, min(i + 8192, num_images)) for i in range(0, num_images, 8192)]
    counts = np.sum([store.targets(rows).sum(0, dtype=np.int64) for rows in blocks], axis=0)
    return ImportanceWeights.of_counts(counts, num_images, task, cap=options.max_importance)
