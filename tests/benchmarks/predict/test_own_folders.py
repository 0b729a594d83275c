"""Predictions for data made of a folder of the user's own fit its annotations: pixels, categories, images."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.fedcv.detection.train import main as detect
from benchmarks.fedcv.segmentation.train import main as segment
from benchmarks.predict import trained
from benchmarks.predict.__main__ import main
from benchmarks.predict.writing import mask_places
from benchmarks.reporting.pictures import DISTINCT
from dataset.camvid.download_preprocess import CAMVID
from dataset.cli import run
from dataset.store.hdf5 import DataFile
from dataset.street.download_preprocess import STREET
from tests.benchmarks.predict.test_predict import OF_PLACES
from tests.benchmarks.predict.test_predict import tiny as tiny
from tests.benchmarks.sparing import sparingly
from tests.dataset.fetch.made_layouts import make, write_files

WIDTH, HEIGHT = 40, 24
SPLIT_OF = {
    f"{name}{k}": name for name, count in (("train", 6), ("val", 2), ("test", 3)) for k in range(count)
}
CATEGORIES = {20: "van", 10: "cart", 30: "sledge"}


def encoded(pixels: np.ndarray, kind: str) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()


def photos() -> dict[str, bytes]:
    rng = np.random.default_rng(0)
    drawn = {name: rng.integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8) for name in SPLIT_OF}
    return {f"{name}.jpg": encoded(pixels, "JPEG") for name, pixels in drawn.items()}


def users_csv() -> bytes:
    rows = [f"{image},{split},{split}-{k % 2}" for k, (image, split) in enumerate(SPLIT_OF.items())]
    return "\n".join(["image_id,partition,user", *rows]).encode()


def voc_folder(folder: Path) -> Path:
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[:, WIDTH // 2 :] = 2
    files = {f"JPEGImages/{name}": image for name, image in photos().items()}
    files |= {f"SegmentationClass/{name}.png": encoded(mask, "PNG") for name in SPLIT_OF}
    return write_files(folder, {**files, "users.csv": users_csv(), "classes.txt": b"road\nhorse\nwell\n"})


def coco_folder(folder: Path) -> Path:
    files = {f"images/{name}": image for name, image in photos().items()}
    for split in ("train", "val", "test"):
        ids = {name: 10_000 + k for k, name in enumerate(SPLIT_OF) if SPLIT_OF[name] == split}
        size = {"width": WIDTH, "height": HEIGHT}
        content: dict[str, Any] = {
            "images": [{"id": k, "file_name": f"{name}.jpg", **size} for name, k in ids.items()],
            "categories": [{"id": k, "name": name} for k, name in CATEGORIES.items()],
            "annotations": [
                {"id": k, "image_id": k, "category_id": 10 * (1 + k % 3), "bbox": [4, 2, 30, 20], "area": 600}
                | {"iscrowd": 0}
                for k in ids.values()
            ],
        }
        files[f"annotations/instances_{split}.json"] = json.dumps(content).encode()
    return write_files(folder, files)


def test_masks_are_of_the_photos_size_and_show_their_classes(tmp_path: Path) -> None:
    file, directory, output = tmp_path / "masks.hdf5", tmp_path / "run", tmp_path / "predicted"
    assert make(CAMVID, file, "--source", voc_folder(tmp_path / "voc")) == 0
    words = [f"--data_path={file}", f"--run_dir={directory}", "--model.arch=tiny_masks", *OF_PLACES]
    with sparingly(False):
        assert run(segment, [*words, "--federated.cohort_size=2"]) == 0
    assert run(main, [str(directory), "--split=test", f"--output={output}"]) == 0
    model = trained(directory)
    with DataFile(file) as data:
        store: Any = model.on(data).split("test")
        images, _ = store.read(np.arange(len(store.file_rows)))
        predicted = model.predict(torch.from_numpy(images)).numpy()
        index = data.split("test")
        names = [index.image_ids[row] for row in store.file_rows]
        owners = [index.user_ids[index.user_index[row]] for row in store.file_rows]
    palette = np.array([[int(code[k : k + 2], 16) for k in (0, 2, 4)] for code in DISTINCT[:3]])
    for user, name, mask in zip(owners, names, predicted, strict=True):
        with Image.open(output / user / f"{name}.png") as picture:
            assert picture.mode == "P"
            assert picture.size == (WIDTH, HEIGHT)
            found, colours = np.asarray(picture), np.array(picture.getpalette()).reshape(256, 3)
        rows, columns = (np.arange(n) * 2 + 1 for n in (HEIGHT, WIDTH))
        side = len(mask)
        nearest = mask[(rows * side // (2 * HEIGHT))[:, None], columns * side // (2 * WIDTH)]
        np.testing.assert_array_equal(found, nearest)
        np.testing.assert_array_equal(colours[:3], palette)
        assert (colours[255] == 255).all()


@pytest.mark.parametrize(
    "places, expected",
    [
        (["a/gray.png", "a/b.JPG", "a/c"], ["a/gray", "a/b", "a/c"]),
        (["a/1.5", "a/v.2.webp"], ["a/1.5", "a/v.2"]),
        (["a/gray.png", "a/gray.jpg"], ["a/gray.png", "a/gray.jpg"]),
        (["a/gray.png", "b/gray.jpg"], ["a/gray", "b/gray"]),
    ],
)
def test_masks_are_called_as_their_images_without_the_suffix(places: list[str], expected: list[str]) -> None:
    """Unless two would then have one name."""
    assert mask_places([*map(Path, places)]) == [*map(Path, expected)]


def test_boxes_score_against_the_annotations_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the two lines of docs/start.md, which map the images' names to ids."""
    coco = pytest.importorskip("pycocotools.coco", reason="the extra [detection] is not installed")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    file, directory, output = tmp_path / "boxes.hdf5", tmp_path / "run", tmp_path / "found.json"
    source = coco_folder(tmp_path / "coco")
    assert make(STREET, file, "--source", source) == 0
    words = [f"--data_path={file}", f"--run_dir={directory}", "--model.arch=tiny_boxes", *OF_PLACES]
    with sparingly(False):
        assert (
            run(detect, [*words, "--model.groups=2", "--data.val_share=0", "--federated.cohort_size=1"]) == 0
        )
    capsys.readouterr()
    assert run(main, [str(directory), "--split=test", f"--output={output}"]) == 0
    assert "category_id: as in the annotations that the data file was made from\n" in capsys.readouterr().out
    truth, found = source / "annotations" / "instances_test.json", json.loads(output.read_text())
    assert {entry["category_id"]: entry["category"] for entry in found}.items() <= CATEGORIES.items()
    right = [entry["bbox"][0] + entry["bbox"][2] for entry in found]
    assert 16 < max(right) <= WIDTH, "in pixels of the photo, not of the run's images"
    ids = {Path(image["file_name"]).stem: image["id"] for image in json.loads(truth.read_text())["images"]}
    found = [{**box, "image_id": ids[box["image_id"]]} for box in found]
    whole = coco.COCO(str(truth))
    scorer = cocoeval.COCOeval(whole, whole.loadRes(found), "bbox")
    scorer.evaluate()
    scorer.accumulate()
    scorer.summarize()
    test = json.loads((directory / "results.json").read_text())["test"]
    assert 100 * scorer.stats[0] == pytest.approx(test["mAP"], abs=0.05)  # boxes are rounded to 0.01
    assert (
        run(main, [str(directory), f"--images={source / 'images'}", f"--output={tmp_path / 'i.json'}"]) == 0
    )
    assert "category_id: as in the annotations" in capsys.readouterr().out
    found = json.loads((tmp_path / "i.json").read_text())
    assert {entry["category_id"]: entry["category"] for entry in found}.items() <= CATEGORIES.items()
    check_that_python_detects_the_same(directory, source, found)


def check_that_python_detects_the_same(directory: Path, source: Path, listed: list[dict[str, Any]]) -> None:
    """A photo's boxes as torchvision's detectors give them, from its file or its pixels, as of a video."""
    model, paths = trained(directory), sorted((source / "images").iterdir())
    pixels = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    assert pixels[0].shape == (HEIGHT, WIDTH, 3)
    for images in (paths, pixels):
        for path, found in zip(paths, model.detect(images), strict=True):
            of_photo = [entry for entry in listed if entry["image_id"] == str(path)]
            assert [model.classes[label] for label in found["labels"]] == [e["category"] for e in of_photo]
            assert found["scores"].numpy() == pytest.approx([e["score"] for e in of_photo], abs=1e-5)
            boxes = found["boxes"]
            boxes[:, 2:] -= boxes[:, :2]
            assert boxes.numpy() == pytest.approx(np.array([e["bbox"] for e in of_photo]), abs=0.02)
    of_float: Any = np.zeros((HEIGHT, WIDTH, 3))
    with pytest.raises(ValueError, match="a path, or RGB pixels of numpy's type uint8 and shape"):
        model.detect([of_float])
