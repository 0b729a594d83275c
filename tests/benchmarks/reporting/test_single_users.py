"""Scores of single users: how they are summed up, when they are in a run's results, and in tables."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from benchmarks.core.config.trees import read_yaml
from benchmarks.fedcv import report
from benchmarks.fedcv.classification.train import main
from benchmarks.reporting import single_users
from dataset.cli import run
from dataset.flair.mini import write_mini
from pfl_ext.algorithms.per_user import spread, spreads_by_group
from tests import launching
from tests.benchmarks.conftest import TINY
from tests.benchmarks.run_files import results
from tests.benchmarks.sparing import run_into

SMALL = ("--config=fedavg", "--scale=mini", "--model.arch=lenet", "--data.image_size=20")
ROUND = ("--model.input_size=20", "--federated.num_rounds=1", "--federated.cohort_size=3")


@pytest.mark.parametrize("images", [2, 5, 20])
def test_chance_alone_has_no_variance(images: int) -> None:
    """Users who are all right with probability 0.8, and users between whom 0.8 varies, drawn 400 times."""
    rng, users = np.random.default_rng(0), 200
    sizes = np.full(users, images)
    alike, apart, noisy = [], [], []
    for _ in range(400):
        found = spread(100 * rng.binomial(images, 0.8, users) / images, sizes, True)
        alike.append(found["variance without noise"])
        noisy.append(found["std"] ** 2)
        rates = rng.permutation(np.repeat([0.7, 0.9], users // 2))
        found = spread(100 * rng.binomial(images, rates) / images, sizes, True)
        apart.append(found["variance without noise"])
    for values, truth in ((alike, 0.0), (apart, 100.0)):
        error = 5 * float(np.std(values)) / 20
        assert float(np.mean(values)) == pytest.approx(truth, abs=error)
        assert error < 40
    assert np.mean(noisy) == pytest.approx(1600 / images, rel=0.1), "what is taken off"


def test_the_spread_of_few() -> None:
    values, sizes = np.array([50.0, 100.0, 0.0, np.nan]), np.array([2, 4, 1, 1])
    found = spread(values, sizes, True)
    assert found["n"] == 3
    assert found["least images"] == 1
    assert found["variance without noise"] == 625 - 0.5 * 2500 / 2, "of the two users with several images"
    assert "variance without noise" not in spread(values[2:], sizes[2:], True)
    assert "variance without noise" not in spread(values, sizes)


def test_users_are_told_apart_by_whether_they_trained() -> None:
    sizes, columns = np.array([3, 5, 7]), {"accuracy": np.array([10.0, 20.0, 40.0])}
    found = spreads_by_group(["a", "b", "c"], {"a", "c", "z"}, sizes, columns)
    assert {
        group: (part["users"], part["images"], part["least images"]) for group, part in found.items()
    } == {
        "seen": (2, 10, 3),
        "new": (1, 5, 5),
    }
    assert found["seen"]["server"]["users"]["accuracy"]["mean"] == 25
    assert found["new"]["server"]["users"]["accuracy"]["lowest decile"] == 20
    assert list(spreads_by_group(["a"], {"a"}, sizes[:1], {})) == ["seen"]


def trained(folder: Path, name: str, *words: str) -> dict[str, Any]:
    data = folder / "classes.hdf5"
    if not data.exists():
        write_mini(data, replace(TINY, coarse_labels=1))
    return results(run_into(main, folder / name, *SMALL, *ROUND, f"--data_path={data}", *words))


def test_a_run_scores_its_users_and_a_report_shows_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scored: list[tuple[list[float], list[int]]] = []

    def watched(values: Any, sizes: Any, shares: bool) -> dict[str, float]:
        if shares:
            scored.append((values.tolist(), sizes.tolist()))
        return spread(values, sizes, shares)

    with mock.patch("pfl_ext.algorithms.own_images.spread", watched):
        results = trained(tmp_path, "plain", "--data.scored=test")
    ((values, sizes),) = scored
    new = results["clients"]["new"]
    assert list(results["clients"]) == ["new"]
    assert (new["split"], new["users"], new["images"]) == ("test", len(values), sum(sizes))
    assert np.dot(values, sizes) / sum(sizes) == pytest.approx(results["test"]["accuracy"])
    assert new["server"]["pooled"]["accuracy"] == pytest.approx(results["test"]["accuracy"], abs=1e-4)
    of_users = new["server"]["users"]["accuracy"]
    assert of_users["lowest decile"] == pytest.approx(
        np.sort(values)[: -(-len(values) // 10)].mean(), abs=1e-4
    )
    rows = list(csv.DictReader((tmp_path / "plain" / "clients.csv").read_text().splitlines()))
    heads = ["group", "split", "user", "images", "training_images", "model", "loss", "accuracy"]
    assert list(rows[0])[:8] == heads
    assert {row["training_images"] for row in rows} == {"0"}
    assert {(row["group"], row["split"], row["model"]) for row in rows} == {("new", "test", "server")}
    assert [float(row["accuracy"]) for row in rows] == pytest.approx(values, abs=1e-4)
    assert [int(row["images"]) for row in rows] == sizes
    again = trained(tmp_path, "val", "--data.scored=val", "--evaluation.best_by=last")
    assert again["clients"]["new"] == new, "the model is the same"
    assert run(report.main, [str(tmp_path), f"--output_dir={tmp_path / 'report'}"]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if f"| {len(values)} new, of test |" in line)
    cells = [f"{of_users[key]:.1f}" for key in ("mean", "lowest decile", "highest decile", "std")]
    assert line == (
        f"| fedavg | {len(values)} new, of test | {min(sizes)} | {' | '.join(cells)} | "
        f"{of_users['variance without noise']:.1f} |"
    )
    text = (tmp_path / "report" / "users.csv").read_text().splitlines()
    assert text[0] == ",".join(single_users.HEADS)
    assert text[1].startswith(f'fedavg,"{len(values)} new, of test",{min(sizes)},{cells[0]},')


def test_two_workers_score_users_as_one_does(tmp_path: Path) -> None:
    alone = trained(tmp_path, "1")["clients"]
    words = [*SMALL, *ROUND, f"--data_path={tmp_path / 'classes.hdf5'}", f"--run_dir={tmp_path / '2'}"]
    launching.run(launching.command("torchrun", 2, "benchmarks.fedcv.classification.train", *words))
    together = results(tmp_path / "2")["clients"]
    assert list(together) == list(alone) == ["new"]
    for key in ("split", "users", "images", "least images"):
        assert together["new"][key] == alone["new"][key]
    for column, values in alone["new"]["server"]["users"].items():
        assert together["new"]["server"]["users"][column] == pytest.approx(values, abs=1e-2)


def test_a_private_run_scores_no_training_user(tmp_path: Path) -> None:
    privacy = ("--local_privacy.epsilon=4", "--federated.weighting=users", "--seed=1")
    assert "clients" not in trained(tmp_path, "private", *privacy)
    assert not (tmp_path / "private" / "clients.csv").exists()
    assert read_yaml(tmp_path / "private" / "config.yaml")["local_privacy"]
