"""Processes that are forked with torch imported are what a fresh interpreter would be."""

from __future__ import annotations

import importlib
import os

import pytest

from tests import warm
from tests.launching import fresh_environment, run, warmly

pytestmark = [pytest.mark.xdist_group("workers"), pytest.mark.slow]
"""Slow, as they alone among the quick tests would need the server's seconds of imports."""


def printed(expression: str, **more: str) -> str:
    """What a process of `warmly` prints of an expression, with these variables."""
    words = warmly("timeit", "-n1", "-r1", f"import os, sys; print({expression})")
    return run(words, 0, **more).splitlines()[0]


@pytest.mark.parametrize(
    "variable",
    [
        "PYTHONHASHSEED",
        "OMP_NUM_THREADS",
        "ATEN_CPU_CAPABILITY",
        "MKL_ENABLE_INSTRUCTIONS",
        "ONEDNN_MAX_CPU_ISA",
        "CUDA_VISIBLE_DEVICES",
    ],
)
def test_a_variable_that_is_read_at_the_start_starts_a_fresh_interpreter(variable: str) -> None:
    both = f"'torch' in sys.modules, os.environ.get('{variable}')"
    assert printed(both).startswith("True ")
    other = "1" if fresh_environment().get(variable) != "1" else "2"  # than the server's
    assert printed(both, **{variable: other}) == f"False {other}"


def test_what_the_packages_set_at_their_import_starts_no_fresh_interpreter() -> None:
    before = fresh_environment()
    importlib.import_module("benchmarks")
    assert warm.read_at_start(fresh_environment()) == warm.read_at_start(before)
    assert {"GOMP_SPINCOUNT", "OPENBLAS_NUM_THREADS"} <= os.environ.keys()


def test_fresh_interpreters_differ_in_how_they_hash_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # as tox sets it
    assert "PYTHONHASHSEED" not in fresh_environment()
    hashes = {seed: printed("hash('word')", PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert hashes["1"] != hashes["2"]
