"""Options of what a weaker layer of a config chooses, where a stronger one chooses something else; and the
word none in files, and for options."""

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


def test_none_is_read_alike_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    """Pages and errors say none, also to those who write YAML, whose own word is null."""
    path, empty = tmp_path / "mine.yaml", tmp_path / "empty.yaml"
    empty.write_text("")
    path.write_text(
        "data: {partition: none}\naugment: {flip: none}\nlocal: {max_grad_norm: none}\nlocal_privacy: none\n"
        "evaluation: {average: null}\naggregation: {kind: multi_krum, options: {kept: none}}\n"
        "federated: {cohort_size: 10}\n"
    )
    keys = ("data.partition", "augment.flip", "local.max_grad_norm", "aggregation.options.kept")
    words = (f"--config={empty}", "--aggregation.kind=multi_krum", "--federated.cohort_size=10")
    given = CLASSIFICATION.parse([*words, *(f"--{key}=none" for key in keys)]).config
    found = CLASSIFICATION.parse([f"--config={path}"]).config
    assert found == given
    assert (found.data.partition, found.augment.flip, found.local.max_grad_norm) == (None, "none", None)


def test_none_is_an_option_that_can_be_chosen(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("federated: {algorithm: ifca, options: {shared: encoder, distance: 0.5}}\n")
    words = ("--federated.options.shared=none", "--federated.options.distance=none")
    found = options_of(f"--config={path}", *words)
    assert found is not None
    assert (found["shared"], found["distance"]) == ("none", None)
