"""Options of what a weaker layer of a config chooses, where a stronger one chooses something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.core.config.digests import config_tree
from benchmarks.fedcv.classification.config import CLASSIFICATION

HELD_OUT, RATE = "--federated.options.held_out", "--federated.options.personal_learning_rate"


def options_of(*argv: str) -> dict[str, Any] | None:
    found = CLASSIFICATION.parse(argv).config.federated.options
    return None if found is None else dict(found)


@pytest.fixture
def of_a_run(tmp_path: Path) -> str:
    """The config of a run of FedRep, which has all values."""
    run = CLASSIFICATION.parse(["--config=fedrep", f"{HELD_OUT}=0.4", f"{RATE}=0.2"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config_tree(run.config)))
    return f"--config={tmp_path / 'config.yaml'}"


def test_options_that_the_new_choice_lacks_are_left_out(of_a_run: str) -> None:
    assert options_of("--config=dsgd", "--federated.algorithm=fedavg") is None
    assert options_of(of_a_run, "--federated.algorithm=fedavg") is None
    assert options_of("--config=dsgd", "--federated.algorithm=pushsum") is not None


def test_options_that_both_have_stay(of_a_run: str) -> None:
    found = options_of(of_a_run, "--federated.algorithm=ditto", f"{RATE}=0.3")
    assert found is not None
    assert (found["held_out"], found["personal_learning_rate"]) == (0.4, 0.3)
    same = options_of(of_a_run, "--federated.algorithm=fedrep")
    assert same is not None
    assert (same["held_out"], same["personal_learning_rate"]) == (0.4, 0.2)


@pytest.mark.parametrize("base", ["--config=fedrep", None])
def test_options_that_were_typed_must_be_those_of_the_choice(base: str | None, of_a_run: str) -> None:
    with pytest.raises(ValueError, match=r"federated\.options\.held_out is not an option of fedavg"):
        options_of(base or of_a_run, "--federated.algorithm=fedavg", f"{HELD_OUT}=0.1")


def test_a_files_own_options_must_be_those_of_its_choice(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("federated: {algorithm: fedavg, options: {held_out: 0.1}}")
    with pytest.raises(ValueError, match=r"federated\.options\.held_out is not an option of fedavg"):
        options_of(f"--config={tmp_path / 'own.yaml'}")
