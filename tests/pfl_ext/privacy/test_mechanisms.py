from __future__ import annotations

import math
from typing import Any

import pfl.model.pytorch  # noqa: F401  (makes torch the framework of pfl)
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.stats import MappedVectorStatistics
from torch import Tensor

from pfl_ext.privacy.mechanisms import (
    MARGIN,
    NOISE_CHUNK,
    FlatGaussianMechanism,
    clip,
    gaussian_noise,
    layers_of,
)

NAMES = ["conv.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"]


def exact_norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def update(seed: int, scale: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = [(40, 3, 3, 3), (40,), (40,), (5, 40), (5,)]
    return [(torch.randn(s, generator=g, dtype=torch.float64) * scale).to(dtype) for s in shapes]


@settings(max_examples=150)
@given(
    seed=st.integers(0, 10**6),
    log_scale=st.floats(-30, 37),
    log_bound=st.floats(-6, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    clipping=st.sampled_from(["flat", "per_layer"]),
)
def test_no_clipped_update_is_longer_than_the_bound(
    seed: int, log_scale: float, log_bound: float, dtype: torch.dtype, clipping: Any
) -> None:
    """Measured in float64, with no tolerance."""
    bound, tensors = 10**log_bound, update(seed, 10**log_scale, dtype)
    clipped = clip(tensors, layers_of(NAMES, clipping), bound)
    assert [t.shape for t in clipped.tensors] == [t.shape for t in tensors]
    assert all(t.dtype == torch.float32 for t in clipped.tensors)
    assert exact_norm(clipped.tensors) <= bound
    if clipped.whole and clipped.finite:
        assert all(torch.equal(a, b.float()) for a, b in zip(clipped.tensors, tensors))
    if clipping == "flat" and clipped.finite and exact_norm(tensors) > bound:
        assert exact_norm(clipped.tensors) > bound * (1 - 2 * MARGIN)
        inner = sum(float((a.double() * b.double()).sum()) for a, b in zip(clipped.tensors, tensors))
        assert inner == pytest.approx(exact_norm(clipped.tensors) * exact_norm(tensors), rel=1e-5)


def test_each_layer_keeps_its_own_bound() -> None:
    tensors = update(1, 1.0)
    tensors[0] *= 1e-4
    layers = layers_of(NAMES, "per_layer")
    assert layers == [1, 2, 2]
    clipped = clip(tensors, layers, 0.3)
    limit = 0.3 / math.sqrt(3)
    assert torch.equal(clipped.tensors[0], tensors[0])
    for layer in (clipped.tensors[1:3], clipped.tensors[3:]):
        assert limit * (1 - 2 * MARGIN) < exact_norm(layer) <= limit


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e20])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_one_value_that_is_not_finite_makes_the_whole_update_zero(bad: float, clipping: Any) -> None:
    tensors = update(2, 0.1)
    tensors[3][2, 7] = bad
    clipped = clip(tensors, layers_of(NAMES, clipping), 1.0)
    assert not clipped.finite
    assert all(not t.any() for t in clipped.tensors)


def test_pfl_lets_nan_pass() -> None:
    """Why clipping is not left to pfl: if this fails, pfl has fixed it."""
    stats = MappedVectorStatistics({"w": torch.tensor([math.nan, 1.0])})
    out, _ = GaussianMechanism(0.1, 1.0).constrain_sensitivity(stats)
    assert torch.isnan(out["w"]).any()


def test_a_zero_update_stays_zero_and_unclipped() -> None:
    clipped = clip([torch.zeros(3000), torch.zeros(0)], [2], 0.1)
    assert clipped.finite
    assert clipped.whole
    assert float(clipped.norm) == 0
    assert [t.shape for t in clipped.tensors] == [(3000,), (0,)]


def test_the_inputs_are_left_alone() -> None:
    tensors = update(3, 10.0)
    before = [t.clone() for t in tensors]
    clip(tensors, [5], 0.1)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before))


def test_noise_is_standard_normal() -> None:
    noise = gaussian_noise(1, 2**21 + 5).double()
    n = noise.numel()
    assert float(noise.mean()) == pytest.approx(0, abs=5 / math.sqrt(n))
    assert float(noise.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / n))
    assert float((noise**4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96 / n))
    assert float((noise.abs() > 3).double().mean()) == pytest.approx(2.7e-3, rel=0.1)


def test_noise_is_a_function_of_all_bits_of_its_seed_and_of_nothing_else() -> None:
    size = 2 * NOISE_CHUNK + 7
    noise = gaussian_noise(5, size)
    torch.manual_seed(0)
    assert torch.equal(noise, gaussian_noise(5, size, threads=3))
    assert torch.equal(noise[:NOISE_CHUNK], gaussian_noise(5, NOISE_CHUNK))
    chunks = [noise[:1000], noise[NOISE_CHUNK : NOISE_CHUNK + 1000], gaussian_noise(5 + 2**32, 1000)]
    chunks += [gaussian_noise(0, 1000), gaussian_noise(5 + 2**100, 1000)]
    for i, a in enumerate(chunks):
        for b in chunks[:i]:
            assert abs(float(a @ b)) < 5 * math.sqrt(1000)


def test_noise_does_not_depend_on_how_parameters_are_cut_into_tensors() -> None:
    mechanism = FlatGaussianMechanism(0.5, 2.0)
    one, _ = mechanism.add_noise(MappedVectorStatistics({"w": torch.ones(12)}), 1, seed=0)
    pieces = {"a": torch.ones(2, 3), "b": torch.ones(6)}
    two, _ = mechanism.add_noise(MappedVectorStatistics(pieces), 1, seed=0)
    assert torch.equal(one["w"], torch.cat([two["a"].view(-1), two["b"]]))
    assert two["a"].shape == (2, 3)


def test_an_l1_norm_is_summed_in_float64() -> None:
    """A float32 sum over a row of a thousand numbers may be off by more than the room that is left."""
    vector = torch.rand(5000, generator=torch.Generator().manual_seed(0))
    exact = float(vector.double().abs().sum())
    assert float(clip([vector], [1], 1.0, order=1).norm) == pytest.approx(exact, rel=1e-12)
