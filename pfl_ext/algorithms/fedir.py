"""FedIR: importance-reweighted client objectives (Hsu, Qi, Brown 2020, Section 5.2).

A user's images are drawn from its own distribution of labels q and not from the target's p, so each counts
``p / q``. That is all: the weights stand in the targets, and the objective (`pfl_ext.tasks.objectives`)
normalises them over each mini-batch (equation 4). q never leaves the user; p is K numbers from the server.

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

from pfl_ext.data.federated_dataset import ImageStore
from pfl_ext.tasks.objectives import ObjectiveName

FloatArray = npt.NDArray[np.float64]
Kind = Literal["single_label", "multi_label_weighted"]


@dataclass(frozen=True)
class ImportanceOptions:
    """The options of FedIR, which goes with any algorithm of pfl's loop."""

    reweight: Literal["none", "fedir"] = "none"
    """fedir: weight of class k for user u: p(k) / q_u(k), of all images over the user's (Hsu et al., 5.2)."""
    max_importance: PositiveFloat | None = None
    """Greatest weight that FedIR gives; None: any."""


class ImportanceWeights:
    """Turns a user's plain targets into weighted ones, for the objective of the same name.

    * "single_label", the paper's: an image of class y has the weight ``p(y) / q(y)``, q the frequencies of
      the classes among all images of the user. A batch of one class is as without weights.
    * "multi_label_weighted", ours, each label a task of two classes: an image has for label c the weight
      ``p_c / q_c`` if it has the label, else ``(1 - p_c) / (1 - q_c)``, and the sign says which.

    Where q is p every weight is exactly 1. Weights above ``cap`` become ``cap`` (truncated importance
    sampling, Ionides 2008: some bias for less variance), for a label that a user has once in many images.
    """

    def __init__(
        self, target_distribution: npt.ArrayLike, *, cap: float | None = None, kind: Kind = "single_label"
    ) -> None:
        """``target_distribution`` ``[K]``: of the classes, or of each label the share of images with it.

        :raises ValueError: when it is none, or ``cap`` is not positive.
        """
        p = np.asarray(target_distribution, np.float64)
        if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
            raise ValueError("FedIR's target distribution must be one share in 0..1 for each label")
        if kind == "single_label" and abs(p.sum() - 1) > 1e-6:
            raise ValueError(f"FedIR's target distribution sums to {p.sum():g}: give shares that sum to 1")
        if cap is not None and not cap > 0:
            raise ValueError(f"FedIR's greatest weight is {cap} and must be positive; None caps nothing")
        self._p, self._cap, self.kind = p, cap, kind

    @classmethod
    def of_counts(cls, label_counts: npt.ArrayLike, num_images: int, **options: Any) -> ImportanceWeights:
        """For the distribution of so many images, of which ``label_counts`` ``[K]`` have each label."""
        return cls(np.asarray(label_counts, np.float64) / num_images, **options)

    def __call__(self, targets: npt.ArrayLike, own: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Weighted targets ``[n, K]`` of those images of a user that take part.

        :param targets: theirs, ``[n, K]`` of 0 and 1.
        :param own: of all the user's images, ``[N, K]``; q is counted there.
        :raises ValueError: when the user has a label, or lacks one, that the target distribution never does.
        """
        plain, everything = np.asarray(targets), np.asarray(own)
        q = everything.sum(0, dtype=np.float64) / max(len(everything), 1)
        present = self._ratio(self._p, q, "has")
        if self.kind == "single_label":
            return (plain * present).astype(np.float32)
        absent = self._ratio(1 - self._p, 1 - q, "lacks")
        return np.where(plain != 0, present, -absent).astype(np.float32)

    def _ratio(self, p: FloatArray, q: FloatArray, does: str) -> FloatArray:
        """``[K]``, 0 where q is 0 and no image of the user asks for it."""
        lost = np.flatnonzero((q > 0) & (p == 0))
        if len(lost):
            raise ValueError(
                f"a user has an image that {does} label {lost[0]}, which in FedIR's target distribution none "
                "does: take the distribution from data with all labels, or leave these images out"
            )
        ratio = np.divide(p, q, out=np.zeros_like(p), where=q > 0)
        return ratio if self._cap is None else np.minimum(ratio, self._cap)


def weighted_objective(options: ImportanceOptions, plain: ObjectiveName) -> ObjectiveName:
    """A benchmark's own objective, or the one that FedIR makes of it."""
    weighted = options.reweight == "fedir" and plain == "multi_label"
    return "multi_label_weighted" if weighted else plain


def importance_weights(
    options: ImportanceOptions, store: ImageStore, objective: ObjectiveName
) -> ImportanceWeights | None:
    """Those towards the distribution of the labels over all training images; None without FedIR."""
    if options.reweight == "none":
        return None
    assert objective != "multi_label"
    num_images = int(store.user_offsets[-1])
    blocks = [np.arange(i, min(i + 8192, num_images)) for i in range(0, num_images, 8192)]
    counts = np.sum([store.targets(rows).sum(0, dtype=np.int64) for rows in blocks], axis=0)
    return ImportanceWeights.of_counts(counts, num_images, cap=options.max_importance, kind=objective)
