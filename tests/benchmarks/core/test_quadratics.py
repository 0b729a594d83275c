"""Every algorithm that can be chosen against its paper's equations in float64, after each of six rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.core.config.trees import merge
from tests.benchmarks.core.quadratics import (
    ALGORITHMS,
    PARTICIPATION,
    TOLERANCE,
    Direct,
    distances,
    run_of,
    scaffold,
    trajectory,
)

FULLY = ("fedavg, images", "fednova", "scaffold I", "scaffold II, images")
"""One of each kind of mean; that a part of the users takes part is the general case."""


@pytest.mark.parametrize(
    ("name", "participation"), [*((n, "partial") for n in ALGORITHMS), *((n, "full") for n in FULLY)]
)
def test_an_algorithm_is_its_papers_equations_in_both_engines(
    name: str, participation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = merge(ALGORITHMS[name], PARTICIPATION[participation])
    expected = Direct(run_of(tree)).trajectory()
    assert np.isfinite(expected).all()
    for engine in ("stock", "fast"):
        ours = trajectory(run_of(tree, engine), tmp_path / engine)
        assert distances(ours, expected).max() < TOLERANCE, engine
    assert "pfl's own loop" not in capsys.readouterr().err, "the engine took the work on"


@pytest.mark.parametrize("defect", ["sign", "selected"])
@pytest.mark.parametrize("option", ["I", "II"])
def test_the_comparison_would_notice_a_wrong_scaffold(option: str, defect: str) -> None:
    run = run_of(merge(scaffold(option), PARTICIPATION["partial"]))
    assert distances(Direct(run, defect).trajectory(), Direct(run).trajectory()).max() > 100 * TOLERANCE
