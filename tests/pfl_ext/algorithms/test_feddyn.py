"""FedDyn: its invariants, and the engine beside pfl's loop. Its equations are in test_quadratics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pfl_ext.algorithms.test_fednova import Passes
from tests.pfl_ext.engine.setting import Setting, distance, private, rounding_of
from tests.pfl_ext.samplings import local_sampling

SAMPLING = local_sampling(2, 4, 9, straddle=True, input_size=10)


@settings(max_examples=3)
@given(
    sizes=st.lists(st.integers(1, 14), min_size=2, max_size=4),
    alpha=st.sampled_from([0.01, 0.5]),
    clipping=st.sampled_from([("none", 0.0), ("variable", 0.05), ("global", 0.2)]),
    by_images=st.booleans(),
    lanes=st.integers(1, 3),
    local=st.sampled_from([(0.0, 0.0, 1.0), (0.6, 0.05, 1.0), (0.3, 0.0, 4.0)]),
)
def test_the_engine_trains_as_pfls_loop_and_h_is_the_mean_of_all_h_i(
    sizes: list[int],
    alpha: float,
    clipping: tuple[str, float],
    by_images: bool,
    lanes: int,
    local: tuple[float, float, float],
) -> None:
    """Over four rounds of all users but one; a network with layers of every kind and dead taps."""

    def setting() -> Setting:
        chosen = Setting(sizes, SAMPLING, *clipping, learning_rate=0.05, by_images=by_images, rounds=4)
        chosen.dynamic, chosen.cohort = alpha, len(sizes) - 1
        chosen.momentum, chosen.weight_decay, chosen.head_rate = local
        return chosen

    found = {}
    for engine in (False, True):
        chosen = setting()
        found[engine] = chosen.run(engine, **({"lanes": lanes} if engine else {}))[0]
        assert chosen.controls is not None
        each = torch.stack([chosen.controls.control(user) for user in range(len(sizes))]).double()
        p = torch.tensor([float(min(n, 9)) if by_images else 1.0 for n in sizes]).double()
        mean = (p[:, None] * each).sum(0) / p.sum()
        # Each round adds the mean of the users' changes, each at most two h_i long: a product and a sum each.
        roundings, largest = chosen.rounds * 2 * 2 * len(sizes), each.norm(dim=1).max()
        assert (chosen.controls.server.double() - mean).norm() < roundings * 2**-24 * largest
        assert int((each.norm(dim=1) > 0).sum()) >= len(sizes) - 1
    assert distance(found[True], found[False]) <= rounding_of(setting())


@pytest.mark.parametrize("engine", [False, True])
def test_users_without_images_keep_what_they_have(engine: bool) -> None:
    setting = Setting([3, 0, 5], SAMPLING, clipping="none", by_images=False, rounds=2, dynamic=0.3)
    setting.run(engine)
    assert setting.controls is not None
    assert not setting.controls.control(1).any()
    assert setting.controls.control(2).any()


@pytest.mark.parametrize("engine", [False, True])
def test_what_would_part_h_i_from_the_update_is_refused(engine: bool) -> None:
    for more in (private(2), Passes()):
        setting = Setting([2, 3], SAMPLING, by_images=False, more=[more], dynamic=0.3)
        with pytest.raises(ValueError, match="not protected by privacy and not changed by postprocessors"):
            setting.run(engine)
    twice = Setting([2, 3], SAMPLING, sampler="replacement", cohort=9, dynamic=0.3)
    with pytest.raises(ValueError, match="must not be drawn twice"):
        twice.run(engine)
