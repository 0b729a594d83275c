"""The suite itself: tests that share what they prepare run in one worker, which prepares it once."""

from __future__ import annotations

import pytest


@pytest.mark.xdist_group("together")
def test_xdist_knows_the_groups_of_tests(request: pytest.FixtureRequest) -> None:
    """It puts a group's name behind the name of its tests; with pytest 9.2, pytest-xdist 3.8 does not."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("no worker of pytest -n, or not with --dist loadgroup")
    assert request.node.nodeid.endswith("@together")
