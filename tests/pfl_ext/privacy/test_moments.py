"""The moments of channels: exact, bounded for each user, noised, and counted."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pfl_ext.data.federated_dataset import natural_partition
from pfl_ext.models.standardised import Standardised
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.epsilon import System
from pfl_ext.privacy.moments import IMAGES, Release, channel_moments

CHANNELS, PIXELS = 5, 4
Features = npt.NDArray[np.float32]


def users(sizes: Sequence[int]) -> Any:
    names = [f"user {n}" for n in range(len(sizes))]
    return natural_partition(SimpleNamespace(user_ids=names, user_offsets=np.cumsum([0, *sizes])))


def features(number: int) -> Features:
    return np.random.default_rng(number).normal(1, 2, (number, CHANNELS * PIXELS)).astype(np.float32)


def test_exact_moments_are_the_means_over_users_of_their_own_means() -> None:
    """Also of users who fill more than one read, and of one without images, who counts as zero."""
    sizes = [3, 0, IMAGES + 5, 1, 40]
    found = features(sum(sizes))
    mean, square = channel_moments(lambda rows: found[rows], users(sizes), CHANNELS)
    maps = found.astype(np.float64).reshape(-1, CHANNELS, PIXELS)
    parts = np.split(maps, np.cumsum(sizes)[:-1])
    expected = [
        sum(p.mean((0, 2)) for p in parts if len(p)) / 5,
        sum((p**2).mean((0, 2)) for p in parts if len(p)) / 5,
    ]
    np.testing.assert_allclose(mean.numpy(), expected[0], rtol=1e-5)
    np.testing.assert_allclose(square.numpy(), expected[1], rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(gone=st.integers(0, 3), size=st.sampled_from([0.0, 1e-3, 1.0, 1e6, float("nan"), float("inf")]))
def test_without_one_user_a_sum_changes_by_its_bound_at_most(gone: int, size: float) -> None:
    sizes, bounds = [3, 1, 7, 2], (0.4, 0.7)
    found = features(sum(sizes))
    rows = slice(sum(sizes[:gone]), sum(sizes[: gone + 1]))
    found[rows] *= size
    release = Release(1.0, bounds, 3)

    def sums(found: Features, sizes: Sequence[int]) -> list[npt.NDArray[np.float64]]:
        moments = channel_moments(lambda rows: found[rows], users(sizes), CHANNELS, release)
        return [moment.double().numpy() * len(sizes) for moment in moments]

    fewer = sums(np.delete(found, rows, 0), [n for user, n in enumerate(sizes) if user != gone])
    for one, other, bound in zip(sums(found, sizes), fewer, bounds):
        change = float(np.linalg.norm(one - other))  # both have the same noise
        assert change <= bound + 2**-22 * float(np.linalg.norm(one) + np.linalg.norm(other))
        if size == 1e6:
            assert change > 0.999 * bound
        if size in (0.0,) or not np.isfinite(size):
            assert change <= 2**-22 * float(np.linalg.norm(one) + np.linalg.norm(other))


def test_the_noise_is_a_multiple_of_each_bound_and_that_of_the_secret() -> None:
    zeros = np.zeros((1, 4000), np.float32)

    def released(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        return channel_moments(lambda rows: zeros[rows], users([1]), 4000, Release(2.0, (0.5, 3.0), seed))

    mean, square = released(1)
    # Of 4,000 draws the deviation is within 5 / sqrt(8,000) of theirs, but for one draw in a million.
    assert float(mean.std()) == pytest.approx(2 * 0.5, rel=0.056)
    assert float(square.std()) == pytest.approx(2 * 3.0, rel=0.056)
    assert abs(float(torch.corrcoef(torch.stack([mean, square]))[0, 1])) < 5 / 4000**0.5
    assert torch.equal(released(1)[0], mean)
    assert not torch.equal(released(2)[0], mean)


def test_standardised_channels_have_mean_0_and_variance_1_and_nonsense_becomes_zero() -> None:
    found = features(50)
    layer = Standardised(CHANNELS)
    x = torch.from_numpy(found).view(50, CHANNELS, 2, 2)
    assert torch.equal(layer(x), x)
    layer.set(*channel_moments(lambda rows: found[rows], users([50]), CHANNELS))
    out = layer(x).double()
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(CHANNELS).double(), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.square().mean((0, 2, 3)), torch.ones(CHANNELS).double(), rtol=1e-4, atol=0)
    layer.set(
        torch.full((CHANNELS,), 2.0), torch.full((CHANNELS,), 3.0)
    )  # whose variance noise made negative
    assert not layer(x).any()


def test_two_releases_are_composed_with_the_rounds() -> None:
    """As one Gaussian mechanism where every user takes part in a single round: 1/z^2 add up."""
    both = System(1000, 1000, 2.0, 1e-5, "poisson", "pld", (4.0, 4.0))
    one = System(1000, 1000, (2.0**-2 + 2 * 4.0**-2) ** -0.5, 1e-5, "poisson", "pld")
    assert both.epsilon_after(1) == pytest.approx(one.epsilon_after(1), rel=1e-3)
    assert both.epsilon_after(0) > 0, "what was released before the first round is spent"
    made = PrivacyConfig(epsilon=2.0, moments_multiplier=4.0).calibrate(1000, 100, 10)
    without = PrivacyConfig(epsilon=2.0).calibrate(1000, 100, 10)
    assert made.executed.noise_multiplier > without.executed.noise_multiplier
    assert made.epsilon <= 2.0
    assert made.to_json()["as_executed"]["releases_before_training"] == [4.0, 4.0]


@pytest.mark.parametrize(
    "words",
    [{"sampler": "fixed"}, {"noise": "rounds_as_epochs"}, {"noise_cohort_size": 9}, {"noise_population": 9}],
)
def test_what_the_releases_are_not_argued_for_is_refused(words: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="moments_multiplier is accounted for Poisson sampling"):
        PrivacyConfig(epsilon=2.0, moments_multiplier=4.0, **words)
