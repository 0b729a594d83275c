"""Users one by one and after local fine-tuning, on a small network and made images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pfl.internal.ops import pytorch_ops
from sklearn.metrics import average_precision_score

from dataset.arrays import ByteArray, IntArray
from pfl_ext.algorithms.per_user import (
    Personalisation,
    per_user_scores,
    personalise,
    quantiles,
    shot_table,
    user_split,
)
from pfl_ext.models.classifier import ImageClassifier
from pfl_ext.tasks.multi_label import MultiLabel
from pfl_ext.tasks.multi_label_scores import PER_USER, PRESENT
from tests.closeness import assert_close_as_vector
from tests.pfl_ext.samplings import local_sampling


class Store:
    """Users of 1, 6 and 9 images; label 0 is a bright image, label 1 its opposite for the last user."""

    user_ids = ("one", "six", "nine")
    user_offsets = np.array([0, 1, 7, 16])

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        bright = np.arange(16) % 2
        self.images = (rng.integers(0, 80, (16, 8, 8, 3)) + 150 * bright[:, None, None, None]).astype(
            np.uint8
        )
        opposite = np.where(np.arange(16) >= 7, 1 - bright, bright)
        self.labels = np.stack([bright, opposite], 1).astype(np.uint8)
        self.asked: list[list[int]] = []

    def read(self, rows: IntArray) -> tuple[ByteArray, ByteArray]:
        self.asked.append(np.asarray(rows).tolist())
        return self.images[rows], self.targets(rows)

    def targets(self, rows: IntArray) -> ByteArray:
        return self.labels[rows]


def network() -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2)),
        task=MultiLabel(),
        input_size=8,
    )


def tuning(**other: Any) -> Personalisation:
    sampling = local_sampling(num_epochs=8, batch_size=4, straddle=False, flip="none", input_size=8)
    fields = {
        "learning_rate": 0.05,
        "max_grad_norm": 10.0,
        "train_share": 0.5,
        "min_images": 4,
        "split_seed": 0,
    }
    return Personalisation(sampling, **{**fields, **other})


@given(st.integers(2, 200), st.floats(0.01, 0.99), st.integers(0, 5), st.text(max_size=5))
def test_a_users_split_is_disjoint_complete_and_leaves_neither_part_empty(
    n: int, share: float, seed: int, user: str
) -> None:
    train, held_out = user_split(user, n, share, seed)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(n))
    assert len(train) == min(max(round(n * share), 1), n - 1)
    again = user_split(user, n, share, seed)
    assert train.tolist() == again[0].tolist()


def test_splits_differ_between_users_and_seeds() -> None:
    splits = {tuple(user_split(u, 40, 0.5, s)[0].tolist()) for u in ("a", "b") for s in (0, 1)}
    assert len(splits) == 4


def test_fine_tuning_sees_only_its_own_part_of_a_users_images() -> None:
    store = Store()
    scores_of = personalise(network(), store, tuning())
    held_six, trained_six, held_nine, trained_nine = store.asked
    assert not set(held_six) & set(trained_six)
    assert sorted(held_six + trained_six) == list(range(1, 7))
    assert sorted(held_nine + trained_nine) == list(range(7, 16))
    assert scores_of.users == ["six", "nine"]  # the user with one image is left out
    assert scores_of.trained_on.tolist() == [len(trained_six), len(trained_nine)]
    np.testing.assert_array_equal(scores_of.before.targets(), store.labels[[*held_six, *held_nine]])


def test_fine_tuning_leaves_the_model_and_helps_a_user_who_differs() -> None:
    module = network()
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    store = Store()
    scores_of = personalise(module, store, tuning())
    assert all(torch.equal(tensor, start[name]) for name, tensor in module.state_dict().items())
    loss = [np.abs(part.scores() - part.targets()).mean(1) for part in (scores_of.before, scores_of.after)]
    nine = slice(scores_of.offsets[1], scores_of.offsets[2])
    assert loss[1][nine].mean() < 0.6 * loss[0][nine].mean()
    with torch.no_grad():
        expected = torch.sigmoid(module(torch.from_numpy(store.images[store.asked[0]]))).numpy()
    assert_close_as_vector(scores_of.before.scores()[: len(expected)], expected, 100)


def test_fine_tuning_is_a_function_of_its_seed_and_each_user_alone() -> None:
    one, two = (personalise(network(), Store(), tuning()) for _ in range(2))
    assert one.after == two.after
    assert one.after != personalise(network(), Store(), tuning(split_seed=1)).after
    # A user's result does not depend on who was fine-tuned before: only "nine" is large enough here.
    alone = personalise(network(), Store(), tuning(min_images=8))
    np.testing.assert_array_equal(alone.after.scores(), one.after.scores()[one.offsets[1] :])


def test_fine_tuning_after_fedir_is_with_the_plain_loss() -> None:
    """Plain labels were read as weights of 0 and 1, and a label that a batch lacks gave NaN."""
    module = network()
    module.task = MultiLabel().reweighted()
    found, plain = personalise(module, Store(), tuning()), personalise(network(), Store(), tuning())
    assert_close_as_vector(found.after.scores(), plain.after.scores(), 1000)


def test_no_user_large_enough_is_a_mistake_that_names_the_key() -> None:
    with pytest.raises(ValueError, match=r"lower personal.min_images below 10"):
        personalise(network(), Store(), tuning(min_images=10))


def test_a_users_scores_are_those_of_its_rows_alone() -> None:
    rng = np.random.default_rng(1)
    scores = rng.random((12, 3)).astype(np.float32)
    targets = np.zeros((12, 3), np.uint8)
    targets[:7, 0] = [1, 0, 1, 0, 0, 1, 0]
    targets[2:5, 1] = [1, 1, 0]
    values = per_user_scores(MultiLabel(), scores, targets, np.array([0, 7, 12]))
    assert set(values) == set(PER_USER)
    ap = [100 * average_precision_score(targets[:7, k], scores[:7, k]) for k in (0, 1)]
    assert values[PRESENT][0] == pytest.approx(np.mean(ap))
    assert values["C-AP"][0] == pytest.approx(sum(ap) / 3)  # the class that the user lacks counts 0
    assert values["O-AP"][0] == pytest.approx(
        100 * average_precision_score(targets[:7].ravel(), scores[:7].ravel())
    )
    assert np.isnan(values[PRESENT][1])
    assert values["C-AP"][1] == 0


def test_quantiles_leave_out_what_is_no_number() -> None:
    found = quantiles(np.array([np.nan, 0.0, 10.0, 20.0, 30.0, 40.0]))
    assert found["n"] == 5
    assert (found["mean"], found["q0"], found["q25"], found["q50"], found["q100"]) == (20, 0, 10, 20, 40)
    assert found["q10"] == pytest.approx(4)
    assert quantiles(np.array([np.nan])) == {"n": 0}


def test_classes_are_told_apart_by_how_often_training_saw_them() -> None:
    ap = {"never": 10.0, "seldom": 20.0, "nearly": 40.0, "often": 60.0, "unseen in test": 0.0}
    positives = {"never": 1, "seldom": 2, "nearly": 1, "often": 9, "unseen in test": 0}
    found = shot_table(ap, positives, np.array([0, 1, 19, 20, 5]), 20)
    assert found == {
        "zero": {"classes": 1, "evaluated": 1, "C-AP": 10.0},
        "few": {"classes": 3, "evaluated": 2, "C-AP": 30.0},
        "many": {"classes": 1, "evaluated": 1, "C-AP": 60.0},
    }
    empty = shot_table(ap, dict.fromkeys(ap, 0), np.array([0, 1, 19, 20, 5]), 20)
    assert empty["few"]["C-AP"] is None


def test_workers_share_the_users_and_their_sum_is_what_one_worker_finds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Share:
        """One of two workers, without the other."""

        world_size = 2

        def __init__(self, rank: int) -> None:
            self.global_rank = rank

        def all_reduce(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            reduced.append(self.global_rank)
            return tensors

    reduced: list[int] = []
    whole = personalise(network(), Store(), tuning())
    parts = []
    for rank in range(2):
        monkeypatch.setattr(pytorch_ops, "distributed", Share(rank))
        parts.append(personalise(network(), Store(), tuning()))
    assert reduced == [0, 1], "each gives its sums to the other, once"
    for part in parts:
        assert part.users == whole.users
        np.testing.assert_array_equal(part.offsets, whole.offsets)
        np.testing.assert_array_equal(part.trained_on, whole.trained_on)
        assert 0 < len(part.after.rows()) < whole.offsets[-1], "each has done some of the users only"
    assert parts[0].before + parts[1].before == whole.before
    assert parts[0].after + parts[1].after == whole.after
