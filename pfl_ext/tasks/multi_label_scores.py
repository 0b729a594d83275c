"""Multi-label metrics as sufficient statistics that add up over batches and workers.

Scores are probabilities (sigmoid of the logits), targets are 0/1. `MultiLabelScores` is a pfl metric value
that keeps the scored rows themselves, from which every metric is exact. `summarise` turns scores and targets
into the eight columns of the FLAIR paper's Table 1, and into the average precision (AP) published for FLAIR.

C-x is the macro and O-x the micro variant: C averages over *all* classes, and a class without a positive
in the evaluated split counts 0, as in the paper's code; O flattens all (image, class) pairs into one task.
Fractions lie in [0, 1] everywhere except in `summarise`, which returns percent like the paper.

Shape letters: N images of the evaluation set, B images of a batch, K labels (classes), T thresholds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import MetricValue

from dataset.arrays import BoolArray, Float32Array, FloatArray, IntArray
from pfl_ext.tasks.ranking import (
    Array,
    Ranking,
    as_bool,
    check_probabilities,
    checked,
    left_step_ap,
    rank,
    rank_on,
    ratio,
)

COLUMNS = ("C-AP", "C-P", "C-R", "C-F1", "O-AP", "O-P", "O-R", "O-F1")
"""The columns of Table 1 in the FLAIR paper, in its order."""

EXACT = {"C-AP": "C-AP exact", "O-AP": "O-AP exact"}
BINNED = {"C-AP": "C-AP-binned200", "O-AP": "O-AP-binned200"}
"""Two kinds of AP. In tables for people, a column of `COLUMNS` is the published AP with 200 thresholds. Among
the keys of `summarise`, ``C-AP`` is the exact AP and ``C-AP-binned200`` the published one."""


def _ranked(scores: Array, targets: BoolArray, *, overall: bool) -> Ranking:
    """Rank the scores, on the GPU if pfl computes on one."""
    device = get_default_device()
    if device.type == "cuda":
        return rank_on(device, scores, targets, overall=overall)
    return rank(scores, targets, overall=overall)


def average_precision(scores: npt.ArrayLike, targets: npt.ArrayLike) -> FloatArray:
    """Exact AP of each class, ``[K]`` float64; equal to scikit-learn's ``average_precision_score``.

    AP = sum_n (R_n - R_{n-1}) P_n over the distinct scores, so tied scores share one threshold. A class
    without positives gets 0 (the paper counts such classes as 0 in its macro mean).

    Args:
        scores: ``[N, K]`` floats; only their order matters.
        targets: ``[N, K]`` 0/1, bool or integer.

    Raises:
        ValueError: shapes differ, a score is NaN (the message says how many), a target is not 0/1.
    """
    return _ranked(*checked(scores, targets), overall=False).ap


def binned_average_precision(ranking: Ranking) -> tuple[float, float]:
    """The AP published for FLAIR: its mean over classes, and that of all (image, class) pairs as one task.

    AP = sum_i (R_i - R_{i+1}) P_i over `pfl_ext.tasks.ranking.binned_thresholds`, with 0/0 := 0 (as ml-flair
    and pfl-research do, after Keras' AUC). It understates AP where many scores are between two thresholds, as
    those of rare labels near 0. It is for comparison with the paper; `average_precision` is the headline.
    """
    tp, predicted, positives = ranking.tp[:-1], ranking.predicted[:-1], ranking.positives
    overall = left_step_ap(tp.sum(1), predicted.sum(1), positives.sum())
    return float(left_step_ap(tp, predicted, positives).mean()), float(overall)


def summarise(scores: npt.ArrayLike, targets: npt.ArrayLike) -> dict[str, float]:
    """The paper's eight `COLUMNS` in percent, AP exact, then ``C-AP-binned200`` and ``O-AP-binned200``.

    P and R hold at score > 0.5; a class never predicted has P = 0. C-F1 is the harmonic mean of C-P and
    C-R, *not* the mean of per-class F1 (FLAIR paper, Table 1: 71.7 and 49.3 give 58.4). With K = 1 the
    columns are the ordinary binary metrics, and ``accuracy`` (percent) is added.

    Args:
        scores: ``[N, K]`` probabilities, float32.
        targets: ``[N, K]`` 0/1, bool or integer.

    Raises:
        ValueError: as `average_precision`, or there is nothing to evaluate (N or K is 0).
    """
    scores, targets = checked(scores, targets)
    if not scores.size:
        raise ValueError(f"scores of shape {scores.shape} hold nothing to evaluate")
    ranking = _ranked(scores, targets, overall=True)
    tp, predicted, positives = ranking.tp[-1], ranking.predicted[-1], ranking.positives
    c_p, c_r = ratio(tp, predicted).mean(), ratio(tp, positives).mean()
    o_p, o_r = ratio(tp.sum(), predicted.sum()), ratio(tp.sum(), positives.sum())
    values = (ranking.ap.mean(), c_p, c_r, f1(c_p, c_r), ranking.overall_ap, o_p, o_r, f1(o_p, o_r))
    summary = {name: 100 * float(value) for name, value in zip(COLUMNS, values)}
    for name, binned in zip(BINNED.values(), binned_average_precision(ranking)):
        summary[name] = 100 * binned
    if scores.shape[1] == 1:
        wrong = (positives - tp) + (predicted - tp)
        summary["accuracy"] = 100 * float(1 - wrong[0] / len(scores))
    return summary


def shown(name: str) -> str:
    """The name of a score of `summarise` for people: ``C-AP exact`` for ``C-AP``, which is exact there."""
    return {**EXACT, **{key: column for column, key in BINNED.items()}}.get(name, name)


def for_people(scores: Mapping[str, float]) -> dict[str, float]:
    """Scores of `summarise` for a table: the exact AP, then the published columns, then the rest."""
    first = (*EXACT, *(BINNED.get(column, column) for column in COLUMNS))
    return {shown(name): scores[name] for name in dict.fromkeys((*first, *scores)) if name in scores}


def f1(precision: Any, recall: Any) -> float:
    """Harmonic mean of precision and recall, in their unit; 0 if both are 0."""
    return float(ratio(2 * precision * recall, precision + recall))


PRESENT = "C-AP-present"
PER_USER = (*COLUMNS, PRESENT)
"""The eight columns on one user's images, and C-AP over the classes that the user has.

A class that a user lacks counts 0 in the C columns, as in the paper's code; with few of the classes, a user's
C-AP is low however good the model is. A class on *every* image of a user has AP 1 whatever the scores are:
users with one image differ in O-AP alone.
"""


def user_columns(scores: npt.ArrayLike, targets: npt.ArrayLike) -> dict[str, float]:
    """`PER_USER` in percent, from one user's ``[n, K]``. For a user without any label, C-AP-present, O-AP and
    O-R are NaN, because there is nothing to find.
    """
    values, truth = np.asarray(scores), as_bool(targets)
    summary = summarise(values, truth)
    present = truth.any(0)
    columns = {name: summary[name] for name in COLUMNS}
    if not present.any():
        return columns | dict.fromkeys(("O-AP", "O-R", PRESENT), np.nan)
    ap = 100 * float(average_precision(values[:, present], truth[:, present]).mean())
    return {**columns, PRESENT: ap}


class _Rows(NamedTuple):
    """Some rows of the evaluation set."""

    rows: IntArray  # [B]
    scores: Float32Array  # [B, K]
    targets: BoolArray  # [B, K]


class MultiLabelScores(MetricValue):
    """The exact statistic: the scored rows of one evaluation set of N images.

    ``+`` is a union. It copies no rows; they are combined once, when first read. Every row must be scored
    once: if a row was scored twice, on one worker or two, reading raises an error. Rows that were not scored
    are absent from `scores` and `targets`.
    """

    def __init__(self, num_rows: int, num_labels: int, parts: Sequence[_Rows]):
        """Use `from_batch`."""
        self.num_rows, self.num_labels = num_rows, num_labels
        self._parts = list(parts)
        self._c_ap: float | None = None

    @classmethod
    def from_batch(
        cls, num_rows: int, rows: npt.ArrayLike, scores: npt.ArrayLike, targets: npt.ArrayLike
    ) -> MultiLabelScores:
        """Rows ``[B]`` (each in ``0..num_rows - 1``) of the evaluation set, scored.

        The arrays are kept, not copied: do not write into them afterwards. A batch of no rows,
        ``scores`` ``[0, K]``, is the zero of the addition. NaN scores are carried along and reported when
        the metric is read, by all workers alike, so that no worker stops while the others wait for it.

        Args:
            num_rows: N, the size of the whole evaluation set.
            rows: ``[B]`` int64, the position of each image in the evaluation set.
            scores: ``[B, K]`` float32 probabilities in [0, 1].
            targets: ``[B, K]`` 0/1, bool or uint8.

        Raises:
            ValueError: shapes differ, a score lies outside [0, 1], a target is not 0/1.
        """
        rows, scores, targets = np.asarray(rows, np.int64), np.asarray(scores, np.float32), as_bool(targets)
        if scores.ndim != 2 or scores.shape != targets.shape or rows.shape != scores.shape[:1]:
            raise ValueError(
                f"rows {rows.shape}, scores {scores.shape} and targets {targets.shape} "
                "must have shapes [B], [B, K] and [B, K]"
            )
        check_probabilities(scores)
        assert not len(rows) or 0 <= rows.min() <= rows.max() < num_rows
        return cls(num_rows, scores.shape[1], [_Rows(rows, scores, targets)])

    def scores(self) -> Float32Array:
        """Scores of the rows present, in row order, ``[number present, K]``; N rows once all are in."""
        return self._read().scores

    def targets(self) -> BoolArray:
        """Targets of the rows present, in row order, ``[number present, K]``."""
        return self._read().targets

    def rows(self) -> IntArray:
        """The rows present, ascending."""
        return self._read().rows

    def summary(self) -> dict[str, float]:
        """`summarise` of the rows present."""
        return summarise(self.scores(), self.targets())

    @property
    def overall_value(self) -> float:
        """Exact C-AP in [0, 1] of the rows present, 0 if there are none; computed once."""
        if self._c_ap is None:
            ap = average_precision(self.scores(), self.targets())
            self._c_ap = float(ap.sum() / max(len(ap), 1))
        return self._c_ap

    def __add__(self, other: MultiLabelScores) -> MultiLabelScores:
        assert isinstance(other, MultiLabelScores)
        assert (self.num_rows, self.num_labels) == (other.num_rows, other.num_labels)
        return MultiLabelScores(self.num_rows, self.num_labels, [*self._parts, *other._parts])

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, MultiLabelScores)
        mine, others = self._read(), other._read()
        return (
            self.num_rows == other.num_rows
            and np.array_equal(mine.rows, others.rows)
            and np.array_equal(mine.targets, others.targets)
            and np.array_equal(mine.scores, others.scores, equal_nan=True)
        )

    def to_vector(self) -> Float32Array:
        """Float32 vector of N (K + 1) values; the sum over workers is the union of their rows.

        Row by row: K scores, then how often the row was scored. A score p >= 0 is stored with its exponent
        raised by one and with a minus sign if the target is 1. So a score of 0 is the smallest normal float
        and an absent row is 0; no value is subnormal, which a device might flush; and as a row's other
        addends are 0, every bit survives the sum.
        """
        table = np.zeros((self.num_rows, self.num_labels + 1), np.float32)
        for part in self._parts:
            table[part.rows, :-1] = _encode(part.scores, part.targets)
            np.add.at(table[:, -1], part.rows, 1)
        return table.ravel()

    def from_vector(self, vector: Array) -> MultiLabelScores:
        """The union back, bit for bit; ValueError if workers scored a row twice."""
        table = np.asarray(vector, np.float32).reshape(self.num_rows, self.num_labels + 1)
        _check_disjoint(table[:, -1])
        rows = np.flatnonzero(table[:, -1])
        body = table[:, :-1] if len(rows) == self.num_rows else table[rows, :-1]
        return MultiLabelScores(self.num_rows, self.num_labels, [_Rows(rows, *_decode(body))])

    def _read(self) -> _Rows:
        """The rows of all parts as one, ascending; the parts are released."""
        if len(self._parts) > 1 or (np.diff(self._parts[0].rows) <= 0).any():
            counts = np.bincount(np.concatenate([p.rows for p in self._parts]), minlength=self.num_rows)
            _check_disjoint(counts)
            place, rows = np.cumsum(counts) - 1, np.flatnonzero(counts)
            shape = len(rows), self.num_labels
            merged = _Rows(rows, np.empty(shape, np.float32), np.empty(shape, np.bool_))
            for part in self._parts:
                merged.scores[place[part.rows]] = part.scores
                merged.targets[place[part.rows]] = part.targets
            self._parts = [merged]
        return self._parts[0]


def _check_disjoint(counts: Array) -> None:
    """Raise ValueError if one of the rows was scored more than once; counts ``[N]``."""
    twice = np.flatnonzero(counts > 1)
    if len(twice):
        raise ValueError(
            f"{len(twice)} of {len(counts)} evaluation rows were scored more than once, the first is row "
            f"{twice[0]}: give each row to one worker"
        )


_EXPONENT_STEP = np.int32(1 << 23)  # one more in the exponent field of a float32
_MAGNITUDE = np.int32(0x7FFFFFFF)  # all bits but the sign
_SIGN = np.int32(-(1 << 31))
_NAN = np.float32(4).view(np.int32)  # the code of NaN: no probability is encoded above 2


def _encode(scores: Float32Array, targets: BoolArray) -> Float32Array:
    """Pack score and target into one normal float32 each, see `MultiLabelScores.to_vector`."""
    code = np.ascontiguousarray(scores).view(np.int32) & _MAGNITUDE
    code += _EXPONENT_STEP
    code[np.isnan(scores)] = _NAN
    np.bitwise_or(code, _SIGN, out=code, where=targets)
    return code.view(np.float32)


def _decode(table: Float32Array) -> tuple[Float32Array, BoolArray]:
    """Undo `_encode`."""
    code = table.view(np.int32)
    targets = code < 0
    code = code & _MAGNITUDE
    unknown = code >= _NAN
    code -= _EXPONENT_STEP
    scores = code.view(np.float32)
    scores[unknown] = np.nan
    return scores, targets
