"""The page of a file's users: every kind of annotation, drawn where it is; counts that add up; a bound."""

from __future__ import annotations

import base64
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataset.arrays import ByteArray
from dataset.browse.__main__ import main, users_part
from dataset.browse.owners import chosen, label_counts, owners_of, size_counts, skew_of
from dataset.browse.thumbnails import OPAQUE, colour, thumbnail
from dataset.cli import run
from dataset.partitions.statistics import measure
from dataset.store.annotations import LabelMatrix, OneClass
from dataset.store.hdf5 import DataFile
from tests.browser import check_seen
from tests.dataset.drawn import records, write_predecessor
from tests.dataset.store.test_annotations import draw_images, make, mask_of, rows
from tests.page_checks import Page, check

HOSTILE = '"><script>alert(1)</script>'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with every kind of annotation; user a has two images, b two."""
    return make(draw_images(tmp_path_factory.mktemp("all")), rows())


@pytest.fixture(scope="module")
def output(path: Path) -> Path:
    assert run(main, [str(path), f"--output={path.parent / 'p.html'}"]) == 0
    return path.parent / "p.html"


@pytest.fixture(scope="module")
def page(output: Path) -> Page:
    return check(output.read_text())


def pixels_of(html: str) -> ByteArray:
    _, _, data = html.partition("base64,")
    with Image.open(io.BytesIO(base64.b64decode(data.partition('"')[0]))) as image:
        return np.asarray(image.convert("RGB"))


def test_users_stand_with_their_images_labels_masks_and_boxes(page: Page) -> None:
    heads = [head.text for head in page.all("h3")]
    assert {"User a: 2 images", "User b: 2 images"} <= set(heads)
    assert {image.attributes["alt"] for image in page.all("img")} == {
        "Image a0 of user a; tags: x, y; kind: zebra; mask: sky, road; objects: no box",
        "Image a1 of user a; tags: x; kind: ape; mask: sky, road; objects: cup",
        "Image b0 of user b; tags: no label; kind: zebra; mask: sky, road; objects: ant, cup",
        "Image b1 of user b; tags: x, y; kind: ape; mask: sky, road; objects: no box",
    }
    assert page.rows("Splits, and images of a user") == [
        ["train", "2", "4", "2", "2", "2", "2"],
        ["val", "1", "1", "1", "1", "1", "1"],
    ]


def test_a_mask_lies_over_its_image_and_void_does_not(path: Path) -> None:
    with DataFile(path) as file:
        (row,) = (i for i, name in enumerate(file.split("train").image_ids) if name == "a0")
        own = file.read_own("train", np.array([row]))[0].astype(float)
        found = pixels_of(thumbnail(file, "train", row, "a", 96).html).astype(float)
    mask = mask_of("a0")
    assert found.shape == own.shape
    assert np.array_equal(found[mask == 255], own[mask == 255])
    for number in (0, 1):
        expected = (1 - OPAQUE) * own + OPAQUE * np.array(colour(number, 2))
        assert np.abs(found - expected)[mask == number].max() <= 0.5


def test_boxes_are_drawn_where_they_are_when_the_image_is_made_smaller(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    Image.new("RGB", (400, 200), (128, 128, 128)).save(images / "i.jpg", quality=95)
    box = {"name": "ant", "corners": [100, 40, 300, 160]}
    row = {
        "user_id": "u", "image_id": "i", "partition": "train", "tags": [], "kind": "ape",
        "mask": rows()[0]["mask"], "objects": [box],
    }  # fmt: skip
    mask = io.BytesIO()
    Image.fromarray(np.full((200, 400), 255, np.uint8)).save(mask, "PNG")
    file = DataFile(make(images, [{**row, "mask": mask.getvalue()}]))
    with file:
        found = pixels_of(thumbnail(file, "train", 0, "u", 200).html).astype(float)
    assert found.shape == (100, 200, 3)
    drawn = np.abs(found - np.array(colour(1, 2))).max(2) < 60
    ys, xs = np.nonzero(drawn)
    corners = np.array([xs.min(), ys.min(), xs.max() + 1, ys.max() + 1])
    assert np.abs(corners - np.array([50, 20, 150, 80])).max() <= 1
    assert not drawn[30:70, 60:140].any()


def test_classes_have_colours_of_their_own() -> None:
    for number in (1, 2, 11, 17, 21, 80):
        assert len({colour(k, number) for k in range(number)}) == number


def test_the_same_seed_gives_the_same_page_and_another_seed_other_users(path: Path, tmp_path: Path) -> None:
    pages = []
    for seed in (0, 0, 1, 2, 3):
        assert run(main, [str(path), f"--output={tmp_path / 'p.html'}", f"--seed={seed}", "--users=1"]) == 0
        text = (tmp_path / "p.html").read_text()
        pages.append((text, "User a:" in text))
    assert pages[0] == pages[1]
    assert {shown for _, shown in pages} == {True, False}


def test_skew_is_that_of_the_partitions_statistics(tmp_path: Path) -> None:
    """On one class an image both measure the same; there by the partition's view, here by labels."""
    rng = np.random.default_rng(0)
    sizes, classes = np.array([30, 20, 50]), rng.integers(0, 5, 100)
    skew = skew_of(OneClass.of(classes, 5), sizes, 0)
    assert skew is not None
    p = np.bincount(classes, minlength=5) / 100
    parts = np.split(classes, np.cumsum(sizes)[:-1])
    distances = [np.abs(np.bincount(part, minlength=5) / len(part) - p).sum() for part in parts]
    assert skew.mean == pytest.approx(float(np.average(distances, weights=sizes)), rel=1e-12)
    assert sum(skew.histogram.values()) == sum(skew.classes.values()) == skew.users == 3
    assert skew.at_random < 0.6
    alone = skew_of(OneClass.of(np.repeat([0, 1], 10), 2), np.array([10, 10]), 0)
    assert alone is not None
    assert (alone.mean, alone.histogram["1.0 to 1.2"], alone.classes) == (1.0, 2, {"1": 2})


def test_a_file_says_the_same_as_the_partitions_command(path: Path) -> None:
    with DataFile(path) as file:
        owners = owners_of(file, "train", None)
        found = label_counts(file, "train", "kind", owners.rows)
        skew = skew_of(found, owners.sizes, 0)
        (expected, _) = next(one for one in measure(file, "kind") if one[0].split == "train")
    assert skew is not None
    assert skew.mean == pytest.approx(expected.emd)


def test_users_without_a_label_are_not_counted() -> None:
    labels = LabelMatrix.from_pairs(np.array([0, 0, 1]), np.array([0, 1, 1]), 4, 3)
    skew = skew_of(labels, np.array([1, 1, 2]), 0)
    assert skew is not None
    assert skew.users == 2
    assert skew.classes == {"1": 1, "2": 1}
    assert skew_of(LabelMatrix.from_pairs(np.empty(0), np.empty(0), 2, 3), np.array([1, 1]), 0) is None


@pytest.mark.parametrize(
    "sizes", [[1, 1, 3], [0, 5, 10], [1, 2, 3, 4, 700], [64, 64, 100], [0], [1023, 1024]]
)
def test_every_user_with_images_is_in_one_bar(sizes: list[int]) -> None:
    counts = size_counts(np.array(sizes))
    assert sum(counts.values()) == sum(size > 0 for size in sizes)


def test_a_partition_has_clients_and_a_file_of_one_user_points_to_them(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = f"--output={tmp_path / 'p.html'}"
    assert run(main, [str(path), output, "--partition=iid-clients-1-seed-1"]) == 0
    page = check((tmp_path / "p.html").read_text())
    assert [head.text for head in page.all("h3") if head.text.startswith("User ")] == ["User 0: 1 image"]
    assert "the clients of iid-clients-1-seed-1" in page.source
    assert "one user owns all images" not in capsys.readouterr().err
    assert run(main, [str(path), output, "--split=val"]) == 0
    assert "one user owns all images" in capsys.readouterr().err


def test_the_page_ends_where_it_is_full_and_says_so(path: Path) -> None:
    with DataFile(path) as file:
        owners = owners_of(file, "train", None)
        options = Namespace(users=2, images=2, seed=0, split="train", side=96, max_mb=8)
        whole, said = users_part(file, options, owners)
        assert "page ends" not in said
        room = len(whole) * 0.6 / 1e6
        cut, said = users_part(file, Namespace(**{**vars(options), "max_mb": room}), owners)
    assert "with 4 images" not in said
    assert "page ends here" in said
    assert len(cut) < len(whole)
    assert cut.count("<img") < whole.count("<img")


def test_names_can_do_no_harm(tmp_path: Path) -> None:
    images = draw_images(tmp_path)
    for old in list(images.iterdir()):
        old.rename(images / f"{old.stem}&lt;.jpg")
    hostile: list[dict[str, Any]] = [
        {**row, "user_id": f"{row['user_id']}{HOSTILE}", "image_id": f"{row['image_id']}&lt;"}
        for row in rows()
    ]
    made = make(images, hostile)
    assert run(main, [str(made), f"--output={tmp_path / 'p.html'}"]) == 0
    text = (tmp_path / "p.html").read_text()
    page = check(text)
    assert "<script" not in text
    assert f"User a{HOSTILE}: 2 images" in [head.text for head in page.all("h3")]
    assert any(image.attributes["alt"].startswith("Image a0&lt; of") for image in page.all("img"))


@pytest.mark.parametrize("grouped", [True, False])
def test_files_of_another_make_are_shown(grouped: bool, tmp_path: Path) -> None:
    made = write_predecessor(tmp_path / "f.hdf5", records(12), "pfl", grouped)
    with DataFile(made) as file:
        owners, index = owners_of(file, "train", None), file.split("train")
        for user in chosen(owners, 99, 0):
            assert {int(index.user_index[row]) for row in owners.of(user)} == {user}
    assert run(main, [str(made), f"--output={tmp_path / 'p.html'}"]) == 0
    assert check((tmp_path / "p.html").read_text()).all("img")


@pytest.mark.parametrize("shown, output", [("f.hdf5", "f.hdf5"), ("f.html", "f.html"), ("f.hdf5", "n.txt")])
def test_a_page_replaces_pages_alone(
    shown: str, output: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in {shown, output, "old.html"}:
        (tmp_path / name).write_bytes(path.read_bytes())
    assert run(main, [str(tmp_path / shown), f"--output={tmp_path / output}"]) == 2
    assert f"{output} exists and is not an HTML page: give a new file name" in capsys.readouterr().err
    assert (tmp_path / output).read_bytes() == path.read_bytes()
    assert run(main, [str(tmp_path / shown), f"--output={tmp_path / 'old.html'}"]) == 0


def test_a_browser_shows_it(output: Path) -> None:
    check_seen(output)
