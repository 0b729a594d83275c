"""FedVC: equal virtual users by resampling, drawn in proportion to their images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.sampling import LocalSampling
from tests.pfl_ext.data.test_federated_dataset import seen_rows
from tests.pfl_ext.engine.setting import Setting, distance, rounding_of
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore


def virtual(size: int, **options: Any) -> LocalSampling:
    return local_sampling(
        num_epochs=1, batch_size=4, straddle=False, input_size=8, virtual_size=size, max_images=3, **options
    )


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 24), st.integers(0, 5))
def test_every_user_trains_on_exactly_so_many_of_its_own_images(
    sizes: list[int], size: int, round_number: int
) -> None:
    store, sampling = NumberedStore(sizes), virtual(size)
    data = FederatedImageDataset(store, sampling, seed=3)
    data.set_round(round_number)
    for member in data.members(len(sizes)):
        user = data.read(member)
        batches = seen_rows(user, sampling)
        rows = np.concatenate(batches)
        assert len(user) == len(rows) == size == member.num_images == member.num_passes
        assert len(batches) == member.num_steps == -(-size // 4)
        low, high = store.user_offsets[member.user : member.user + 2]
        assert ((low <= rows) & (rows < high)).all()
        if high - low >= size:
            assert len(set(rows.tolist())) == size, "without replacement where there are enough"


def test_images_keep_their_labels_when_they_come_twice() -> None:
    store, sampling = NumberedStore([3]), virtual(20)
    for images, targets, _ in FederatedImageDataset(store, sampling, seed=1).user_dataset(0).iter(4):
        rows = images[:, 0, 0, 2]
        assert torch.equal(targets.argmax(1), rows % store.num_labels)
    assert store.reads == 1


@pytest.mark.parametrize("images", [5, 12])
def test_resampling_is_uniform_and_anew_each_round(images: int) -> None:
    """Drawing 8 of 5 images with replacement, or 8 of 12 without, takes each as often, within 5 sigma."""
    sampling, rounds = virtual(8), 300
    data = FederatedImageDataset(NumberedStore([images]), sampling, seed=0)
    counts, drawn = np.zeros(images), set()
    for round_number in range(rounds):
        data.set_round(round_number)
        rows = np.sort(np.concatenate(seen_rows(data.user_dataset(0), sampling)))
        counts += np.bincount(rows, minlength=images)
        drawn.add(tuple(rows.tolist()))
    expected = rounds * 8 / images
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    assert len(drawn) > 50


@pytest.mark.parametrize("replacement", [False, True])
def test_users_come_in_proportion_to_their_images(replacement: bool) -> None:
    sizes = np.array([1, 2, 3, 4, 10, 20, 60])
    sampler: Any = "proportional_replacement" if replacement else "proportional"
    data = FederatedImageDataset(NumberedStore(sizes.tolist()), virtual(4), seed=5, sampler=sampler)
    rounds = 1500
    first = np.bincount([data.cohort(1, r)[0] for r in range(rounds)], minlength=7)
    share = sizes / sizes.sum()
    assert (np.abs(first - rounds * share) < 5 * np.sqrt(rounds * share)).all()
    cohorts = [data.cohort(3, r).tolist() for r in range(60)]
    assert any(len(set(c)) < 3 for c in cohorts) == replacement
    if replacement:
        twice = next(r for r, c in enumerate(cohorts) if len(set(c)) < 3)
        data.set_round(twice)
        assert sorted(m.turn for m in data.members(3)) != [0, 0, 0], "who comes twice brings another sample"
    else:
        assert all(sorted(data.cohort(7, r).tolist()) == list(range(7)) for r in range(5))
        with pytest.raises(ValueError, match="only 7 training users"):
            data.cohort(8, 0)


@pytest.mark.parametrize("engine", [False, True])
def test_for_users_of_one_size_it_is_fedavg(engine: bool) -> None:
    """Hsu et al. 2020, 5.3: "FedVC is equivalent to FedAvg when all clients are of the same size"."""
    plain = local_sampling(num_epochs=1, batch_size=4, max_images=None, straddle=False, input_size=10)
    vc = local_sampling(num_epochs=1, batch_size=4, straddle=False, input_size=10, virtual_size=9)
    sizes = [9] * 6
    fedavg = Setting(sizes, plain, by_images=True, cohort=4, rounds=3)
    fedvc = Setting(sizes, vc, by_images=False, cohort=4, rounds=3, sampler="proportional")
    ours, weight, _ = fedvc.run(engine)
    theirs, their_weight, _ = fedavg.run(engine)
    assert (weight, their_weight) == (4, 36)
    mean = {name: total / weight for name, total in ours.items()}
    theirs = {name: total / their_weight for name, total in theirs.items()}
    assert distance(mean, theirs) <= rounding_of(fedavg)
    pairs: list[tuple[LocalSampling, Any]] = [(plain, "fixed"), (vc, "proportional")]
    data = [
        FederatedImageDataset(NumberedStore(sizes, side=10), sampling, seed=3, sampler=sampler)
        for sampling, sampler in pairs
    ]
    for mine, other in zip(*(d.members(4) for d in data)):
        assert mine == other
        batches = [d.read(mine).iter(4) for d in data]
        assert all(torch.equal(x, y) for a, b in zip(*batches) for x, y in zip(a, b))


def test_without_equal_sizes_it_is_not() -> None:
    vc = local_sampling(num_epochs=1, batch_size=4, straddle=False, input_size=10, virtual_size=9)
    plain = local_sampling(num_epochs=1, batch_size=4, max_images=None, straddle=False, input_size=10)
    one, other = (Setting([9, 3, 20], s, by_images=False).run(True)[0] for s in (vc, plain))
    assert distance(one, other) > 1e-3
