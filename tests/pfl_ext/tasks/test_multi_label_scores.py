"""Exact AP is scikit-learn's, binned AP the published one, and both are the same however they are merged.

Shape letters: N images, B batch, K labels, T thresholds, W workers.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pfl.metrics import Metrics, StringMetricName
from sklearn import metrics as oracle
from torchmetrics.functional import classification as tm

from pfl_ext.tasks import ranking
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.multi_label_scores import (
    COLUMNS,
    PRESENT,
    MultiLabelScores,
    average_precision,
    f1,
    summarise,
    user_columns,
)
from pfl_ext.tasks.ranking import as_bool

Array = npt.NDArray[Any]
TINY = 1e-45  # the smallest subnormal float32
AWKWARD = [0.0, -0.0, 1.0, 0.5, TINY, 3e-42, 1e-38, 1e-20, 0.005, 1 / 199, 100 / 199, 1 - 6e-8]

SCORES = {
    "continuous": st.floats(0, 1, width=32),
    "tied": st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    "compressed near 0": st.floats(0, float(np.float32(1e-30)), width=32),
    "awkward": st.sampled_from([float(np.float32(x)) for x in AWKWARD]),
}
TARGETS = {"mixed": st.booleans(), "all positive": st.just(True), "no positive": st.just(False)}


@st.composite
def tasks(draw: st.DrawFn, max_rows: int = 30) -> tuple[Array, Array]:
    """Scores [N, K] float32 and targets [N, K] bool."""
    shape = draw(st.tuples(st.integers(1, max_rows), st.integers(1, 4)))
    elements = SCORES[draw(st.sampled_from(sorted(SCORES)))]
    truth = TARGETS[draw(st.sampled_from(["mixed", "mixed", "mixed", "all positive", "no positive"]))]
    scores = draw(hnp.arrays(np.float32, shape, elements=elements, fill=st.nothing()))
    return scores, draw(hnp.arrays(np.bool_, shape, elements=truth, fill=st.nothing()))


def sklearn_ap(scores: Array, targets: Array) -> float:
    if not targets.any():
        return 0.0
    return float(oracle.average_precision_score(targets, scores))


def flair_like(seed: int, n: int = 400, k: int = 17, prevalence: float = 0.16) -> tuple[Array, Array]:
    """Targets that the scores predict somewhat, with every class present."""
    rng = np.random.default_rng(seed)
    targets = rng.random((n, k)) < prevalence
    targets[0] = True
    logits = rng.normal(size=(n, k)) + 2 * targets - 2
    return (1 / (1 + np.exp(-logits))).astype(np.float32), targets


def published_ap(scores: Array, targets: Array) -> float:
    """The AP that was published for FLAIR, step by step, for one task of any shape."""
    t = [i / 199 for i in range(200)]
    t[0], t[199] = t[0] - 1e-7, t[199] + 1e-7
    recall, precision = [], []
    for threshold in t:
        chosen = scores.astype(np.float64) > threshold
        tp, fp = int((chosen & targets).sum()), int((chosen & ~targets).sum())
        precision.append(tp / (tp + fp) if tp + fp else 0.0)
        recall.append(tp / targets.sum() if targets.any() else 0.0)
    return float(sum((recall[i] - recall[i + 1]) * precision[i] for i in range(199)))


# Exact average precision.


@given(tasks())
@settings(max_examples=100)
def test_exact_ap_equals_scikit_learn(task: tuple[Array, Array]) -> None:
    scores, targets = task
    expected = [sklearn_ap(s, t) for s, t in zip(scores.T, targets.T)]
    np.testing.assert_allclose(average_precision(scores, targets), expected, rtol=0, atol=1e-12)
    overall = summarise(scores, targets)["O-AP"]
    assert overall == pytest.approx(100 * sklearn_ap(scores.ravel(), targets.ravel()), abs=1e-10)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exact_ap_equals_scikit_learn_over_many_blocks_and_threads(
    monkeypatch: pytest.MonkeyPatch, dtype: type
) -> None:
    scores, targets = flair_like(0, n=2000)
    scores = np.round(scores, 3).astype(dtype)  # many ties, within and between classes
    whole = summarise(scores, targets)
    monkeypatch.setattr(ranking, "BLOCK_ELEMENTS", 5000)  # blocks of two classes, the last of one
    assert summarise(scores, targets) == whole
    per_class = [sklearn_ap(s, t) for s, t in zip(scores.T, targets.T)]
    assert whole["C-AP"] == pytest.approx(100 * np.mean(per_class), abs=1e-10)
    assert whole["O-AP"] == pytest.approx(100 * sklearn_ap(scores.ravel(), targets.ravel()), abs=1e-10)


def test_classes_without_positives_get_zero_and_count_in_the_mean() -> None:
    scores = np.array([[0.9, 0.9], [0.1, 0.1]], np.float32)
    targets = np.array([[1, 0], [0, 0]], np.uint8)
    assert average_precision(scores, targets).tolist() == [1.0, 0.0]
    summary = summarise(scores, targets)
    assert (summary["C-AP"], summary["C-P"], summary["C-R"]) == (50.0, 50.0, 50.0)


def test_constant_scores_have_ap_equal_to_prevalence_and_all_positive_has_one() -> None:
    constant, targets = np.full((10, 1), 0.3, np.float32), np.arange(10)[:, None] < 3
    assert average_precision(constant, targets)[0] == pytest.approx(0.3, abs=1e-15)
    assert average_precision(constant, np.ones((10, 1), bool)).tolist() == [1.0]
    assert average_precision(constant[:1], targets[:1]).tolist() == [1.0]


def test_uninformative_scores_have_ap_near_prevalence() -> None:
    rng = np.random.default_rng(1)
    targets = rng.random((20_000, 3)) < (0.5, 0.1, 0.02)
    ap = average_precision(rng.random((20_000, 3), dtype=np.float32), targets)
    np.testing.assert_allclose(ap, targets.mean(0), atol=0.01)


# The published, binned average precision.


@given(tasks())
@settings(max_examples=50)
def test_binned_ap_is_the_published_definition(task: tuple[Array, Array]) -> None:
    scores, targets = task
    per_class = [published_ap(s, t) for s, t in zip(scores.T, targets.T)]
    summary = summarise(scores, targets)
    assert summary["C-AP-binned200"] == pytest.approx(100 * np.mean(per_class), abs=1e-10)
    assert summary["O-AP-binned200"] == pytest.approx(100 * published_ap(scores, targets), abs=1e-10)
    for k, ap in enumerate(per_class):
        alone = summarise(scores[:, [k]], targets[:, [k]])
        assert alone["C-AP-binned200"] == alone["O-AP-binned200"] == pytest.approx(100 * ap, abs=1e-10)


def test_binned_counts_are_right_on_and_beside_every_threshold() -> None:
    grid = (np.arange(200) / 199).astype(np.float32)
    beside = np.concatenate([np.nextafter(grid, np.float32(0)), grid, np.nextafter(grid, np.float32(1))])
    scores = beside[:, None]
    targets = np.arange(len(scores))[:, None] % 3 == 0
    counts = ranking.rank(scores, targets, overall=False)
    above = scores.astype(np.float64) > ranking.binned_thresholds()  # [B, T]
    assert counts.tp[:-1, 0].tolist() == (above & targets).sum(0).tolist()
    assert counts.predicted[:-1, 0].tolist() == above.sum(0).tolist()


def test_compressing_scores_lowers_binned_ap_and_leaves_exact_ap_alone() -> None:
    """The reason why exact AP is the headline."""
    scores, targets = flair_like(2)
    before, after = summarise(scores, targets), summarise(scores * np.float32(2.0**-8), targets)
    assert after["C-AP"] == before["C-AP"]
    assert after["O-AP"] == before["O-AP"]
    assert before["C-AP-binned200"] == pytest.approx(before["C-AP"], abs=1.5)
    assert after["C-AP-binned200"] < 0.7 * before["C-AP-binned200"]


# The other columns.


def test_c_f1_is_the_harmonic_mean_of_the_papers_columns() -> None:
    """Table 1, C-R-17: C-P 71.7 and C-R 49.3 give C-F1 58.4; O-P 81.8 and O-R 74.2 give 77.8."""
    assert round(f1(71.7, 49.3), 1) == 58.4
    assert round(f1(81.8, 74.2), 1) == 77.8
    assert f1(0.0, 0.0) == 0.0


def test_columns_of_a_small_case_by_hand() -> None:
    scores = np.array([[0.9, 0.5, 0.1], [0.8, 0.4, 0.2], [0.7, 0.3, 0.6]], np.float32)
    targets = np.array([[1, 1, 0], [0, 0, 0], [1, 0, 1]], np.uint8)
    summary = summarise(scores, targets)
    # Class 0: 3 predicted, 2 right of 2. Class 1: none predicted (0.5 is not above 0.5). Class 2: perfect.
    assert list(summary) == [*COLUMNS, "C-AP-binned200", "O-AP-binned200"]
    c_p, c_r = 100 * (2 / 3 + 0 + 1) / 3, 100 * (1 + 0 + 1) / 3
    o_p, o_r = 75.0, 75.0
    c_ap = 100 * ((1 + 2 / 3) / 2 + 1 + 1) / 3
    o_ap = 100 * (1 + 2 / 3 + 3 / 4 + 4 / 5) / 4
    expected = (c_ap, c_p, c_r, 2 * c_p * c_r / (c_p + c_r), o_ap, o_p, o_r, 75.0)
    assert [summary[name] for name in COLUMNS] == pytest.approx(expected, abs=1e-12)


@given(tasks())
@settings(max_examples=60)
def test_precision_and_recall_equal_scikit_learn(task: tuple[Array, Array]) -> None:
    scores, targets = task
    assume(scores.shape[1] > 1)
    summary = summarise(scores, targets)
    for prefix, average in (("C", "macro"), ("O", "micro")):
        p, r, _, _ = oracle.precision_recall_fscore_support(
            targets, scores > 0.5, average=average, zero_division=0
        )
        assert summary[f"{prefix}-P"] == pytest.approx(100 * p, abs=1e-10)
        assert summary[f"{prefix}-R"] == pytest.approx(100 * r, abs=1e-10)
        assert summary[f"{prefix}-F1"] == pytest.approx(f1(100 * p, 100 * r), abs=1e-10)


def test_columns_agree_with_torchmetrics_where_definitions_coincide() -> None:
    """All but C-F1, which torchmetrics takes as the mean of per-class F1."""
    scores, targets = flair_like(3)
    s, t, k = torch.from_numpy(scores), torch.from_numpy(targets).long(), scores.shape[1]
    expected = {
        "C-AP": tm.multilabel_average_precision(s, t, k, average="macro"),
        "O-AP": tm.multilabel_average_precision(s, t, k, average="micro"),
        "C-P": tm.multilabel_precision(s, t, k, average="macro"),
        "C-R": tm.multilabel_recall(s, t, k, average="macro"),
        "O-P": tm.multilabel_precision(s, t, k, average="micro"),
        "O-R": tm.multilabel_recall(s, t, k, average="micro"),
        "O-F1": tm.multilabel_f1_score(s, t, k, average="micro"),
    }
    summary = summarise(s, t)  # CPU tensors will do
    for name, value in expected.items():
        assert summary[name] == pytest.approx(100 * float(value), abs=1e-3), name


def test_one_label_gives_the_ordinary_binary_metrics() -> None:
    scores, targets = flair_like(4, k=1)
    summary = summarise(scores, targets)
    predicted = scores[:, 0] > 0.5
    assert summary["accuracy"] == pytest.approx(100 * oracle.accuracy_score(targets[:, 0], predicted))
    for c, o in zip(COLUMNS[:4], COLUMNS[4:]):
        assert summary[c] == pytest.approx(summary[o], abs=1e-12)
    assert summary["O-F1"] == pytest.approx(100 * oracle.f1_score(targets[:, 0], predicted))
    assert "accuracy" not in summarise(*flair_like(4, k=2))


def test_cross_entropy_is_torchs_mean_over_images_and_classes_and_survives_saturation() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(scale=5, size=(12, 3)).astype(np.float32)
    logits[0] = (1e4, -1e4, 0)
    targets = rng.random((12, 3)) < 0.5
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits).double(), torch.from_numpy(targets).double()
    )
    losses, _ = MultiLabel().scored(torch.from_numpy(logits), torch.from_numpy(targets))
    assert float(losses.mean()) == pytest.approx(float(expected), rel=2 * 36**0.5 * 2.0**-24)


# Merging.


@st.composite
def splits(draw: st.DrawFn) -> tuple[Array, Array, list[list[Array]]]:
    """A task, and its rows dealt to W workers as batches, in any order; some workers may get none."""
    scores, targets = draw(tasks())
    order = np.array(draw(st.permutations(range(len(scores)))))
    edges = sorted(draw(st.lists(st.integers(0, len(scores)), max_size=6)))
    batches = np.split(order, edges)
    workers = draw(st.integers(1, 4))
    return scores, targets, [batches[w::workers] for w in range(workers)]


def scored(n: int, rows: Array, scores: Array, targets: Array) -> MultiLabelScores:
    return MultiLabelScores.from_batch(n, rows, scores[rows], targets[rows])


def total(values: list[Any]) -> Any:
    result = values[0]
    for value in values[1:]:
        result = result + value
    return result


@given(splits())
@settings(max_examples=70)
def test_scores_survive_any_split_over_batches_and_workers_bit_for_bit(
    case: tuple[Array, Array, list[list[Array]]],
) -> None:
    scores, targets, workers = case
    n, k = scores.shape
    none = np.zeros(0, np.int64)
    local = [total([scored(n, b, scores, targets) for b in [none, *batches]]) for batches in workers]
    vectors = [value.to_vector() for value in local]
    assert all(v.dtype == np.float32 and v.shape == (n * (k + 1),) for v in vectors)
    reduced = local[0].from_vector(total(vectors))
    assert reduced.scores().tobytes() == np.abs(scores).tobytes()  # -0.0 becomes 0.0
    for union in (reduced, total(local), total(local[::-1])):
        assert union.scores().tolist() == scores.tolist()
        assert union.targets().tolist() == targets.tolist()
        assert union.overall_value == average_precision(scores, targets).mean()
        assert union.summary() == summarise(scores, targets)
    assert reduced == total(local)


def test_no_vector_entry_is_subnormal_and_absent_rows_stay_absent() -> None:
    """A device that flushes subnormals to zero must not change a score, nor lose a row of zeros."""
    scores = np.array([[0.0, TINY], [3e-42, 1.0]], np.float32)
    targets = np.array([[0, 1], [1, 0]], np.uint8)
    value = MultiLabelScores.from_batch(5, [3, 1], scores, targets)
    vector = value.to_vector()
    assert (np.abs(vector[vector != 0]) >= np.finfo(np.float32).tiny).all()
    back = value.from_vector(vector)
    for reading in (back, value):  # the batch came in descending order of rows
        assert reading.rows().tolist() == [1, 3]
        assert reading.scores().tolist() == scores[::-1].tolist()
        assert reading.targets().tolist() == targets[::-1].tolist()


def test_rows_scored_twice_are_an_error_on_one_worker_and_on_two() -> None:
    scores, targets = flair_like(6, n=4, k=2)
    a, b = scored(4, np.array([0, 1, 2]), scores, targets), scored(4, np.array([2, 3]), scores, targets)
    with pytest.raises(ValueError, match=r"1 of 4 evaluation rows .* first is row 2: give each row to one"):
        (a + b).scores()
    for vector in ((a + b).to_vector(), a.to_vector() + b.to_vector()):
        with pytest.raises(ValueError, match="1 of 4 evaluation rows were scored more than once"):
            a.from_vector(vector)


def test_adding_batches_copies_nothing_and_has_no_depth_limit() -> None:
    scores, targets = flair_like(7, n=5000, k=2)
    first = scored(5000, np.arange(2), scores, targets)
    shared = MultiLabelScores.from_batch(2, [0, 1], scores[:2], targets[:2])
    assert np.shares_memory(shared.scores(), scores)
    chain = total([first] + [scored(5000, np.array([i]), scores, targets) for i in range(2, 5000)])
    assert np.array_equal(chain.scores(), scores)
    assert chain.overall_value == average_precision(scores, targets).mean()


def test_values_travel_in_pfl_metrics() -> None:
    scores, targets = flair_like(8, n=50)

    def one(rows: Array) -> Metrics:
        return Metrics([(StringMetricName("scores"), scored(50, rows, scores, targets))])

    workers = [one(np.arange(0, 20)) + one(np.arange(20, 30)), one(np.arange(30, 50))]
    vectors = [np.add(a, b) for a, b in zip(*(w.to_vectors() for w in workers))]
    simple = workers[0].from_vectors(vectors).to_simple_dict()
    assert simple == {"Scores": average_precision(scores, targets).mean()}


# Mistakes and divergence.


def test_nan_scores_are_carried_through_workers_and_counted_in_the_error() -> None:
    scores, targets = flair_like(9, n=6, k=3)
    scores[[1, 4, 4], [0, 1, 2]] = np.nan
    halves = [np.arange(3), np.arange(3, 6)]
    parts = [scored(6, rows, scores, targets) for rows in halves]
    carried = parts[0].from_vector(total([part.to_vector() for part in parts]))
    for merged in (total(parts), carried):
        with pytest.raises(ValueError, match="3 of 18 scores are NaN: the model has diverged"):
            _ = merged.overall_value
    assert np.array_equal(carried.scores(), scores, equal_nan=True)
    assert np.array_equal(carried.targets(), targets)
    for function in (average_precision, summarise):
        with pytest.raises(ValueError, match="3 of 18 scores are NaN"):
            function(scores, targets)


def test_mistakes_are_named() -> None:
    half = np.full((2, 3), 0.5, np.float32)
    with pytest.raises(ValueError, match=r"scores \(2, 3\) and targets \(2, 2\) must have one shape"):
        summarise(half, np.zeros((2, 2), bool))
    with pytest.raises(ValueError, match="targets must be 0 or 1"):
        average_precision(half, np.full((2, 3), 2, np.uint8))
    with pytest.raises(ValueError, match="nothing to evaluate"):
        summarise(half[:0], np.zeros((0, 3), bool))
    with pytest.raises(ValueError, match=r"apply the sigmoid first: they span -1.0 .. 3.0"):
        MultiLabelScores.from_batch(2, [0, 1], half * 4 - [[3], [-1]], np.zeros((2, 3), bool))
    for low, high in ((-0.5, 0.5), (0.5, 1.5)):
        with pytest.raises(ValueError, match=rf"they span {low} .. {high}"):
            MultiLabelScores.from_batch(2, [0, 1], np.array([[low], [high]]), np.zeros((2, 1), bool))
    with pytest.raises(ValueError, match=r"rows \(1,\), scores \(2, 3\) and targets \(2, 3\)"):
        MultiLabelScores.from_batch(2, [0], half, np.zeros((2, 3), bool))


def test_a_user_without_any_label_has_no_score_of_what_there_is_to_find() -> None:
    scores = np.random.default_rng(11).random((3, 4), dtype=np.float32)
    found = user_columns(scores, np.zeros((3, 4), bool))
    assert {name for name, value in found.items() if np.isnan(value)} == {"O-AP", "O-R", PRESENT}
    assert not any(map(np.isnan, user_columns(scores, np.eye(3, 4, dtype=bool)).values()))


@pytest.mark.parametrize("targets", [np.eye(3), np.eye(3, dtype=np.int64), np.eye(3, dtype=np.uint8)])
def test_targets_of_any_number_type_mean_the_same(targets: Array) -> None:
    scores = np.random.default_rng(10).random((3, 3), dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert summarise(scores, targets) == summarise(scores, targets == 1)


@pytest.mark.parametrize("dtype", [np.bool_, np.uint8])
def test_targets_of_one_byte_are_not_copied(dtype: Any) -> None:
    targets = np.eye(3, dtype=dtype)
    assert np.shares_memory(as_bool(targets), targets)
