from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.arrays import IntArray
from pfl_ext.data.federated_dataset import FederatedImageDataset, iid_partition, natural_partition
from pfl_ext.data.sampling import LocalSampling
from pfl_ext.data.user_images import UserImages
from pfl_ext.privacy.sampling import private_cohort
from pfl_ext.randomness import stream
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore, rows_of

SMALL = local_sampling(num_epochs=2, batch_size=4, max_images=6, input_size=8)


def users(store: NumberedStore, sampling: LocalSampling = SMALL, **options: Any) -> FederatedImageDataset:
    return FederatedImageDataset(store, sampling, **{"seed": 3, **options})


def local_batches(user: UserImages, sampling: LocalSampling) -> list[tuple[torch.Tensor, ...]]:
    """All batches of a local training, asked for as pfl does: one call of ``iter`` an epoch."""
    return [batch for _ in range(sampling.num_epochs) for batch in user.iter(sampling.batch_size)]


def seen_rows(user: UserImages, sampling: LocalSampling) -> list[IntArray]:
    return [rows_of(images.numpy()) for images, *_ in local_batches(user, sampling)]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=6),
    partition=st.sampled_from(["user", "iid"]),
    cap=st.sampled_from(["random", "first"]),
    straddle=st.booleans(),
    reshuffle=st.booleans(),
)
def test_every_image_keeps_its_own_labels(
    sizes: list[int], partition: str, cap: Any, straddle: bool, reshuffle: bool
) -> None:
    """Predecessors 1: Flower's baseline pairs all of a user's labels with the user's first image."""
    store = NumberedStore(sizes)
    sampling = local_sampling(2, 4, 6, cap=cap, straddle=straddle, reshuffle=reshuffle, input_size=8)
    shares = iid_partition(store, 1) if partition == "iid" else None
    data = users(store, sampling, partition=shares)
    data.set_round(2)
    for user, _ in data.get_cohort(len(sizes)):
        for images, targets, _ in local_batches(user, sampling):
            rows = rows_of(images.numpy())
            assert torch.equal(targets.argmax(1), torch.from_numpy(rows % store.num_labels))
            assert torch.equal(targets.sum(1), torch.ones(len(rows)))


def test_a_user_trains_on_its_own_images_once_an_epoch() -> None:
    store = NumberedStore([3, 5, 9])
    data = users(store, local_sampling(3, 2, None, input_size=8))
    for user, _ in data.get_cohort(3):
        u = int(str(user.user_id).removeprefix("user-"))
        rows = np.concatenate(seen_rows(user, local_sampling(3, 2)))
        all_rows = np.arange(store.user_offsets[u], store.user_offsets[u + 1])
        assert sorted(rows.tolist()) == sorted(all_rows.tolist() * 3)


def test_the_cap_takes_another_random_subset_each_round() -> None:
    """Predecessors 7: always the first 512 images."""
    data = users(NumberedStore([100]), local_sampling(1, 64, 10, input_size=8))
    taken = []
    for round_number in range(40):
        data.set_round(round_number)
        ((user, _),) = data.get_cohort(1)
        assert len(user) == 10
        taken.append(set(seen_rows(user, local_sampling(1, 64))[0].tolist()))
    assert len(set.union(*taken)) > 90
    assert len({frozenset(rows) for rows in taken}) == 40


@given(st.integers(0, 60), st.integers(1, 40), st.sampled_from(["random", "first"]), st.integers(0, 2**32))
def test_the_cap_takes_distinct_images_in_the_stores_order(n: int, most: int, cap: Any, seed: int) -> None:
    all_rows = 1000 + 7 * np.arange(n)
    rows = local_sampling(max_images=most, cap=cap).take(all_rows, stream(seed, "cap")).tolist()
    assert len(rows) == min(n, most)
    assert rows == sorted(set(rows)), "no image is drawn twice"
    assert set(rows) <= set(all_rows.tolist())


def test_the_first_images_are_taken_when_asked_for() -> None:
    data = users(NumberedStore([100]), local_sampling(1, 64, 10, cap="first", input_size=8))
    assert set(seen_rows(data.user_dataset(0), local_sampling(1, 64))[0].tolist()) == set(range(10))


def test_batches_straddle_epochs_as_in_the_paper_code() -> None:
    """A user of 5 makes one step of 10, not two of 5."""
    sampling = local_sampling(2, 16, 512, input_size=8)
    assert [len(b) for b in seen_rows(users(NumberedStore([5]), sampling).user_dataset(0), sampling)] == [10]
    apart = local_sampling(2, 16, 512, straddle=False, input_size=8)
    assert [len(b) for b in seen_rows(users(NumberedStore([5]), apart).user_dataset(0), apart)] == [5, 5]


def test_epochs_are_reshuffled_unless_told_otherwise() -> None:
    for reshuffle in (True, False):
        sampling = local_sampling(2, 50, None, straddle=False, reshuffle=reshuffle, input_size=8)
        first, second = seen_rows(users(NumberedStore([50]), sampling).user_dataset(0), sampling)
        assert np.array_equal(first, second) != reshuffle


@pytest.mark.parametrize("straddle", [False, True])
def test_images_that_are_not_shuffled_come_in_the_stores_order(straddle: bool) -> None:
    sampling = local_sampling(2, 4, None, straddle=straddle, shuffle=False, input_size=8)
    data = users(NumberedStore([6, 7]), sampling)
    for round_number in (0, 1):
        data.set_round(round_number)
        seen = seen_rows(data.user_dataset(1), sampling)
        assert np.concatenate(seen).tolist() == [*range(6, 13)] * 2


@given(n=st.integers(1, 60), size=st.integers(1, 20), epochs=st.integers(1, 3), straddle=st.booleans())
def test_predicted_steps_are_the_steps_made(n: int, size: int, epochs: int, straddle: bool) -> None:
    sampling = local_sampling(epochs, size, 40, straddle=straddle)
    batches = [b for epoch in sampling.epochs(min(n, 40), stream(0, "test")) for b in epoch]
    assert int(sampling.num_steps(np.array([n]))[0]) == len(batches)


def test_a_cohort_is_a_function_of_seed_and_round() -> None:
    """Predecessors 10: a resumed run replays the cohorts."""
    cohorts = []
    for order in ([0, 1, 2, 3], [3, 1]):
        data = users(NumberedStore([2] * 50))
        for round_number in order:
            data.set_round(round_number)
            cohorts.append((round_number, data.cohort(10).tolist()))
    by_round: dict[int, list[int]] = {}
    for round_number, cohort in cohorts:
        assert by_round.setdefault(round_number, cohort) == cohort
    assert len({tuple(c) for c in by_round.values()}) == 4
    other = users(NumberedStore([2] * 50), seed=4)
    assert other.cohort(10).tolist() != by_round[0]


def test_a_user_drawn_twice_with_replacement_trains_on_different_crops() -> None:
    data = users(NumberedStore([6]), sampler="replacement")
    first, second = [user for user, _ in data.get_cohort(2)]
    assert not all(
        torch.equal(a[2], b[2]) for a, b in zip(local_batches(first, SMALL), local_batches(second, SMALL))
    )


def test_what_a_user_does_in_a_round_depends_on_nothing_else() -> None:
    store = NumberedStore([7] * 6, side=16)
    alone, crowd = users(store, prefetch=0), users(store, prefetch=5, threads=3)
    alone.set_round(4)
    crowd.set_round(4)
    for user, seed in crowd.get_cohort(6):
        number = int(str(user.user_id).removeprefix("user-"))
        again = alone.user_dataset(number)
        for a, b in zip(local_batches(user, SMALL), local_batches(again, SMALL), strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b))
        assert 0 <= seed < 2**32


def test_a_cohort_larger_than_the_population_is_refused() -> None:
    with pytest.raises(ValueError, match=r"only 3 training users: .* --federated\.cohort_size 3"):
        users(NumberedStore([1, 1, 1])).cohort(4)


def test_a_user_drawn_outside_a_cohort_is_refused() -> None:
    with pytest.raises(TypeError, match="call set_round and get_cohort"):
        next(users(NumberedStore([3])))


def test_iid_deals_every_image_once_in_equal_shares() -> None:
    """Predecessors 6: 50 images for each user instead of the real mean."""
    store = NumberedStore([10, 20, 30, 40])
    iid, natural = iid_partition(store, 5), natural_partition(store)
    assert sorted(iid.rows.tolist()) == list(range(100))
    assert iid.sizes.tolist() == [25, 25, 25, 25]
    assert len(iid.user_ids) == len(natural.user_ids)
    assert iid.sizes.mean() == natural.sizes.mean()
    mixed = [
        len({int(np.searchsorted(store.user_offsets, r, "right")) for r in iid.rows_of(u)}) for u in range(4)
    ]
    assert min(mixed) > 1
    assert not np.array_equal(iid_partition(store, 6).rows, iid.rows)


@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    workers=st.integers(1, 5),
    round_number=st.integers(0, 5),
)
def test_workers_share_a_cohort_without_overlap(sizes: list[int], workers: int, round_number: int) -> None:
    data = users(NumberedStore(sizes))
    data.set_round(round_number)
    cohort = data.cohort(len(sizes))
    shares = data.assign(cohort, workers)
    assert sorted(p for share in shares for p in share) == list(range(len(sizes)))
    work = SMALL.num_steps(data.partition.sizes[cohort]) + 1
    loads = [int(work[share].sum()) for share in shares]
    assert max(loads) <= work.sum() / workers + work.max() * (1 - 1 / workers)  # Graham's bound


def test_only_this_workers_users_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = NumberedStore([2] * 8)
    data = users(store)
    monkeypatch.setattr(data, "assign", lambda cohort, world_size: [[1, 5]])
    cohort = data.cohort(8)
    got = [str(user.user_id) for user, _ in data.get_cohort(8)]
    assert got == [f"user-{cohort[1]}", f"user-{cohort[5]}"]
    assert store.reads == 2


def test_turns_are_those_that_this_worker_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    data, cohort = users(NumberedStore([2] * 8)), np.array([5, 1, 5, 5, 2])
    monkeypatch.setattr(data, "assign", lambda cohort, world_size: [[3, 4, 2, 1]])
    monkeypatch.setattr(data, "cohort", lambda cohort_size: cohort)
    turns = {user: list(found) for user, found in data.later_turns(cohort).items()}
    assert turns == {5: [2, 1]} == {5: [member.turn for member in data.share(5) if member.user == 5]}
    assert data.later_turns(cohort[:2]) == {}


def test_an_empty_poisson_cohort_is_one_user_without_images() -> None:
    data = users(NumberedStore([1] * 3), sampler="poisson")
    for round_number in range(1000):
        data.set_round(round_number)
        if not len(data.cohort(1)):
            break
    ((nobody, _),) = data.get_cohort(1)
    assert len(nobody) == 0
    assert local_batches(nobody, SMALL) == []


@pytest.mark.parametrize("sampler", ["poisson", "fixed", "cyclic"])
def test_cohorts_are_drawn_by_the_function_that_the_accounting_is_for(sampler: Any) -> None:
    """The accounting and the audit speak of `private_cohort`; training must use no other.

    Its cohorts' sizes, and that nobody is drawn twice and all evenly, are tested with the accounting.
    """
    data = users(NumberedStore([1] * 60), sampler=sampler, cohort_seed=2**100 + 3)
    for round_number in range(5):
        drawn = private_cohort(sampler, 2**100 + 3, round_number, 60, 20)
        assert np.array_equal(data.cohort(20, round_number), drawn)


@pytest.mark.parametrize("by_user", [True, False])
def test_the_noise_of_users_grows_with_their_number(by_user: bool) -> None:
    """NIID-Bench's feature skew: the first user has none, and the last all of it."""
    sampling = replace(SMALL, keys=True, noise_by_user=by_user)
    for sizes, levels in (([3, 5, 2], [0.0, 0.5, 1.0]), ([4], [0.0])):
        data = users(NumberedStore(sizes), sampling)
        for user, level in enumerate(levels):
            images = data.user_dataset(user)
            part = images.part(np.arange(2), 0)
            batches = [*images.iter(4), *images.once(), *part.iter(4)]
            assert {float(x) for *_, crops in batches for x in crops[:, 8]} == {level if by_user else 1.0}
