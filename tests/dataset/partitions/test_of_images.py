"""Partitions by what images contain and by when they were taken, of made images and of a file with masks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataset.cli import run
from dataset.partitions import figures
from dataset.partitions.__main__ import main
from dataset.partitions.drawn import Images, Recipe, read_name
from dataset.partitions.of_file import LOWEST, default_taxonomy, drawn_of
from dataset.partitions.statistics import distances, mean_emd, measure
from dataset.preprocess import Options, preprocess
from dataset.store.annotations import BACKGROUND, VOID, LabelMatrix, OneClass
from dataset.store.hdf5 import DataFile
from dataset.store.index import PartitionIndex
from dataset.store.validate import main as describe
from dataset.store.views import LabelSetView, SingleLabelView
from tests.dataset.drawn import label_rows, png
from tests.dataset.store.test_annotations import source

CLASSES = [BACKGROUND, "ape", "bee", "cow"]
SIDE = 8


def recipe(name: str) -> Recipe:
    found = read_name(name)
    assert found is not None, name
    return found


def parts(dealt: PartitionIndex) -> list[list[int]]:
    return [rows.tolist() for rows in np.split(dealt.rows, dealt.offsets[1:-1])]


def dealt_by_content(present: LabelMatrix, clients: int) -> list[list[int]]:
    ids = [str(row) for row in range(len(present))]
    drawn = recipe(f"most-frequent-clients-{clients}-seed-0")
    return parts(drawn.draw(np.zeros(len(present), np.int64), Images(present, ids, ids)))


@pytest.mark.parametrize(
    "alpha, sizes, first, classes, distance",
    [
        ("0.1", (232, 510, 655), (500, 507, 455, 516, 519), (14, 32.72, 72), 1.5407),
        ("0.5", (324, 504.5, 610), (510, 500, 528, 449, 553), (57, 72.91, 93), 1.0038),
        ("100", (459, 501, 507), (459, 500, 501, 502, 502), (93, 99.46, 100), 0.0913),
    ],
)
def test_the_sizes_are_those_of_fedmls_lda_on_cifar100(
    alpha: str,
    sizes: tuple[float, ...],
    first: tuple[int, ...],
    classes: tuple[float, ...],
    distance: float,
) -> None:
    """Measured by FedML's own code with seed 0; they depend on the numbers of each class alone."""
    cifar100 = np.random.default_rng(3).permutation(np.repeat(np.arange(100), 500))
    dealt = recipe(f"lda-legacy-{alpha}-clients-100-seed-0").draw(cifar100)
    found = np.diff(dealt.offsets)
    owner = np.repeat(np.arange(100), found)
    apart, held = distances(cifar100[dealt.rows], owner, 100)
    assert (found.min(), np.median(found), found.max()) == sizes
    assert tuple(found[:5]) == first
    assert (held.min(), held.mean(), held.max()) == classes
    assert round(mean_emd(apart, found), 4) == distance


def test_images_go_to_the_client_of_the_category_that_most_of_those_left_contain() -> None:
    """The counts are those of COCO128 with 8 clients; the images are made. Many of the other categories have
    a person, too: the dining table is in more images than the bowl, until those with persons are gone."""
    person, car, dog, elephant, bowl, plant, table = 0, 2, 16, 20, 45, 58, 60
    rows: list[list[int]] = [[person, table]] * 20 + [[person, car]] * 5 + [[person]] * 36
    rows += [[bowl, plant]] * 2 + [[bowl]] * 7 + [[car]] * 8 + [[dog, elephant]] * 2 + [[dog]] * 4
    rows += [[plant]] * 4 + [[table]] * 4 + [[elephant]] * 3
    rows += [[k] for k in (30, 31, 32, 33) for _ in range(2)] + [[]] * 25
    order = np.random.default_rng(0).permutation(len(rows))
    found = dealt_by_content(label_rows([rows[row] for row in order], 80), 8)
    assert [len(part) for part in found] == [61, 9, 8, 6, 4, 4, 3, 33]
    assert all(plant in rows[order[row]] for row in found[4]), "of two with four images, the lower is first"


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 5), unique=True), min_size=6, max_size=30), st.integers(1, 4))
def test_no_later_client_has_what_a_client_was_given(rows: list[list[int]], clients: int) -> None:
    left, given = set(range(len(rows))), 0
    while left and given < clients - 1 and any(rows[row] for row in left):
        counts = [sum(k in rows[row] for row in left) for k in range(6)]
        left = {row for row in left if counts.index(max(counts)) not in rows[row]}
        given += 1
    if given < clients - 1 or not left:
        with pytest.raises(ValueError, match="is left for client"):
            dealt_by_content(label_rows(rows, 6), clients)
        return
    found = dealt_by_content(label_rows(rows, 6), clients)
    assert sorted(row for part in found for row in part) == list(range(len(rows)))
    left = set(range(len(rows)))
    for part in found[:-1]:
        counts = [sum(k in rows[row] for row in left) for k in range(6)]
        top = counts.index(max(counts))
        assert set(part) == {row for row in left if top in rows[row]}
        left -= set(part)
    assert set(found[-1]) == left


def cut(users: list[str], ids: list[str], clients: int) -> dict[str, list[int]]:
    known = Images(OneClass.of(np.zeros(len(ids)), 1), ids, users)
    dealt = recipe(f"windows-clients-{clients}-seed-0").draw(np.full(len(ids), -1), known)
    return dict(zip(dealt.user_ids, parts(dealt)))


@settings(max_examples=60)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.data())
def test_windows_are_neighbours_of_one_user_and_as_equal_as_that_allows(
    users: list[str], data: st.DataObject
) -> None:
    clients = data.draw(st.integers(len(set(users)), len(users)))
    numbers = data.draw(st.permutations(range(len(users))))
    found = cut(users, [f"frame{number}" for number in numbers], clients)
    assert sorted(row for part in found.values() for row in part) == list(range(len(users)))
    assert len(found) == clients
    mine = {
        user: [part for name, part in found.items() if name.startswith(f"{user}-")] for user in set(users)
    }
    for user, windows in mine.items():
        assert {users[row] for part in windows for row in part} == {user}
        spans = [sorted(numbers[row] for row in part) for part in windows]
        assert all(before[-1] < after[0] for before, after in pairwise(spans)), "one after the other"
        assert np.ptp([len(part) for part in windows]) <= 1
    mean = {user: users.count(user) / len(windows) for user, windows in mine.items()}
    for user, windows in mine.items():
        if len(windows) > 1:
            assert users.count(user) / (len(windows) - 1) >= max(mean.values()), (
                "its last cut was the best one"
            )


@pytest.mark.parametrize("clients", [1, 5])
def test_windows_that_cannot_be_had_are_refused(clients: int) -> None:
    with pytest.raises(
        ValueError, match=f"{clients} clients cannot have one window of images each: use at least 2"
    ):
        cut(["a", "a", "b", "b"], ["1", "2", "3", "4"], clients)


@pytest.mark.parametrize("kind", ["windows", "most-frequent"])
def test_what_needs_a_file_says_so(kind: str) -> None:
    with pytest.raises(ValueError, match=f"{kind} needs the images of a file: make the file first"):
        recipe(f"{kind}-clients-2-seed-0").draw(np.zeros(9, np.int64))


CONTENT = [[1, 3], [2, 3], [3], [], [1], [2], [3, 2], [1, 2, 3], [3], [2], [], [1]] * 4
"""The classes of each of 48 images; image k is of user k mod 3."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with masks and boxes of the same contents; one user has the split test."""
    return made_file(tmp_path_factory.mktemp("images"), CONTENT)


@pytest.fixture(scope="module")
def file_of_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of which 38 of 40 images contain the first class, and most another, too; one image has none."""
    contents = [[1, 3], [1]] * 19 + [[2], [3], []]
    return made_file(tmp_path_factory.mktemp("alike"), contents)


def made_file(folder: Path, contents: Sequence[Sequence[int]]) -> Path:
    """A file with masks and boxes of these contents; image k is of user k mod 3."""
    records = []
    for number, content in enumerate(contents):
        mask = np.zeros((SIDE, SIDE), np.uint8)
        for row, k in enumerate(content):
            mask[row] = k
        mask[-1] = VOID
        boxes = [{"name": CLASSES[k], "corners": [k, 0, k + 1, 2]} for k in content]
        image = f"i{number}"
        Image.new("RGB", (SIDE, SIDE)).save(folder / f"{image}.jpg")
        owner = "abc"[number % 3]
        records.append(
            {"user_id": owner, "image_id": image, "partition": "train", "mask": png(mask), "objects": boxes}
        )
    made = source(folder, records, {"mask": "mask", "objects": "boxes"})
    output = folder / "f.hdf5"
    preprocess(made, Options(output, vocabulary={"mask": CLASSES, "objects": CLASSES}, workers=1))
    return output


@pytest.fixture
def file(path: Path) -> Iterator[DataFile]:
    with DataFile(path) as opened:
        yield opened


def numbers(file: DataFile) -> list[int]:
    """The number of the image at each row."""
    return [int(image[1:]) for image in file.split("train").image_ids]


@pytest.mark.parametrize("annotation", ["mask", "objects"])
def test_an_image_counts_as_the_lowest_class_that_it_contains(file: DataFile, annotation: str) -> None:
    """FedML's partition of images with masks; background is no class, and boxes go by the same rule."""
    of_row = numbers(file)
    rows = [row for row, number in enumerate(of_row) if CONTENT[number]]
    lowest = np.array([min(CONTENT[of_row[row]]) for row in rows])
    drawn = recipe("lda-legacy-0.5-clients-3-seed-1")
    expected = [[rows[at] for at in part] for part in parts(drawn.draw(lowest))]
    assert parts(drawn_of(file, drawn, annotation)) == expected
    (statistics, _) = measure(file, annotation, {"x": drawn_of(file, drawn, annotation)})[0]
    assert (statistics.images, statistics.images_left_out, statistics.classes) == (len(rows), 0, 3)


def test_kinds_that_do_not_look_at_classes_deal_images_of_no_class_too(file: DataFile) -> None:
    for kind in ("iid", "quantity-linear", "windows", "most-frequent"):
        dealt = drawn_of(file, recipe(f"{kind}-clients-3-seed-1"), "mask")
        assert sorted(dealt.rows) == list(range(len(CONTENT))), kind
    of_row = numbers(file)
    cuts = drawn_of(file, recipe("windows-clients-6-seed-0"), "mask")
    assert list(cuts.user_ids) == ["a-0", "a-1", "b-0", "b-1", "c-0", "c-1"]
    for user, part in zip(cuts.user_ids, parts(cuts)):
        here = sorted(of_row[row] for row in part)
        first = "abc".index(user[0]) + 24 * int(user[-1])
        assert here == list(range(first, first + 24, 3)), "i9 is before i10"
    most = parts(drawn_of(file, recipe("most-frequent-clients-2-seed-0"), "objects"))
    assert {of_row[row] for row in most[0]} == {n for n, content in enumerate(CONTENT) if 3 in content}


def test_the_command_takes_the_files_own_annotation(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "g.hdf5"
    words = [str(path), "--partition=most-frequent,windows", "--clients=3", f"--output_file={copy}"]
    assert run(main, words) == 0
    assert "windows-clients-3-seed-0" in capsys.readouterr().out
    assert run(describe, [str(copy)]) == 0
    said = capsys.readouterr().out
    assert "partition most-frequent-clients-3-seed-0: 3 users, 48 images" in said
    counts = [sum(k in content for content in CONTENT) for k in (1, 2, 3)]
    for k, name in enumerate(CLASSES[1:]):
        assert f"  {name}: {counts[k]}\n" in said
    assert run(main, [*words[:3], "--taxonomy=labels"]) == 2
    assert "has no annotation 'labels'; it has" in capsys.readouterr().err


def test_the_command_says_what_an_images_class_is_and_where_nearly_all_have_one(
    path: Path, file_of_one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--partition=lda=0.5", "--clients=2"]
    for annotation in ("mask", "objects"):
        assert run(main, [str(path), *words, f"--taxonomy={annotation}"]) == 0
        said = capsys.readouterr()
        assert LOWEST in said.out
        assert "warning" not in said.err
        assert run(main, [str(file_of_one), *words, f"--taxonomy={annotation}"]) == 0
        said = capsys.readouterr()
        assert LOWEST in said.out
        (line,) = [line for line in said.err.splitlines() if line.startswith("WARNING: ")]
        assert f"95 % of the training images count as {CLASSES[1]}, because {LOWEST}. With" in line


def test_training_on_classes_refuses_masks_and_boxes(file: DataFile) -> None:
    assert default_taxonomy(file) == "mask"
    for view, words in ((SingleLabelView, "masks"), (LabelSetView, "masks")):
        with pytest.raises(
            ValueError, match=re.escape(f"mask of {file.path} has {words}, but this task needs a class")
        ):
            view(file, taxonomy="mask").split("train")
    with pytest.raises(ValueError, match="has boxes, but this task needs a class or a set of labels for"):
        SingleLabelView(file, taxonomy="objects").split("train")
    counts = SingleLabelView(file, taxonomy="mask", lowest=True).split("train").label_counts()
    assert counts.tolist() == [0, 16, 16, 8]
    axes = figures.classes(file, "mask").axes[0]
    assert axes.get_ylabel().endswith("images,\nby their lowest class")
    names = [label.get_text() for label in axes.get_xticklabels()]
    assert names[-1] == CLASSES[0], "the class without an image stands last, and has its place"
    assert sorted(names) == sorted(CLASSES)
