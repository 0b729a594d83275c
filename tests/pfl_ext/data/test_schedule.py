"""Shares of a cohort: complete, balanced, the same for everybody who computes them."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.arrays import FloatArray
from dataset.flair.mini import MiniSpec, _sizes
from dataset.store.index import SPLITS
from pfl_ext.data.federated_dataset import FederatedImageDataset
from pfl_ext.data.schedule import longest_first, predicted_costs
from tests.pfl_ext.samplings import local_sampling
from tests.pfl_ext.stores import NumberedStore

COSTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=8)


Costs = FloatArray


def round_robin(costs: Costs, world_size: int) -> list[list[int]]:
    """Position p to worker p mod W: pfl's default."""
    return [list(range(worker, len(costs), world_size)) for worker in range(world_size)]


def makespan(shares: list[list[int]], costs: Costs) -> float:
    """Time of the slowest worker."""
    return max(float(np.asarray(costs)[share].sum()) for share in shares)


def lower_bound(costs: Costs, world_size: int) -> float:
    """What no assignment can beat: the larger of the mean load and the dearest user."""
    return max(float(np.sum(costs)) / world_size, float(np.max(costs)))


@given(COSTS, st.integers(1, 4))
@settings(max_examples=60)
def test_the_slowest_worker_is_near_the_best_of_all_assignments(costs: list[float], workers: int) -> None:
    """Graham's bound, against the best found by trying all; and no assignment beats the lower bound."""
    array = np.array(costs)
    shares = longest_first(array, workers)
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    tried = itertools.product(range(workers), repeat=min(len(costs), 6))
    few = array[:6]
    best = min(max(few[np.array(where) == w].sum() for w in range(workers)) for where in tried)
    assert makespan(longest_first(few, workers), few) <= best * (4 / 3 - 1 / (3 * workers)) + 1e-9
    assert best >= lower_bound(few, workers) - 1e-9


def test_the_schedule_is_within_ten_percent_of_the_best_on_flairs_histogram() -> None:
    """Real sizes at full scale, costs with a fixed part, times that scatter by 5 % round the prediction."""
    sizes, _ = _sizes(spec := MiniSpec(), SPLITS.index("train"), spec.users("train"))
    sampling, rng = local_sampling(), np.random.default_rng(0)
    for workers in (2, 4, 8, 16, 64):
        ours, dealt = [], []
        for _ in range(40):
            cohort = sizes[rng.choice(len(sizes), 200, replace=False)]
            predicted = predicted_costs(sampling.num_steps(cohort), sampling.image_passes(cohort))
            true = predicted * rng.normal(1, 0.05, len(cohort))
            best = lower_bound(true, workers)
            ours.append(makespan(longest_first(predicted, workers), true) / best)
            dealt.append(makespan(round_robin(predicted, workers), true) / best)
        assert max(ours) < 1.1
        assert np.mean(ours) < np.mean(dealt)


def test_shares_follow_the_cost_of_images_and_of_users() -> None:
    """One user of 512 images is worth more than sixteen of one image; without images all are alike."""
    data = FederatedImageDataset(NumberedStore([512, *[1] * 16]), local_sampling(), seed=0)
    assert sorted(map(len, data.assign(np.arange(17), 2))) == [1, 16]
    assert sorted(map(len, data.assign(np.arange(1, 17), 2))) == [8, 8]
