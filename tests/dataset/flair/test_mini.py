"""The mini data set: FLAIR's numbers at full scale, determinism, non-IID users, labels that can be learnt.

Shape letters: U users, N images, K coarse labels.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from dataset.arrays import BoolArray, ByteArray, FloatArray, IntArray
from dataset.cli import run
from dataset.flair.mini import COARSE_LABELS, MiniSpec, draw_images, main, mini_index, write_mini
from dataset.journal import only_writer
from dataset.store.hdf5 import DataFile
from dataset.store.index import SPLITS, TAXONOMIES, DatasetIndex, SplitIndex, check_index

SMALL = MiniSpec(train_users=60, val_users=12, test_users=12)

FLAIR_COUNTS = {  # images with each label, of 429,078
    "structure": 228923, "equipment": 225862, "material": 139733, "outdoor": 131322, "plant": 123363,
    "food": 110792, "animal": 68858, "liquid": 68677, "art": 37230, "interior_room": 32042, "light": 11326,
    "recreation": 5651, "celebration": 3769, "fire": 3011, "music": 2571, "games": 1093, "religion": 866,
}  # fmt: skip


@pytest.fixture(scope="module")
def full() -> DatasetIndex:
    """All of FLAIR's users."""
    return mini_index(MiniSpec())


@pytest.fixture(scope="module")
def small() -> DatasetIndex:
    return mini_index(SMALL)


def per_image(split: SplitIndex, taxonomy: str) -> IntArray:
    return np.diff(split.labels[taxonomy].indptr)


def users_with(split: SplitIndex, taxonomy: str) -> BoolArray:
    """Whether a user has a label on any image, ``[U, labels]``."""
    labels = split.labels[taxonomy]
    out = np.zeros((split.num_users, labels.num_labels), bool)
    out[np.repeat(split.user_index, np.diff(labels.indptr)), labels.indices] = True
    return out


def dense(split: SplitIndex) -> ByteArray:
    return split.labels["labels"].dense(np.arange(split.num_images))


# FLAIR's numbers at full scale


@pytest.mark.xdist_group("full mini set")
def test_images_per_user_are_flairs(full: DatasetIndex) -> None:
    users = [split.num_users for split in full.splits.values()]
    images = [split.num_images for split in full.splits.values()]
    assert users == [41131, 5141, 5142]
    assert images[0] == 345879
    np.testing.assert_allclose(images[1:], [39239, 43960], rtol=0.1)
    assert sum(images) == pytest.approx(429078, rel=0.01)
    sizes = np.sort(np.diff(full.splits["train"].user_offsets))
    assert np.quantile(sizes, [0, 0.25, 0.5, 0.75, 1]).tolist() == [1, 1, 2, 5, 4151]
    assert sizes.mean() == pytest.approx(8.35, rel=0.01)
    assert sizes.std() == pytest.approx(51.3, rel=0.02)
    largest = sizes[-round(0.023 * len(sizes)) :].sum()
    assert largest / sizes.sum() == pytest.approx(0.5, abs=0.01)  # paper, Section 4.2


@pytest.mark.xdist_group("full mini set")
@pytest.mark.parametrize(
    "split, common, rare",
    [("train", 0.02, 0.06), ("val", 0.12, 0.35), ("test", 0.12, 0.35)],  # one large user weighs more in val
)
def test_coarse_frequencies_are_flairs(full: DatasetIndex, split: str, common: float, rare: float) -> None:
    counts = full.splits[split].labels["labels"].counts() / full.splits[split].num_images
    expected = np.array([FLAIR_COUNTS[name] for name in COARSE_LABELS]) / 429078
    off = np.abs(counts / expected - 1)
    assert off[expected > 0.05].max() < common
    assert off.max() < rare


@pytest.mark.xdist_group("full mini set")
def test_labels_per_image_are_flairs(full: DatasetIndex) -> None:
    coarse, fine = (per_image(full.splits["train"], taxonomy) for taxonomy in TAXONOMIES)
    assert [coarse.min(), np.median(coarse), coarse.max()] == [1, 3, 9]
    assert coarse.mean() == pytest.approx(2.785, rel=0.005)
    assert coarse.std() == pytest.approx(1.149, rel=0.01)
    assert [fine.min(), np.median(fine)] == [1, 4]
    assert 20 <= fine.max() <= 36
    assert fine.mean() == pytest.approx(4.615, rel=0.02)
    assert fine.std() == pytest.approx(2.73, rel=0.03)


@pytest.mark.xdist_group("full mini set")
def test_labels_per_user_are_flairs(full: DatasetIndex) -> None:
    coarse, fine = (users_with(full.splits["train"], taxonomy) for taxonomy in TAXONOMIES)
    share = dict(zip(COARSE_LABELS, coarse.mean(0)))
    assert share["structure"] == pytest.approx(0.87, abs=0.015)
    assert share["religion"] == pytest.approx(0.014, abs=0.002)
    assert coarse.sum(1).mean() == pytest.approx(4.61, rel=0.02)
    assert coarse.sum(1).max() == 17
    assert fine.sum(1).mean() == pytest.approx(16.8, rel=0.06)
    assert 500 < fine.sum(1).max() < 1000  # FLAIR: 838


@pytest.mark.xdist_group("full mini set")
def test_fine_labels_have_flairs_long_tail(full: DatasetIndex) -> None:
    train = full.splits["train"]
    counts, users = train.labels["fine_grained_labels"].counts(), users_with(train, "fine_grained_labels")
    assert len(counts) == 1628
    assert (users.mean(0) < 0.001).sum() == pytest.approx(1255, rel=0.07)
    assert (counts < 20).sum() == pytest.approx(134, rel=0.3)
    assert 55_000 < counts.max() < 82_336


# Structure at any scale


@pytest.mark.parametrize(
    "spec",
    [
        SMALL,
        MiniSpec(200, 40, 40),
        MiniSpec(40, 40, 40, num_fine_labels=17),
        MiniSpec(30, 9, 9, num_fine_labels=40),
    ],
)
def test_small_scales_keep_every_coarse_label_in_every_split(spec: MiniSpec) -> None:
    index = mini_index(spec)
    check_index(index)
    for name in SPLITS:
        split = index.splits[name]
        assert (split.labels["labels"].counts() > 0).all()
        assert per_image(split, "labels").max() <= 9
        assert split.num_users == spec.users(name)
        assert split.labels["fine_grained_labels"].num_labels == spec.num_fine_labels


def test_a_single_user_with_a_single_image_is_a_data_set() -> None:
    index = mini_index(MiniSpec(1, 1, 1, max_user_images=1))
    check_index(index)
    assert [split.num_images for split in index.splits.values()] == [1, 1, 1]
    assert 1 <= per_image(index.splits["train"], "labels")[0] <= 9


@pytest.mark.parametrize("num_fine", [17, 18, 100, 1628, 5000])
def test_an_image_has_a_coarse_label_exactly_if_it_has_a_fine_one_of_it(num_fine: int) -> None:
    index = mini_index(MiniSpec(60, 12, 12, num_fine_labels=num_fine))
    names = list(index.label_mappings["fine_grained_labels"])
    assert len(set(names)) == num_fine
    assert set(COARSE_LABELS) <= set(names)
    parent = np.array([COARSE_LABELS.index(name.split("/")[0]) for name in names])
    for split in index.splits.values():
        fine = split.labels["fine_grained_labels"]
        implied = np.zeros((split.num_images, 17), np.uint8)
        implied[np.repeat(np.arange(split.num_images), np.diff(fine.indptr)), parent[fine.indices]] = 1
        np.testing.assert_array_equal(implied, dense(split))


def test_user_sizes_follow_cap_and_factor() -> None:
    def sizes(cap: int | None, factor: float) -> IntArray:
        spec = MiniSpec(300, 5, 5, max_user_images=cap, size_factor=factor)
        return np.diff(mini_index(spec).splits["train"].user_offsets)

    plain = sizes(None, 1.0)
    np.testing.assert_array_equal(sizes(20, 1.0), np.minimum(plain, 20))
    ratio = sizes(None, 3.0) / plain
    assert ratio.max() <= 3
    assert sizes(None, 3.0).sum() / plain.sum() == pytest.approx(3, rel=0.1)


# Determinism


def test_golden_index_and_pixels(small: DatasetIndex) -> None:
    """What a spec gives never changes unnoticed: whoever changes it raises VERSION and these hashes."""
    columns = hashlib.sha256()
    for split in small.splits.values():
        columns.update("\n".join([*split.user_ids, *split.image_ids]).encode())
        columns.update(split.user_offsets.astype("<i8").tobytes() + split.user_index.astype("<i4").tobytes())
        for taxonomy in TAXONOMIES:
            columns.update(split.labels[taxonomy].indptr.astype("<i8").tobytes())
            columns.update(split.labels[taxonomy].indices.astype("<u2").tobytes())
    pixels = [draw_images(SMALL, small, split, np.arange(0, 60, 4)).tobytes() for split in SPLITS]
    assert columns.hexdigest()[:16] == "e7b80c135941d79c"
    assert hashlib.sha256(b"".join(pixels)).hexdigest()[:16] == "cbbd854ff80bc734"


def test_pixels_do_not_depend_on_the_other_rows_asked_for(small: DatasetIndex) -> None:
    count = small.splits["train"].num_images
    together = draw_images(SMALL, small, "train", np.arange(count))
    order = np.random.default_rng(0).permutation(count)[:150]
    np.testing.assert_array_equal(draw_images(SMALL, small, "train", order), together[order])
    np.testing.assert_array_equal(draw_images(SMALL, small, "train", order[7:8]), together[order[7:8]])
    repeated = np.array([5, 5, 3, 5])
    np.testing.assert_array_equal(draw_images(SMALL, small, "train", repeated), together[repeated])
    assert draw_images(SMALL, small, "train", np.arange(0)).shape == (0, 32, 32, 3)


def test_seed_split_and_row_all_change_the_pixels(small: DatasetIndex) -> None:
    first = draw_images(SMALL, small, "train", np.arange(2))
    other = MiniSpec(60, 12, 12, seed=1)
    assert (first[0] != first[1]).mean() > 0.9
    assert (first != draw_images(SMALL, small, "val", np.arange(2))).mean() > 0.9
    assert (first != draw_images(other, mini_index(other), "train", np.arange(2))).mean() > 0.9


def test_another_size_shows_the_same_scene(small: DatasetIndex) -> None:
    rows, large = np.arange(40), MiniSpec(60, 12, 12, image_size=64)
    fine = draw_images(large, mini_index(large), "train", rows).astype(float)
    halved = fine.reshape(40, 32, 2, 32, 2, 3).mean((2, 4)).reshape(40, -1)
    coarse = draw_images(SMALL, small, "train", rows).reshape(40, -1).astype(float)
    assert np.median([np.corrcoef(a, b)[0, 1] for a, b in zip(halved, coarse)]) > 0.85
    assert np.median([np.corrcoef(a, b)[0, 1] for a, b in zip(halved, np.roll(coarse, 1, 0))]) < 0.5


# Users differ


def spread_between_users(values: FloatArray, user: npt.NDArray[np.int32]) -> float:
    """Variance of the users' means, summed over columns."""
    counts = np.bincount(user)
    means = np.stack([np.bincount(user, column) / counts for column in values.T], 1)
    return float(means.var(0).sum())


def test_users_have_tastes_and_a_style_of_their_own() -> None:
    spec = MiniSpec(400, 5, 5, max_user_images=20)
    index = mini_index(spec)
    split = index.splits["train"]
    rows = np.flatnonzero(np.diff(split.user_offsets)[split.user_index] >= 10)
    user = np.unique(split.user_index[rows], return_inverse=True)[1].astype(np.int32)
    shuffled = np.random.default_rng(0).permutation(user)  # the same sizes, IID
    labels = dense(split)[rows].astype(np.float64)
    pixels = draw_images(spec, index, "train", rows).mean((1, 2))
    assert spread_between_users(labels, user) > 2 * spread_between_users(labels, shuffled)
    assert spread_between_users(pixels, user) > 4 * spread_between_users(pixels, shuffled)


# Labels can be learnt from pixels


# The file and the command


def test_the_raw_file_holds_the_drawn_pixels_and_says_what_it_is(tmp_path: Path, small: DatasetIndex) -> None:
    write_mini(tmp_path / "mini.hdf5", SMALL)
    with DataFile(tmp_path / "mini.hdf5") as file:
        assert file.provenance["source"] == "mini"
        assert file.provenance["spec"]["train_users"] == 60
        assert "version 1" in file.provenance["revision"]
        rows = np.array([3, 1, 40])
        for split in SPLITS:
            drawn = draw_images(SMALL, small, split, rows)
            np.testing.assert_array_equal(file.read_images(split, rows, 32), drawn)
            assert list(file.split(split).image_ids) == list(small.splits[split].image_ids)
            np.testing.assert_array_equal(dense(file.split(split)), dense(small.splits[split]))


def test_the_jpeg_file_holds_nearly_the_drawn_pixels(tmp_path: Path) -> None:
    spec = MiniSpec(12, 3, 3, image_size=64)
    write_mini(tmp_path / "mini.hdf5", spec, "jpeg")
    with DataFile(tmp_path / "mini.hdf5") as file:
        assert file.storage == "jpeg"
        rows = np.arange(8)
        read = file.read_images("train", rows, 64).astype(int)
    assert np.abs(read - draw_images(spec, mini_index(spec), "train", rows)).mean() < 12


def test_the_command_writes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mini.hdf5"
    sizes = "--train_users 5 --val_users 2 --test_users 2 --image_size 8 --max_user_images 3 --seed 7"
    assert run(main, ["--output_file", str(path), *sizes.split()]) == 0
    with DataFile(path) as file:
        assert file.split("train").num_users == 5
        assert file.image_size == 8
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, named",
    [
        ("--train_users 0", "train_users"),
        ("--train_users many", "--train_users"),
        ("--num_fine_labels 16", "num_fine_labels"),
        ("--size_factor 0", "size_factor"),
        ("--size_factor nan", "size_factor"),
        ("--seed -1", "seed"),
        ("--image_size 4", "image_size"),
        ("--users 3", "--users"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, named: str
) -> None:
    assert run(main, ["--output_file", str(tmp_path / "mini.hdf5"), *arguments.split()]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    assert named in message
    assert not list(tmp_path.iterdir())


def test_a_file_that_another_process_writes_is_not_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "f.hdf5"
    with only_writer(output):
        assert run(main, [f"--output_file={output}", "--train_users=2"]) == 2
        assert f"another process is writing {output}: wait" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_module_runs_as_a_command() -> None:
    command = [sys.executable, "-m", "dataset.flair.mini", "--storage", "raw"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: the following arguments are required: --output_file; " + (
        "see python -m dataset.flair.mini --help\n"
    )


def test_an_easier_set_shows_the_same_scenes_with_less_in_the_way() -> None:
    hard, easy = (MiniSpec(40, 5, 5, image_size=24, num_fine_labels=40, difficulty=d) for d in (1.0, 0.0))
    index = mini_index(hard)
    rows = np.arange(30)
    pictures = [draw_images(spec, index, "train", rows).astype(np.int64) for spec in (hard, easy)]
    assert not np.array_equal(pictures[0], pictures[1])
    rough = [float(np.abs(np.diff(images, axis=2)).mean()) for images in pictures]
    assert rough[1] < 0.6 * rough[0]
    by_easy = mini_index(easy)
    for taxonomy in ("labels", "fine_grained_labels"):
        a, b = (table.splits["train"].labels[taxonomy] for table in (index, by_easy))
        np.testing.assert_array_equal(a.indices, b.indices)
    with pytest.raises(ValueError, match="difficulty is 2; give a number from 0 to 1"):
        MiniSpec(difficulty=2)


def test_one_label_an_image_if_asked_for() -> None:
    spec = replace(MiniSpec(train_users=40, val_users=2, test_users=2), coarse_labels=1)
    labels = mini_index(spec).splits["train"].labels
    assert (np.diff(labels["labels"].indptr) == 1).all()
    assert (np.diff(labels["fine_grained_labels"].indptr) >= 1).all()
    with pytest.raises(ValueError, match="coarse_labels is 10; give 1 to 9"):
        MiniSpec(coarse_labels=10)
    assert repr(spec) == repr(replace(spec, coarse_labels=None)), "files are named after it"
