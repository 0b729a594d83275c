"""How unequal users are: by hand on few images, on the real splits, and in the figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataset.cifar10.download_preprocess import CIFAR10
from dataset.cifar10.source import csv_partitions
from dataset.cli import run
from dataset.flair.download_preprocess import main as preprocess
from dataset.partitions import figures
from dataset.partitions.__main__ import main
from dataset.partitions.statistics import MEANING, Dealt, _mixes, distances, mean_emd, measure
from dataset.store.hdf5 import DataFile
from tests.dataset.drawn import records, write_parquet
from tests.dataset.store.test_hdf5 import dataset_index, partitioned, split_index, write

REAL = Path("/work/shared/data/cifar10")
GOLDEN = {  # Google's splits: mean EMD, mean classes of a client
    "alpha-0.00": (1.800, 1), "alpha-0.05": (1.752, 1.32), "alpha-0.10": (1.743, 1.54),
    "alpha-0.20": (1.688, 2.19), "alpha-0.50": (1.562, 3.57), "alpha-1.00": (1.439, 4.78),
    "alpha-10.00": (0.763, 9.28), "alpha-100.00": (0.255, 9.9),
}  # fmt: skip


def test_distances_are_the_l1_norm_to_the_population() -> None:
    rng = np.random.default_rng(0)
    classes, owner = rng.integers(0, 6, 300), rng.integers(0, 9, 300)
    classes[owner == 3] = 5
    found, held = distances(classes, owner, 9)
    table = np.zeros((9, 6))
    np.add.at(table, (owner, classes), 1)
    q, p = table / table.sum(1, keepdims=True), table.sum(0) / 300
    np.testing.assert_allclose(found, np.abs(q - p).sum(1))
    assert held.tolist() == (table > 0).sum(1).tolist()
    sizes = np.bincount(owner)
    assert mean_emd(found, sizes) == pytest.approx(float((sizes / 300 * np.abs(q - p).sum(1)).sum()))


def test_statistics_by_hand(tmp_path: Path) -> None:
    """Rows 0..6 have classes 0 1 0 1 0 1 0; user a has rows 0-1, b row 2, c rows 3-6."""
    with DataFile(write(tmp_path / "f.hdf5", "raw", splits=partitioned())) as file:
        found = {(one.split, one.name): one for one, _ in measure(file)}
    assert list(found) == [("train", "crossed"), ("train", "geo-100"), ("train", "users"), ("val", "users")]
    users = found["train", "users"]
    assert (users.clients, users.images, users.classes, users.images_left_out) == (3, 7, 2, 0)
    assert (users.images_per_client.min, users.images_per_client.median) == (1, 2)
    assert users.images_per_client.mean == pytest.approx(7 / 3)
    assert users.images_per_client.max == 4
    assert users.classes_per_client.mean == pytest.approx(5 / 3)
    p = 4 / 7
    assert users.emd == pytest.approx((2 * 2 * (p - 1 / 2) + 1 * 2 * (1 - p) + 4 * 2 * (p - 1 / 2)) / 7)
    assert users.size_variation == pytest.approx(np.std([2, 1, 4]) / (7 / 3))
    assert users.share_of_largest_tenth == pytest.approx(4 / 7)
    geo = found["train", "geo-100"]  # rows 5 | 2 3 | 0 6: p = (3/5, 2/5) of these five alone
    assert (geo.clients, geo.images) == (3, 5)
    assert geo.emd == pytest.approx((1 * 1.2 + 2 * 0.2 + 2 * 0.8) / 5)


def test_a_tenth_of_the_clients_is_rounded_up_and_the_largest_are_taken(tmp_path: Path) -> None:
    split = split_index("abcdefghijk", counts=(1, 1, 1, 3, 1, 1, 1, 1, 2, 1, 1))
    with DataFile(write(tmp_path / "f.hdf5", "raw", splits={"train": split})) as file:
        ((found, _),) = measure(file)
    assert found.share_of_largest_tenth == pytest.approx((3 + 2) / 14)


def test_clients_dealt_at_random_differ_by_their_size_alone() -> None:
    rng = np.random.default_rng(0)
    classes, owner = rng.integers(0, 10, 20000), np.repeat(np.arange(40), 500)
    emd = mean_emd(distances(classes, owner, 40)[0], np.full(40, 500))
    assert 0.07 < emd < 0.14  # 10 E|N(0, 0.09 / 500)| = 0.107


def test_the_command_prints_a_line_for_each_and_writes_json_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = write(tmp_path / "f.hdf5", "raw", splits=partitioned()), tmp_path / "out"
    assert run(main, [str(path), "--output_dir", str(out)]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[0].split()[:3] == ["split", "dealt", "by"]
    assert [line.split()[1] for line in lines[1:5]] == ["crossed", "geo-100", "users", "users"]
    content = json.loads((out / "statistics.json").read_text())
    assert [one["name"] for one in content] == ["crossed", "geo-100", "users", "users"]
    assert f"{content[1]['emd']:.3f}" in lines[2]
    assert lines[5:] == [*MEANING.splitlines(), "train by geo-100: 2 of 7 images belong to no client"]
    assert max(map(len, MEANING.splitlines())) <= 110
    with pytest.raises(SystemExit):
        main(["--help"])
    assert " ".join(MEANING.split()) in " ".join(capsys.readouterr().out.split())
    assert sorted(file.name for file in out.iterdir()) == [
        "classes.png", "clients.csv", "clients.png", "emd.png", "mixes.png", "statistics.json",
    ]  # fmt: skip
    rows = [line.split(",") for line in (out / "clients.csv").read_text().splitlines()]
    assert rows[0][:4] == ["split", "dealt by", "client", "images"]
    of_users = {row[2]: [*map(int, row[3:6])] for row in rows if row[:2] == ["train", "users"]}
    assert of_users == {"a": [2, 1, 1], "b": [1, 1, 0], "c": [4, 2, 2]}
    assert sum(int(row[3]) for row in rows if row[1] == "geo-100") == 5  # 2 belong to nobody
    for name in ("classes", "clients", "emd", "mixes"):
        with Image.open(out / f"{name}.png") as image:
            assert len(image.convert("RGB").getcolors(1 << 24) or ()) > 20  # something is drawn


@pytest.mark.parametrize(("largest", "unit"), [(30, "images"), (9000, "% of its images")])
def test_the_picture_of_mixes_has_clients_of_all_sizes_and_names_its_classes(largest: int, unit: str) -> None:
    """78 clients with as many images as their number, and one with many more, the last."""
    sizes = np.array([*range(1, 78), largest])
    owner = np.repeat(np.arange(78), sizes)
    task: Any = SimpleNamespace(label_names=("a", "b"))
    mixes = _mixes(owner % 2, owner, sizes, task)
    assert mixes.shape == (50, 2)
    assert mixes.sum(1).tolist() == sorted(mixes.sum(1).tolist(), reverse=True)
    assert {mixes.sum(1)[0], mixes.sum(1)[-1]} == {max(77, largest), 1}
    dealt = Dealt("train", "p", sizes, np.ones(78, np.int64), np.zeros(78), mixes)
    figure = figures.mixes([dealt], task.label_names)
    assert figure.axes[0].get_title() == "p (50 of 78 clients, by size)"
    assert figure.axes[0].get_ylabel() == unit
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]


def test_images_of_several_labels_are_left_out_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = records(60)
    folder, path = write_parquet(tmp_path / "in", rows), tmp_path / "f.hdf5"
    assert run(preprocess, [f"--source={folder}", f"--output_file={path}"]) == 0
    capsys.readouterr()
    assert run(main, [str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for split in ("train", "val", "test"):
        here = [one for one in rows if one.partition == split]
        several = [one for one in here if len(one.labels) > 1]
        start = f"{split} by users: {len(several)} of {len(here)} images are left out, because they have no"
        users = {one.user_id for one in here}
        assert any(line.startswith(start) for line in lines) == (len(users) > 1)


def test_a_file_with_nothing_to_compare_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = partitioned()["train"]
    alone = {**dataset_index().splits, "train": train}
    for name, split in alone.items():
        whole = np.array([0, split.num_images])
        alone[name] = replace(
            split,
            user_ids=[f"all-{name}"],
            user_offsets=whole,
            user_index=split.user_index * 0,
            partitions={},
        )
    path = write(tmp_path / "f.hdf5", "raw", splits=alone)
    assert run(main, [str(path)]) == 2
    assert "has no partition and one user in each split, so there is nothing to" in capsys.readouterr().err
    assert run(main, [str(tmp_path / "no.hdf5")]) == 2


@pytest.mark.skipif(not REAL.exists(), reason=f"{REAL} is not on this machine")
def test_googles_splits_have_the_golden_distances() -> None:
    classes = np.full(50_000, -1)
    for line in (REAL / "federated_train_alpha_1.00.csv").read_text().splitlines()[1:]:
        _, image, label = line.split(",")
        classes[int(image)] = int(label)
    classes[classes < 0] = 9  # of index 10100, which no split has
    found, digests = csv_partitions(CIFAR10, REAL, classes)
    assert digests == CIFAR10.official
    assert list(found) == list(GOLDEN)
    for name, (emd, held) in GOLDEN.items():
        sizes = np.diff(found[name].offsets)
        assert (len(sizes), int(sizes.sum()), int(sizes.min())) == (100, 49_999, 499)
        distance, count = distances(classes[found[name].rows], np.repeat(np.arange(100), sizes), 100)
        assert mean_emd(distance, sizes) == pytest.approx(emd, abs=0.0006)
        assert count.mean() == pytest.approx(held, abs=0.0051)
