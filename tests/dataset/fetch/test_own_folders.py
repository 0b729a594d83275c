"""A folder of the user's own in VOC's or COCO's layout: its licence, and photos that nobody annotated."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataset.camvid.download_preprocess import CAMVID
from dataset.coco.download_preprocess import COCO_2017
from dataset.preprocess_annotated import AnnotatedSet
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from dataset.street.download_preprocess import STREET
from dataset.voc.download_preprocess import SUBSETS
from dataset.yolo.download_preprocess import FOLDER
from tests.dataset.fetch.made_layouts import (
    LAYOUTS,
    TRAIN,
    VAL,
    coco_folder,
    coco_json,
    make,
    voc_files,
    without_root,
    write_files,
    write_images,
)
from tests.dataset.fetch.test_annotated import owned, with_users


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """In COCO's layout, with three categories."""
    folder = coco_folder(tmp_path / "photos", coco_json(TRAIN))
    write_images(folder)
    return folder


def licence(path: Path) -> str:
    with DataFile(path) as file:
        return str(file.provenance["licence"])


@pytest.mark.parametrize("spec", [STREET, COCO_2017])
def test_a_folders_licence_is_its_own_or_as_given(spec: AnnotatedSet, photos: Path, tmp_path: Path) -> None:
    assert make(spec, tmp_path / "a.hdf5", "--source", photos) == 0
    assert licence(tmp_path / "a.hdf5") == "the folder's own"
    assert make(spec, tmp_path / "b.hdf5", "--source", photos, "--licence=CC0 1.0") == 0
    assert licence(tmp_path / "b.hdf5") == "CC0 1.0"


def test_the_command_that_trains_on_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all users in each round, and a val; without users, clients are drawn. Nothing trains without
    test."""
    files = without_root(voc_files("2012", {"train": TRAIN, "val": VAL}))
    folder, spec, output = write_files(tmp_path / "in", files), LAYOUTS["voc2012"][0], tmp_path / "f.hdf5"
    names = sorted(Path(name).stem for name in files if name.endswith(".jpg"))
    rows = [f"{name},{'ab'[number % 2]}" for number, name in enumerate(names)]
    (tmp_path / "users.csv").write_text("\n".join(["image_id,user", *rows]))
    drawn = "--data.partition iid-clients-10-seed-0 --federated.cohort_size 10"
    for words, more in (
        (["--annotation=mask"], f' ARGS="{drawn} --data.val_share 0.1"'),
        (
            [f"--users_csv={tmp_path / 'users.csv'}", "--annotation=boxes"],
            ' ARGS="--federated.cohort_size 2"',
        ),
    ):
        form = words[-1].rpartition("=")[2]
        assert make(spec, output, f"--source={folder}", *words, "--val_as=test", "--overwrite") == 0
        line = capsys.readouterr().err.splitlines()[-1]
        task = "segmentation" if form == "mask" else "detection"
        assert line == f"train on it: make fedcv-fl TASK={task} DATA={output}{more}"
    assert make(spec, output, f"--source={folder}", "--overwrite") == 0
    said = capsys.readouterr().err
    assert "train on it" not in said
    assert said.splitlines()[-1].startswith("training needs images of test: --val_as test --overwrite makes")
    lists = folder / "ImageSets" / "Main"
    (folder / "users.csv").write_text("\n".join(["image_id,user", *(f"{name},{name}" for name in names)]))
    (lists / "test.txt").write_text((lists / "train.txt").read_text().splitlines()[0])
    (lists / "train.txt").write_text("\n".join((lists / "train.txt").read_text().splitlines()[1:]))
    assert make(spec, output, f"--source={folder}", "--annotation=boxes", "--overwrite") == 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f' ARGS="--federated.cohort_size {len(TRAIN) - 1} --data.val_share 0"')


@pytest.mark.parametrize("spec", [CAMVID, STREET, COCO_2017, SUBSETS["2007"], SUBSETS["2012"]])
def test_a_data_set_is_known_by_its_classes(spec: AnnotatedSet) -> None:
    classes = sorted(spec.classes)
    assert len(classes) == {"camvid": 11, "street": 7, "coco": 80, "voc": 20}[spec.name]
    assert spec.licence_of(classes) == spec.licence_of(["background", *classes]) == spec.licence
    assert spec.licence_of(classes[1:]) == spec.licence_of([*classes, "hedgehog"]) == FOLDER.licence


@pytest.mark.parametrize(
    "form, place", [("mask", "SegmentationClass/{}.png"), ("boxes", "Annotations/{}.xml")]
)
def test_photos_without_an_annotation_are_left_out_if_asked(
    form: str, place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = without_root(voc_files("2012", {"train": TRAIN, "val": VAL}))
    del files[place.format("000007")]
    folder, spec = write_files(tmp_path / "in", files), LAYOUTS["voc2012"][0]
    words = [f"--source={folder}", f"--annotation={form}"]
    for more in ((), ("--on_bad_image=skip-missing",)):
        assert make(spec, tmp_path / "f.hdf5", *words, *more) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"image 000007 of train has no annotation in {place.format('*')}" in line
        assert "leave such images out with --on_bad_image skip" in line
    assert make(spec, tmp_path / "f.hdf5", *words, "--on_bad_image=skip") == 0
    validate(tmp_path / "f.hdf5")
    with DataFile(tmp_path / "f.hdf5") as file:
        assert "000007" not in file.split("train").image_ids
        assert "000009" in file.split("train").image_ids
        (skipped,) = file.provenance["skipped_images"]
    assert (skipped["image_id"], skipped["reason"]) == ("000007", "it has no annotation")


def test_a_csv_of_users_may_list_images_by_file_name_with_its_suffix(tmp_path: Path) -> None:
    text = "image_id,user_id\n000000000001.jpg,a\n000000000002.JPG,b\nother.png,c\n"
    folder, out = with_users(tmp_path, text), tmp_path / "f.hdf5"
    assert make(STREET, out, f"--source={folder}") == 0
    assert owned(out) == {1: "a", 2: "b", 3: "no-author", 7: "no-author", 9: "no-author"}
