"""The field against Python's integers of any size, which cannot overflow."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from pfl_ext.algorithms.finite_field import (
    BYTES,
    KEY_BYTES,
    PRIME,
    Elements,
    combine,
    decode,
    digits,
    encode,
    fresh,
    from_digits,
    inverse,
    lagrange,
    most_bits,
    recover,
    share,
    uniform,
)

BINS = 64
elements = st.integers(0, PRIME - 1)
few = settings(max_examples=60, deadline=None, derandomize=True)


def unevenness(found: Elements) -> float:
    """Chi-square of the elements in bins of one width, over its 1e-12 quantile: at most 1 if uniform."""
    counts = np.bincount(found.ravel() * BINS // PRIME, minlength=BINS)
    expected = found.size / BINS
    return float(((counts - expected) ** 2 / expected).sum() / chi2.isf(1e-12, BINS - 1))


@few
@given(st.lists(st.tuples(elements, elements), min_size=1, max_size=9))
def test_products_add_up_as_pythons_integers_do(pairs: list[tuple[int, int]]) -> None:
    a, b = np.array(pairs, np.int64).T
    assert combine(a[None], b[:, None])[0, 0] == sum(x * y for x, y in pairs) % PRIME


def test_the_largest_elements_do_not_overflow() -> None:
    most = np.full((3, 5), PRIME - 1, np.int64)
    assert (combine(most, most[:, :3].repeat(2, 0)[:5]) == 5 * (PRIME - 1) ** 2 % PRIME).all()


@few
@given(st.integers(1, PRIME - 1))
def test_an_inverse_inverts(element: int) -> None:
    assert element * inverse(element) % PRIME == 1


@few
@given(st.lists(elements, min_size=1, max_size=6), st.data())
def test_interpolation_finds_a_polynomial_anywhere(polynomial: list[int], data: st.DataObject) -> None:
    n = len(polynomial)
    points = data.draw(st.lists(elements, min_size=n, max_size=n, unique=True))
    at = [0, 17, PRIME - 2]

    def value(x: int) -> int:
        return int(sum(c * x**k for k, c in enumerate(polynomial)) % PRIME)

    found = combine(lagrange(at, points), np.array([[value(x)] for x in points], np.int64))
    assert found[:, 0].tolist() == [value(x) for x in at]


@few
@given(
    st.lists(st.floats(-4, 4), min_size=1, max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(0, 20),
)
def test_a_decoded_sum_is_within_its_bound(values: list[float], weights: list[int], bits: int) -> None:
    clip = 3.0
    total = np.zeros(len(values), np.int64)
    for turn, weight in enumerate(weights):
        total = (total + encode(np.roll(values, turn), weight, bits, clip)) % PRIME
    exact = sum(w * np.clip(np.roll(values, turn), -clip, clip) for turn, w in enumerate(weights))
    assert np.abs(decode(total, bits) - exact).max() <= len(weights) / 2 * 2.0**-bits * (1 + 1e-9)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("weights", [[1, 1, 1], [1000, 20000, 3]])
def test_the_most_bits_do_not_wrap_around_and_one_more_does(weights: list[int], sign: int) -> None:
    clip = 2.75
    bits = most_bits(sum(weights), len(weights), clip)

    def found(bits: int) -> float:
        parts = [encode(np.array([sign * clip * 1.5]), w, bits, clip) for w in weights]
        return float(decode(np.sum(parts, 0) % PRIME, bits)[0])

    assert found(bits) == sign * clip * sum(weights)
    assert found(bits + 1) != sign * clip * sum(weights)


def test_what_has_no_place_is_said() -> None:
    assert most_bits(2**30, 1, 1e-9) == -1
    assert most_bits(1, 1, 2.0**31) == -1
    assert most_bits(1, 1, 1e-12) == 30
    with pytest.raises(ValueError, match=r"numbers that are not finite, so it cannot be summed securely"):
        encode(np.array([1.0, np.nan]), 1, 3, 1.0)


def test_a_keystream_is_a_function_of_its_key_and_uniform() -> None:
    key = bytes(range(KEY_BYTES))
    long = uniform(key, 50_000)
    assert (uniform(key, 100) == long[:100]).all()
    assert long.min() >= 0
    assert long.max() < PRIME < 2 ** (8 * BYTES)
    assert unevenness(long) < 1
    assert unevenness(np.sort(long)[:40_000]) > 1
    assert (uniform(bytes(KEY_BYTES), 100) != long[:100]).any()
    assert (fresh(100) != fresh(100)).any()


def test_q_itself_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """One pattern of 31 bits is no element; here the stream begins with more of these than are spare."""
    words = np.array([PRIME] * 20 + [5, PRIME, 2**31 + 7, 9] + list(range(100)), "<u4").tobytes()

    class Stream:
        def __init__(self, *_: object, **__: object) -> None: ...

        def encryptor(self) -> Stream:
            return self

        def update(self, zeros: bytes) -> bytes:
            return words[: len(zeros)]

    monkeypatch.setattr("pfl_ext.algorithms.finite_field.Cipher", Stream)
    assert uniform(bytes(KEY_BYTES), 4).tolist() == [5, 7, 9, 0]


def test_any_degree_and_one_shares_give_the_secret_and_fewer_tell_nothing() -> None:
    key = bytes(range(100, 100 + KEY_BYTES))
    points = [1, 2, 3, 5, 8]
    shares = share(digits(key), 2, points)
    for chosen in combinations(range(5), 3):
        assert from_digits(recover(shares[list(chosen)], [points[c] for c in chosen])) == key
    assert from_digits(recover(shares[:2], points[:2])) != key
    for secret in (np.zeros(20_000, np.int64), np.full(20_000, PRIME - 1)):
        seen = share(secret, 2, points)[[1, 4]]
        assert unevenness(seen) < 1
        assert unevenness((seen[0] - 3 * seen[1]) % PRIME) < 1, "nor do two together"
    assert from_digits(np.full(9, PRIME - 1)) is None
