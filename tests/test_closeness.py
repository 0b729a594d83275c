"""The helper by which the tests compare vectors fails where it must."""

from __future__ import annotations

import pytest
import torch

from tests.closeness import assert_close_as_vector

UNIT = 2.0**-24


def test_the_distance_is_measured_against_the_whole_vector_in_its_own_unit() -> None:
    expected = torch.tensor([1.0, 1e-9])
    assert_close_as_vector(torch.tensor([1.0, 2e-8]), expected, 1)  # twenty times its element, below one unit
    assert_close_as_vector(torch.tensor([1 + 4 * UNIT, 0.0]), expected, 4.1)
    with pytest.raises(AssertionError, match="apart by 4 units of rounding, where 3 are allowed"):
        assert_close_as_vector(torch.tensor([1 + 4 * UNIT, 0.0]), expected, 3)
    with pytest.raises(AssertionError, match="units of rounding"):
        assert_close_as_vector(torch.tensor([1 + 4 * UNIT]).double(), torch.ones(1).double(), 1000)


def test_several_tensors_are_one_vector_and_a_wider_format_may_stand_on_one_side() -> None:
    expected = {"large": torch.full((3,), 100.0).double(), "small": torch.ones(1).double()}
    moved = {"large": torch.full((3,), 100.0), "small": torch.ones(1) + 1e-5}
    assert_close_as_vector(moved, expected, 2)
    with pytest.raises(AssertionError, match="units of rounding"):
        assert_close_as_vector({"small": moved["small"]}, {"small": expected["small"]}, 100)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_close(bad: float) -> None:
    for actual, expected in ((bad, 1.0), (1.0, bad), (bad, bad)):
        with pytest.raises(AssertionError, match="units of rounding"):
            assert_close_as_vector(torch.tensor([actual]), torch.tensor([expected]), 10)


def test_other_names_or_shapes_are_refused() -> None:
    with pytest.raises(AssertionError, match="instead of"):
        assert_close_as_vector(torch.ones(2), torch.ones(2, 1), 10)
    with pytest.raises(AssertionError, match="instead of"):
        assert_close_as_vector({"a": torch.ones(1)}, {"b": torch.ones(1)}, 10)
