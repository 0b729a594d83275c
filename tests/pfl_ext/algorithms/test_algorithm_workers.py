"""FedNova, FedVC, FedIR and closed forms with two real workers give what one gives."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from pfl_ext.algorithms.fednova import STEPS
from tests.launching import command, run
from tests.pfl_ext.algorithms.algorithm_worker import cases, heads
from tests.pfl_ext.algorithms.test_closed_form import NEAR
from tests.pfl_ext.engine.setting import distance, rounding_of

pytestmark = pytest.mark.xdist_group("algorithm workers")
"""One process runs them all: they look at one launch."""


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each of two workers handed to its server."""
    directory = tmp_path_factory.mktemp("workers")
    run(command("torchrun", 2, "tests.pfl_ext.algorithms.algorithm_worker", str(directory)))
    return directory


@functools.cache
def rounding(name: str) -> float:
    return rounding_of(cases()[name])


@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("name", list(cases()))
def test_two_workers_give_the_server_what_one_does(outputs: Path, name: str, engine: bool) -> None:
    expected, weight, _ = cases()[name].run(engine)
    assert (STEPS in expected) == name.startswith("fednova")
    for rank in range(2):
        update = torch.load(outputs / f"{name}-{engine}-{rank}.pt", weights_only=True)
        assert float(update.pop("weight")) == weight
        assert distance(update, expected) <= rounding(name)


def test_two_workers_compute_the_head_that_one_does(outputs: Path) -> None:
    expected = heads()
    for rank in range(2):
        found = torch.load(outputs / f"heads-{rank}.pt", weights_only=True)
        assert found.keys() == expected.keys()
        for name, ours in found.items():
            assert float((ours - expected[name]).norm()) <= NEAR * float(expected[name].norm())
