"""Partitions that each seed of an experiment draws for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.compare.reading import compare
from dataset.partitions.drawn import name_for
from tests.benchmarks.conftest import Train
from tests.benchmarks.run_files import error_line, results

ONE = ("--federated.num_rounds=1",)


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("lda-0.5-clients-4-seed-run", "lda-0.5-clients-4-seed-3"),
        ("lda-0.5-clients-4-seed-0", "lda-0.5-clients-4-seed-0"),
        ("user", "user"),
    ],
)
def test_the_name_for_a_seed(name: str, drawn: str) -> None:
    assert name_for(name, 3) == drawn


def test_seeds_with_clients_of_their_own_are_one_experiment(vision: Train, tmp_path: Path) -> None:
    """And each trains the clients that its seed draws."""
    for seed in (3, 4):
        own = vision(*ONE, "--data.partition=iid-clients-4-seed-run", f"--seed={seed}", name=f"own/{seed}")
        named = vision(
            *ONE, f"--data.partition=iid-clients-4-seed-{seed}", f"--seed={seed}", name=f"named{seed}"
        )
        assert results(own)["model_probe"] == results(named)["model_probe"]
    (group,) = compare([tmp_path / "own"]).groups
    assert [run.seed for run in group.runs] == [3, 4]


def test_flairs_users_are_dealt_by_the_runs_seed_too(train: Train) -> None:
    words = (*ONE, "--seed=5")
    own, named = (train(*words, f"--data.partition=iid-clients-4-seed-{s}", name=s) for s in ("run", "5"))
    assert results(own)["model_probe"] == results(named)["model_probe"]


def test_a_private_run_names_the_partition_that_was_drawn(
    vision: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    private = ("--local_privacy.epsilon=4", "--federated.weighting=users", "--seed=6")
    vision(*ONE, *private, "--data.partition=iid-clients-4-seed-run")
    assert "iid-clients-4-seed-6" in capsys.readouterr().out


def test_another_word_in_its_place_is_refused(vision: Train, capsys: pytest.CaptureFixture[str]) -> None:
    vision(*ONE, "--data.partition=iid-clients-4-seed-runs", code=2)
    assert "iid-clients-4-seed-runs" in error_line(capsys)
