"""Predictions of finished runs: the scores that follow from them are the run's own; what is refused."""

from __future__ import annotations

import csv
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.metrics import average_precision_score

from benchmarks.core.experiment import data_of
from benchmarks.fedcv.detection.train import main as detect
from benchmarks.fedcv.segmentation.train import main as segment
from benchmarks.predict import trained
from benchmarks.predict.__main__ import main
from benchmarks.predict.trained import read_image
from benchmarks.predict.writing import check_table
from benchmarks.visual_classification.train import main as classify
from dataset.cli import run
from dataset.convert.__main__ import main as convert
from dataset.flair.mini import write_mini
from dataset.flair.mini_outlines import write_boxed, write_masked
from dataset.journal import only_writer
from dataset.store.box_view import BoxView
from dataset.store.hdf5 import DataFile
from dataset.store.mask_view import MaskView
from dataset.store.views import LabelSetView
from pfl_ext.models.classifier import probe_checksum
from pfl_ext.models.small import NETWORKS
from pfl_ext.tasks.detection_scores import CLASS, NO_BOX
from tests.benchmarks.conftest import TINY, train_into
from tests.benchmarks.fedcv.test_segmentation import Tiny as TinySegmenter
from tests.benchmarks.predict.kept_photos import check_that_masks_replace_nothing
from tests.benchmarks.run_files import results
from tests.benchmarks.sparing import sparingly
from tests.pfl_ext.tiny_detector import Tiny as TinyDetector

COMMON = (
    "--data.image_size=16",
    "--model.input_size=16",
    "--local.batch_size=4",
    "--federated.num_rounds=1",
    "--federated.cohort_size=3",
    "--runtime.progress=false",
)
OF_PLACES = (*COMMON, "--model.normalisation=half", "--model.pretrained=false", "--evaluation.best_by=last")
LITE0 = "--config=fl-f-17 --model.arch=efficientnet_lite0 --model.normalisation=efficientnet_lite"
SPEC = replace(TINY, image_size=16, train_users=8, val_users=3, test_users=3, coarse_labels=2)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    NETWORKS.names()
    monkeypatch.setitem(NETWORKS._things, "tiny_masks", TinySegmenter())
    monkeypatch.setitem(NETWORKS._things, "tiny_boxes", TinyDetector())


@pytest.fixture(scope="module")
def labelled(mini_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with any number of labels an image."""
    return train_into(tmp_path_factory.mktemp("run") / "run", mini_file)


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def numbers(rows: Sequence[dict[str, str]], names: Sequence[str]) -> np.ndarray:
    return np.array([[float(row[name]) for name in names] for row in rows])


def test_labels_score_as_the_run_did(labelled: Path, tmp_path: Path) -> None:
    assert run(main, [str(labelled), "--output", str(tmp_path / "p.csv")]) == 0
    rows, names = rows_of(tmp_path / "p.csv"), results(labelled)["classes"]
    assert list(rows[0]) == ["user", "image", "truth", "predicted", *names]
    found = numbers(rows, names)
    truth = np.array([[name in row["truth"].split(";") for name in names] for row in rows])
    micro = 100 * average_precision_score(truth.ravel(), found.ravel())
    assert micro == pytest.approx(results(labelled)["test"]["O-AP"], abs=1e-6)
    likely = [";".join(name for name, p in zip(names, row) if p >= 0.5) for row in found.tolist()]
    assert [row["predicted"] for row in rows] == likely
    with DataFile(results(labelled)["dataset"]) as file:
        index = file.split("test")
        assert [row["image"] for row in rows] == list(index.image_ids)
        assert [row["user"] for row in rows] == [index.user_ids[user] for user in index.user_index]


def test_image_files_are_read_as_the_run_read_its_images(labelled: Path, tmp_path: Path) -> None:
    """PNG keeps every pixel, so that a file's probabilities are those of the image in the data file."""
    with DataFile(results(labelled)["dataset"]) as file:
        images, _ = LabelSetView(file, image_size=TINY.image_size).split("val").read(np.arange(3))
    (tmp_path / "photos" / "below").mkdir(parents=True)
    for name, image in zip(("a.png", "below/b.png", "below/c.PNG"), images, strict=True):
        Image.fromarray(image).save(tmp_path / "photos" / name)
    (tmp_path / "photos" / "notes.txt").write_text("no image")
    (tmp_path / "photos" / "._a.png").write_text("macOS's own")
    (tmp_path / "photos" / "folder.png").mkdir()
    words = [str(labelled), "--images", str(tmp_path / "photos"), "--output", str(tmp_path / "files.csv")]
    assert run(main, words) == 0
    assert run(main, [str(labelled), "--split=val", "--output", str(tmp_path / "split.csv")]) == 0
    names = results(labelled)["classes"]
    of_files, of_split = rows_of(tmp_path / "files.csv"), rows_of(tmp_path / "split.csv")[:3]
    assert [Path(row["image"]).name for row in of_files] == ["a.png", "b.png", "c.PNG"]
    assert list(of_files[0]) == ["image", "predicted", *names]
    np.testing.assert_allclose(numbers(of_files, names), numbers(of_split, names), rtol=1e-5)


def test_jpegs_are_decoded_as_those_of_a_data_file(tmp_path: Path) -> None:
    """Large ones at a fraction of their size, which moves pixels."""
    rng, files = np.random.default_rng(0), []
    for number, size in enumerate([(64, 64), (70, 200), (300, 130)]):
        files.append(tmp_path / "photos" / "train" / "ann" / "cat" / f"{number}.jpg")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (*size[::-1], 3), np.uint8)
        Image.fromarray(pixels).resize(size).save(files[-1], quality=90)
    words = ["folder", "--images", str(tmp_path / "photos"), "--output_file", str(tmp_path / "d.hdf5")]
    assert run(convert, words) == 0
    with DataFile(tmp_path / "d.hdf5") as file:
        stored = file.read_images("train", np.arange(3), 16)
        ids = file.split("train").image_ids
    for image, name in zip(stored, ids, strict=True):
        (path,) = [file for file in files if file.stem == Path(name).stem]
        found, size = read_image(path, 16)
        assert np.array_equal(found, image)
        with Image.open(path) as opened:
            assert size == opened.size[::-1]


def test_a_class_an_image_and_the_scale_of_the_data(tmp_path: Path) -> None:
    """The data's own mean and deviation come from the run, not from a file."""
    file, directory = tmp_path / "classes.hdf5", tmp_path / "run"
    write_mini(file, replace(SPEC, coarse_labels=1))
    words = ["--config=cifar10-fedavgm", f"--data_path={file}", f"--run_dir={directory}", *COMMON]
    with sparingly(False):
        assert run(classify, [*words, "--data.partition=none", "--model.normalisation=data"]) == 0
    kept = file.rename(tmp_path / "elsewhere.hdf5")
    assert run(main, [str(directory), "--data_path", str(kept), "--output", str(tmp_path / "p.csv")]) == 0
    rows, names = rows_of(tmp_path / "p.csv"), results(directory)["classes"]
    right = [row["predicted"] == row["truth"] for row in rows]
    assert 100 * np.mean(right) == pytest.approx(results(directory)["test"]["accuracy"])
    found = numbers(rows, names)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    assert [names[number] for number in found.argmax(1)] == [row["predicted"] for row in rows]
    words = [str(directory), f"--data_path={kept}", "--split=val", "--output", str(tmp_path / "val.csv")]
    assert run(main, words) == 0
    with DataFile(kept) as data:  # although the run followed test
        split = data.split("val")
        ids = {split.image_ids[row] for row in range(split.num_images)}
    assert {row["image"] for row in rows_of(tmp_path / "val.csv")} == ids


NETWORKS_WORDS = {
    "lora": "--model.trained=lora",
    "lora_b": f"--model.trained=lora --model.lora_trained=b {LITE0} --model.pretrained=true",
    "names": "--model.trained=names --model.trained_names=*.weight",
    "bottleneck": "--model.trained=two_layers --model.bottleneck=8",
}


@pytest.mark.parametrize("words", NETWORKS_WORDS.values(), ids=NETWORKS_WORDS)
def test_the_network_is_the_runs(words: str, tmp_path: Path, mini_file: Path) -> None:
    directory = train_into(tmp_path / "run", mini_file, "--federated.num_rounds=1", *words.split())
    model = trained(directory)
    assert probe_checksum(model.network) == results(directory)["model_probe"]
    assert not model.network.training


def test_masks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, directory, output = tmp_path / "masks.hdf5", tmp_path / "run", tmp_path / "predicted"
    write_masked(file, SPEC)
    words = [f"--data_path={file}", f"--run_dir={directory}", "--model.arch=tiny_masks", *OF_PLACES]
    with sparingly(False):
        assert run(segment, words) == 0
    assert run(main, [str(directory), "--output", str(output)]) == 0
    with DataFile(file) as data:
        store = MaskView(data, image_size=16).split("test")
        masks, index = store.targets(np.arange(store.num_images)), data.split("test")
        ids = list(index.image_ids)
        users = [index.user_ids[user] for user in index.user_index]
    found = []
    for user, name in zip(users, ids, strict=True):
        with Image.open(output / user / f"{name}.png") as picture:
            found.append(np.asarray(picture))
    known = masks != 255
    accuracy = 100 * (np.stack(found) == masks)[known].mean()
    assert accuracy == pytest.approx(results(directory)["test"]["pixel accuracy"], abs=1e-6)
    (tmp_path / "photos" / "a").mkdir(parents=True)
    Image.new("RGB", (40, 24), "red").save(tmp_path / "photos" / "a" / "wide.jpg")
    assert run(main, [str(directory), "--images", str(tmp_path / "photos"), "--output", str(output)]) == 0
    with Image.open(output / "a" / "wide.png") as mask:
        assert mask.size == (40, 24), "as large as its photo"
    folders = [str(tmp_path / "photos" / "a"), str(tmp_path / "photos" / "b")]
    shutil.copytree(folders[0], folders[1])
    assert run(main, [str(directory), "--images", *folders, "--output", str(output)]) == 2
    assert "would be written to the same mask, wide.png: give each its own" in capsys.readouterr().err
    check_that_masks_replace_nothing(directory, tmp_path / "photos" / "a", capsys)


def test_boxes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """COCO's own scorer finds in the list what the run scored, in pixels of the images."""
    coco = pytest.importorskip("pycocotools.coco", reason="the extra [detection] is not installed")
    cocoeval = pytest.importorskip("pycocotools.cocoeval")
    file, directory, output = tmp_path / "boxes.hdf5", tmp_path / "run", tmp_path / "found.json"
    write_boxed(file, SPEC)
    words = [f"--data_path={file}", f"--run_dir={directory}", "--model.arch=tiny_boxes", *OF_PLACES]
    with sparingly(False):
        assert run(detect, [*words, "--model.groups=2", "--data.val_share=0", "--data.scored=test"]) == 0
    val = [str(directory), "--split=val", "--output", str(tmp_path / "val.json")]
    assert run(main, val) == 0
    assert run(main, [str(directory), "--output", str(output)]) == 0
    assert "category_id: from 1 on, in the order of the classes" in capsys.readouterr().out
    names = results(directory)["classes"]
    with DataFile(file) as data:
        in_val = {entry["image_id"] for entry in json.loads((tmp_path / "val.json").read_text())}
        assert in_val
        assert in_val <= set(data.split("val").image_ids), "although the run followed test"
        store, ids = BoxView(data, image_size=16).split("test"), list(data.split("test").image_ids)
        boxes = store.targets(np.arange(store.num_images))
    truth: dict[str, list[Any]] = {
        "images": [{"id": number} for number in range(len(ids))],
        "categories": [{"id": number + 1, "name": name} for number, name in enumerate(names)],
        "annotations": [],
    }
    for number, rows in enumerate(boxes):
        for left, top, right, bottom, label, _ in rows[rows[:, CLASS] != NO_BOX].tolist():
            width, height = right - left, bottom - top
            truth["annotations"].append(
                {
                    "id": len(truth["annotations"]) + 1,
                    "image_id": number,
                    "category_id": int(label) + 1,
                    "bbox": [left, top, width, height],
                    "area": width * height,
                    "iscrowd": 0,
                }
            )
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    found = json.loads(output.read_text())
    assert all(entry["category"] == names[entry["category_id"] - 1] for entry in found)
    for entry in found:
        entry["image_id"] = ids.index(entry["image_id"])
    whole = coco.COCO(str(tmp_path / "truth.json"))
    scorer = cocoeval.COCOeval(whole, whole.loadRes(found), "bbox")
    scorer.evaluate()
    scorer.accumulate()
    scorer.summarize()
    assert 100 * scorer.stats[0] == pytest.approx(results(directory)["test"]["mAP"], abs=1e-3)


def test_a_run_of_an_earlier_version(labelled: Path, tmp_path: Path) -> None:
    """Before the key ``classes``, AP by class named them in the same order."""
    older = tmp_path / "older"
    older.mkdir()
    for name in ("config.yaml", "model.safetensors"):
        (older / name).write_bytes((labelled / name).read_bytes())
    found = {key: value for key, value in results(labelled).items() if key != "classes"}
    (older / "results.json").write_text(json.dumps(found))
    assert trained(older).classes == trained(labelled).classes == tuple(results(labelled)["classes"])
    (older / "results.json").write_text(json.dumps(found | {"classes": 5}))
    with pytest.raises(ValueError, match=r"results\.json does not name the classes"):
        trained(older)


def test_image_files_need_no_data_of_the_run(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent, photo, output = tmp_path / "silent", tmp_path / "photo.png", tmp_path / "p.csv"
    shutil.copytree(labelled, silent)
    found = {key: value for key, value in results(labelled).items() if key != "dataset"}
    (silent / "results.json").write_text(json.dumps(found))
    Image.new("RGB", (8, 8)).save(photo)
    assert run(main, [str(silent), f"--images={photo}", f"--output={output}"]) == 0
    capsys.readouterr()
    assert run(main, [str(silent), f"--output={output}", "--overwrite"]) == 2
    line = f"error: {silent} does not say where its data lies: give --data_path\n"
    assert capsys.readouterr().err == line


def test_a_relative_data_file_is_found_from_elsewhere(
    labelled: Path, mini_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the run's folder, if it has the data of the run."""
    copy, file = tmp_path / "mine" / "runs" / "a", tmp_path / "mine" / "data" / "f.hdf5"
    shutil.copytree(labelled, copy)
    (copy / "results.json").write_text(json.dumps(results(labelled) | {"dataset": "data/f.hdf5"}))
    file.parent.mkdir()
    (tmp_path / "else").mkdir()
    monkeypatch.chdir(tmp_path / "else")
    write_mini(file, SPEC)
    assert data_of(copy) == Path("data/f.hdf5")
    shutil.copy(mini_file, file)
    assert data_of(copy) == file
    assert run(main, ["../mine/runs/a", "--output=p.csv"]) == 0


def test_what_is_refused(
    labelled: Path, mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--output", str(tmp_path / "p.csv")]
    text, photo = tmp_path / "photo.jpg", tmp_path / "photo.png"
    Image.new("RGB", (8, 8)).save(photo)
    (tmp_path / "there.csv").write_text("")
    text.write_text("no photo")
    (tmp_path / "empty").mkdir()
    killed = tmp_path / "killed"
    killed.mkdir()
    (killed / "config.yaml").write_bytes((labelled / "config.yaml").read_bytes())
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("config.yaml", "results.json"):
        (changed / name).write_bytes((labelled / name).read_bytes())
    tensors = {name: tensor + 1 for name, tensor in load_file(labelled / "model.safetensors").items()}
    save_file(tensors, changed / "model.safetensors")
    renamed = tmp_path / "renamed"
    shutil.copytree(labelled, renamed)
    of_others = {"classes": [f"my {name}" for name in results(labelled)["classes"]]}
    (renamed / "results.json").write_text(json.dumps(results(labelled) | of_others))
    unclear, odd = tmp_path / "unclear", tmp_path / os.fsdecode(b"photo\xe9.png")
    shutil.copytree(labelled, unclear)
    joined = {"classes": [f"{name};x" for name in results(labelled)["classes"]]}
    (unclear / "results.json").write_text(json.dumps(results(labelled) | joined))
    shutil.copy(photo, odd)
    for words, reason in (
        ([str(tmp_path / "none")], "is not a folder"),
        ([str(killed)], "killed: the run has not finished; give its training command again to continue it"),
        ([str(changed)], "model.safetensors is not the model of results.json"),
        ([str(labelled), "--split=test", "--images", str(text)], "--images is for image files"),
        (
            [str(labelled), "--images", str(text)],
            f"{text} cannot be used: it is not a JPEG (no start marker)",
        ),
        ([str(labelled), "--images", str(tmp_path / "empty")], "holds no image: none of .bmp, .gif"),
        ([str(labelled), "--images", str(tmp_path / "x.jpg")], "cannot be read: No such file"),
        ([str(renamed)], "has other classes than the data of"),
        ([str(labelled), "--images", str(photo), str(odd)], "photo\\udce9.png' is not UTF-8, as tables"),
        ([str(unclear), "--images", str(photo)], ";x' has a ;, which separates labels in a table: use"),
        ([str(labelled), "--images", str(photo), f"--output={photo}"], "is read by this command: give"),
        ([str(labelled), f"--output={labelled / 'results.json'}"], "is read by this command: give another"),
        ([str(labelled), f"--output={labelled / 'checkpoint' / 'data.json'}"], "is read by this command"),
        ([str(labelled), f"--output={tmp_path / 'there.csv'}"], "already exists; add --overwrite to"),
        ([str(labelled), "--threads=0"], "--threads is 0"),
        ([str(labelled), "--split=dev"], "invalid choice: 'dev'"),
    ):
        assert run(main, [*output, *words]) == 2
        line = capsys.readouterr().err
        assert reason in line
        assert line.count("\n") == 1
    assert not (tmp_path / "p.csv").exists()


def test_a_semicolon_in_a_class_is_clear_where_an_image_has_one_class() -> None:
    check_table([], ["a;b", "c"], exclusive=True)


def test_a_file_that_appears_while_predicting_is_not_replaced(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "p.csv"
    words = [str(labelled), f"--output={output}"]
    with only_writer(output):
        assert run(main, [*words, "--overwrite"]) == 2
    line = capsys.readouterr().err
    assert (
        line
        == f"error: another process is writing {output}: wait until it ends, or choose another --output\n"
    )
    monkeypatch.setattr("benchmarks.predict.__main__._write", lambda *_: output.write_text("another's"))
    assert run(main, words) == 2
    assert "p.csv already exists; add --overwrite to replace it" in capsys.readouterr().err
    assert output.read_text() == "another's"
    assert list(tmp_path.iterdir()) == [output]
    assert run(main, [*words, "--overwrite"]) == 0
    assert output.read_text().startswith("user,")


def test_a_data_file_that_has_changed_is_used_only_if_it_is_named(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed, output = tmp_path / "changed", tmp_path / "p.csv"
    shutil.copytree(labelled, changed)
    (changed / "results.json").write_text(json.dumps(results(labelled) | {"data_sha256": "a" * 64}))
    capsys.readouterr()
    assert run(main, [str(changed), f"--output={output}"]) == 2
    data = results(labelled)["dataset"]
    assert capsys.readouterr().err.startswith(
        f"error: {data} has other data now than {changed} learnt from: "
    )
    assert run(main, [str(changed), f"--data_path={data}", f"--output={output}"]) == 0
