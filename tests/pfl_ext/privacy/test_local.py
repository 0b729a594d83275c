from __future__ import annotations

import json
import math
from typing import Any

import dp_accounting
import numpy as np
import pfl.model.pytorch  # noqa: F401  (makes torch the framework of pfl)
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from pfl.context import UserContext
from pfl.privacy.privacy_mechanism import LocalPrivacyMechanism
from pfl.stats import MappedVectorStatistics
from scipy.stats import ks_2samp

from dataset.arrays import FloatArray
from pfl_ext.privacy import local
from pfl_ext.privacy.central import METRICS, metric_name
from pfl_ext.privacy.local import FlatLaplaceMechanism, LocallyPrivateMean, LocalPrivacyConfig, laplace_sum
from pfl_ext.privacy.mechanisms import NOISE_CHUNK
from tests.pfl_ext.privacy.test_central import release


def local_outputs(config: LocalPrivacyConfig, value: float, trials: int) -> FloatArray:
    mechanism = config.make()
    out = []
    for seed in range(trials):
        stats = MappedVectorStatistics({"w": torch.tensor([value])})
        noised, _ = mechanism.postprocess_one_user(
            stats=stats, user_context=UserContext(num_datapoints=1, seed=seed)
        )
        out.append(float(noised["w"][0]))
    return np.array(out)


@pytest.mark.parametrize("mechanism, std", [("laplace", 2 * math.sqrt(2)), ("gaussian", None)])
def test_local_noise_is_for_updates_twice_the_bound_apart(mechanism: Any, std: float | None) -> None:
    """pfl's own noise for epsilon 1 is half of this, and worth epsilon 2 between C and -C."""
    config = LocalPrivacyConfig(mechanism, clipping_bound=1.0, epsilon=1.0, delta=1e-3)
    outputs = local_outputs(config, 30.0, 1500)
    if std is None:
        std = config.noise_multiplier
        ledger = PLDAccountant().compose(dp_accounting.GaussianDpEvent(std / 2))
        assert ledger.get_epsilon(1e-3) == pytest.approx(1.0, rel=1e-3)
    assert outputs.mean() == pytest.approx(1.0, abs=5 * std / math.sqrt(1500))
    assert outputs.std() == pytest.approx(std, rel=0.1)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_local_privacy_composes_over_participations(mechanism: Any) -> None:
    config = LocalPrivacyConfig(mechanism, epsilon=1.0, delta=1e-6)
    spent = [config.epsilon_after(k, 1e-6) for k in (0, 1, 4, 16)]
    assert spent[0] == 0
    assert spent[1] == pytest.approx(1.0, rel=2e-3)
    assert spent[1] < spent[2] < spent[3] < 16


def test_noise_is_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LocalPrivacyConfig(epsilon=1.5)
    first = config.epsilon_after(2, 1e-6)
    monkeypatch.setattr(local, "AnalyticGM_robust", None)
    assert config.epsilon_after(2, 1e-6) == first


@pytest.mark.parametrize("key", ["epsilon", "delta", "clipping_bound"])
def test_senseless_local_settings_are_refused_by_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key}\n.*greater than"):
        LocalPrivacyConfig(**{key: 0.0})  # type: ignore[arg-type]


def test_both_are_pfls_local_mechanisms() -> None:
    for mechanism in ("gaussian", "laplace"):
        assert isinstance(LocalPrivacyConfig(mechanism).make(), LocalPrivacyMechanism)


def test_epsilon_over_rounds_is_dp_accountings() -> None:
    laplace = LocalPrivacyConfig("laplace", epsilon=0.5)
    one = PLDAccountant().compose(dp_accounting.LaplaceDpEvent(1 / 0.5), 12)
    assert laplace.epsilon_after(12, 1e-5) == pytest.approx(one.get_epsilon(1e-5), rel=1e-3)
    gaussian = LocalPrivacyConfig("gaussian", epsilon=0.5, delta=1e-5)
    two = PLDAccountant().compose(dp_accounting.GaussianDpEvent(gaussian.noise_multiplier / 2), 12)
    assert gaussian.epsilon_after(12, 1e-5) == pytest.approx(two.get_epsilon(1e-5), rel=1e-3)
    assert laplace.epsilon_after(12, 1e-5) <= 12 * 0.5  # no worse than adding up


@pytest.mark.parametrize("users", [1, 3, 40])
def test_the_noise_of_a_sum_is_distributed_as_the_sum_of_users_noises(users: int) -> None:
    """Where pfl takes a normal distribution: this one has an excess kurtosis of 3 / U."""
    noise = laplace_sum(3, 200_000, users).double().numpy()
    assert noise.var() == pytest.approx(2 * users, rel=0.02)
    assert (noise**4).mean() / noise.var() ** 2 - 3 == pytest.approx(3 / users, abs=0.25)
    summed = np.random.default_rng(1).laplace(size=(users, 50_000)).sum(axis=0)
    assert ks_2samp(noise, summed).pvalue > 1e-3


def test_laplace_noise_is_a_function_of_all_bits_of_its_seed() -> None:
    noise = laplace_sum(5, NOISE_CHUNK + 9, 2)
    assert torch.equal(noise, laplace_sum(5, NOISE_CHUNK + 9, 2, threads=2))
    assert not torch.equal(noise[:9], laplace_sum(5 + 2**64, 9, 2))
    assert not torch.equal(noise[:9], noise[NOISE_CHUNK:])


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    log_scale=st.floats(-30, 30),
    log_bound=st.floats(-6, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_no_update_is_longer_in_l1_than_the_bound_of_laplace(
    seed: int, log_scale: float, log_bound: float, dtype: torch.dtype
) -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    stats = MappedVectorStatistics({"w": (values * 10**log_scale).to(dtype), "b": values[:7].to(dtype)})
    clipped = FlatLaplaceMechanism(10**log_bound, 1.0).clip(stats)
    length = sum(float(t.double().abs().sum()) for t in stats.values())
    assert length <= 10**log_bound
    assert length == 0 or clipped.whole or length > 10**log_bound * (1 - 2**-13)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e25])
def test_an_update_that_is_not_finite_is_zero_and_counted(bad: float) -> None:
    for mechanism in ("gaussian", "laplace"):
        config = LocalPrivacyConfig(mechanism, clipping_bound=1.0, epsilon=1e5, delta=1e-3)
        mean = LocallyPrivateMean(config, 1, noise_seed=1)
        noisy, metrics = release(mean, [torch.tensor([bad, 0.3]), torch.tensor([0.5, 0.0])])
        assert torch.allclose(noisy, torch.tensor([0.25, 0.0]), atol=0.02)
        assert metrics[metric_name("refused updates", local=True)].overall_value == 1


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_a_round_is_the_mean_of_users_each_with_its_noise(mechanism: Any) -> None:
    """Noise on the mean of U users: that of one over the root of U. Within 1 %."""
    config = LocalPrivacyConfig(mechanism, clipping_bound=0.4, epsilon=2.0, delta=1e-4)
    noisy, metrics = release(LocallyPrivateMean(config, 9, noise_seed=2**90), [torch.zeros(200_000)] * 5)
    one = config.noise_multiplier * 0.4 * (math.sqrt(2) if mechanism == "laplace" else 1)
    assert float(noisy.std()) == pytest.approx(one / math.sqrt(5), rel=0.01)
    reported = {str(name): value.overall_value for name, value in metrics}
    assert set(reported) == {f"Local DP | {name}" for name in METRICS[:-1]}
    assert reported["Local DP | noise std. dev. on the mean"] == pytest.approx(one / math.sqrt(5))
    assert reported["Local DP | users"] == 5
    shared = LocallyPrivateMean(config, 9, noise_seed=2**90)
    assert torch.equal(release(shared, [torch.zeros(200_000)] * 5)[0], noisy)


def test_a_local_run_resumes_releases_no_round_twice_and_ends() -> None:
    config = LocalPrivacyConfig("laplace", clipping_bound=1.0)
    straight, updates = LocallyPrivateMean(config, 3, noise_seed=8), [torch.ones(50)] * 2
    means = [release(straight, updates, r)[0] for r in range(3)]
    assert not torch.equal(means[0], means[1])
    resumed = LocallyPrivateMean(config, 3, noise_seed=8)
    resumed.load_state(json.loads(json.dumps({"clipping_bound": 1.0, "rounds_done": 2.0})))
    with pytest.raises(ValueError, match="where round 2 was due"):
        release(resumed, updates, 1)
    assert torch.equal(release(resumed, updates, 2)[0], means[2])
    with pytest.raises(ValueError, match="beyond the 3 rounds"):
        release(resumed, updates, 3)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
@pytest.mark.parametrize("epsilon", [1e3, 1e4, 1e5])
def test_an_epsilon_without_privacy_has_an_account_nonetheless(mechanism: Any, epsilon: float) -> None:
    config = LocalPrivacyConfig(mechanism, epsilon=epsilon, delta=1e-3)
    assert config.epsilon_after(2, 1e-3) >= config.epsilon_after(1, 1e-3) >= epsilon
    assert config.epsilon_after(0, 1e-3) == 0
