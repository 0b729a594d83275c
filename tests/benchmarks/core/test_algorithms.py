"""What holds for every algorithm that is registered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import benchmarks
import pfl_ext
from benchmarks.core.config.privacy_matrix import TABLE
from benchmarks.core.config.sections import FederatedConfig, ServerSection
from pfl_ext.algorithms.algorithm import ALGORITHMS, Choice, register
from pfl_ext.algorithms.fedavg import FedAvg
from pfl_ext.algorithms.feddyn import FedDyn
from pfl_ext.algorithms.fednova import FedNova
from pfl_ext.algorithms.on_pfl import OnPfl
from pfl_ext.algorithms.scaffold import Scaffold
from tests.pfl_ext.test_backend import Linear

ASKS = re.compile(
    r"isinstance\([^)]*\b(Fed[A-Z]|Scaffold)|type\(\w*algorithm\) (in|is|==)|\.algorithm (==|!=|in) "
    r"|== \"fedir\""
)
"""Code that asks which algorithm it is."""


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_an_algorithm_refuses_privacy_exactly_where_the_table_does(name: str) -> None:
    allowed = TABLE["federated.algorithm"].allows("privacy", name)
    assert allowed != ("privacy" in ALGORITHMS[name].refusals)


def test_five_of_the_houses_algorithms_are_argued_for_privacy() -> None:
    """Another one needs an argument in its file, and a line here."""
    for section in ("privacy", "local_privacy"):
        allowed = TABLE["federated.algorithm"].allowed(section) or ()
        ours = [name for name in allowed if ALGORITHMS[name].__module__.startswith("pfl_ext.")]
        assert ours == ["fed3r", "fedavg", "fedncm", "fedprox", "fedsam"]


def test_no_code_outside_the_folder_asks_which_algorithm_it_is() -> None:
    root = Path(pfl_ext.__file__).parent
    files = [root / "backend.py", *(root / "engine").glob("*.py")]
    files += (Path(benchmarks.__file__).parent / "core").rglob("*.py")
    assert len(files) > 30
    assert [(str(path), found[0]) for path in files for found in ASKS.finditer(path.read_text())] == []


def test_an_algorithm_on_pfls_loop_cannot_hide_from_the_engine_what_its_users_do() -> None:
    with pytest.raises(AssertionError, match="override rule"):
        type("Other", (OnPfl,), {"train_one_user": lambda *_: None})


def test_two_algorithms_have_two_names() -> None:
    with pytest.raises(ValueError, match=r"^there are two federated\.algorithm named fedavg: rename one$"):
        register("fedavg")(type("Other", (Choice,), {}))
    with pytest.raises(
        ValueError, match=r"federated\.algorithm is 'fedavgg': choose one of ditto, dsgd, fed3r, "
    ):
        ALGORITHMS["fedavgg"]


def test_an_option_knows_who_reads_it() -> None:
    readers = {**FederatedConfig().readers(), **ServerSection().readers()}
    assert readers["federated.mu"] == ["fednova", "fedprox"]
    assert readers["federated.scaffold_option"] == ["scaffold"]
    assert readers["server.momentum"] == ["sgd"]
    assert readers["server.adam_form"] == ["adam"]
    assert readers["server.beta1"] == ["adagrad", "adam", "yogi"]


def test_what_a_round_sends() -> None:
    module: Any = Linear()
    size = sum(4 * p.numel() for p in module.parameters())
    assert FedAvg.traffic(module) == (size, size)
    assert FedNova.traffic(module) == (size, size + 4), "the number of steps besides"
    assert Scaffold.traffic(module) == (2 * size, 2 * size), "also send control variates"
    assert FedDyn.traffic(module) == (size, size), "the server computes h from the updates"
