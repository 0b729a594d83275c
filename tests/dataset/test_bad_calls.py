"""Bad calls of every command line of dataset/: exit code 2, one line that names what is wrong, nothing left.

Each row is refused before the network is asked and before anything is written, so that nothing hinders the
corrected command, which is run at the end.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dataset.browse import __main__ as browse
from dataset.cifar10 import download_preprocess as cifar10
from dataset.cifar100 import download_preprocess as cifar100
from dataset.cli import run
from dataset.coco import download_preprocess as coco
from dataset.convert import __main__ as convert
from dataset.flair import download_preprocess, mini
from dataset.inaturalist import download_preprocess as inaturalist
from dataset.journal import only_downloader
from dataset.landmarks import download_preprocess as landmarks
from dataset.partitions import __main__ as partitions
from dataset.store import probe, validate
from dataset.street import download_preprocess as street
from dataset.voc import download_preprocess as voc
from dataset.yolo import download_preprocess as yolo
from tests.bad_calls import check_refused
from tests.dataset.cifar10.made_cifar import CIFAR10
from tests.dataset.cifar10.made_cifar import write_parquet as write_cifar
from tests.dataset.drawn import records, write_parquet
from tests.dataset.store.test_hdf5 import write

MAIN: dict[str, Callable[[Sequence[str]], None]] = {
    "hdf5": validate.main,
    "partitions": partitions.main,
    "mini": mini.main,
    "flair": download_preprocess.main,
    "cifar10": cifar10.main,
    "cifar100": cifar100.main,
    "inaturalist": inaturalist.main,
    "landmarks": landmarks.main,
    "voc": voc.main,
    "coco": coco.main,
    "street": street.main,
    "yolo": yolo.main,
    "browse": browse.main,
    "convert": convert.main,
}
OUT = "--output_file=out.hdf5"
FLAIR = f"{OUT} --source=flair"
CIFAR = f"{OUT} --source=cifar --splits=none"
FEW = f"{OUT} --train_users=2 --val_users=1 --test_users=1"

BAD = [
    ("browse", "", "required: file"),
    ("browse", "nowhere", "there is no file nowhere; make it with python -m"),
    ("browse", "text", "text is not an HDF5 file"),
    ("browse", "cut.hdf5", "cut.hdf5 is truncated"),
    ("browse", "good.hdf5 --split=tset", "good.hdf5 has no split 'tset'; it has train"),
    ("browse", "good.hdf5 --users=0", "--users is 0: give a number from 1 to 200"),
    ("browse", "good.hdf5 --images=x", "--images: invalid int value: 'x'"),
    ("browse", "good.hdf5 --side=9999", "--side is 9999: give a number from 32 to 512"),
    ("browse", "good.hdf5 --max_mb=-1", "--max_mb is -1: give a number from 1 to 64"),
    ("browse", "good.hdf5 --seed=-1", "--seed is -1: give a whole number of at least 0"),
    ("browse", "good.hdf5 --partition=mine", "--partition mine: the split train of good.hdf5 has no such"),
    ("browse", "good.hdf5 --output=folder", "--output folder is a folder; give the name of a file"),
    ("browse", "good.hdf5 --output=text/p.html", "text is a file, not a folder"),
    ("browse", "good.hdf5 --output=", "--output is empty: give a value, or leave it out"),
    ("convert", "", "required: FORMAT"),
    ("convert", f"folder {OUT} --images=nowhere", "--images nowhere is not a folder"),
    ("convert", f"leaf {OUT} --source=folder", "--source folder has no *.json files, and its folders"),
    ("convert", f"tff {OUT} --source=cut.hdf5", "cut.hdf5 is truncated"),
    ("convert", f"hf {OUT} --source=notparquet --client_column=user_id", "cannot be read as parquet"),
    ("hdf5", "", "required: file"),
    ("hdf5", "nowhere", "there is no file nowhere; make it with python -m"),
    ("hdf5", "folder", "no file folder"),
    ("hdf5", "text/below", "no file text/below"),
    ("hdf5", "text", "text is not an HDF5 file"),
    ("hdf5", "empty", "empty is not an HDF5 file"),
    ("hdf5", "cut.hdf5", "cut.hdf5 is truncated"),
    ("hdf5", "good.hdf5 another", "unrecognized arguments: another"),
    ("hdf5", "good.hdf5 --fast", "unrecognized arguments: --fast"),
    ("partitions", "", "required: file"),
    ("partitions", "nowhere", "no file nowhere"),
    ("partitions", "folder", "no file folder"),
    ("partitions", "text", "text is not an HDF5 file"),
    ("partitions", "cut.hdf5", "cut.hdf5 is truncated"),
    ("partitions", "good.hdf5 --taxonomy=colours", "has no annotation 'colours'; it has"),
    ("partitions", "good.hdf5 --output_dir=text", "--output_dir text: text is a file, not a folder"),
    ("partitions", "good.hdf5 --output_dir=text/below", "--output_dir text/below: text is a file"),
    ("partitions", "good.hdf5 --output_dir=/proc/below", "--output_dir /proc/below cannot be written"),
    ("partitions", "good.hdf5 --output_dir=", "--output_dir is empty"),
    ("mini", "", "required: --output_file"),
    ("mini", f"{OUT} --train_users=0", "train_users is 0; give 1 to"),
    ("mini", f"{OUT} --train_users=-3", "train_users is -3"),
    ("mini", f"{OUT} --train_users=many", "--train_users: invalid int value: 'many'"),
    ("mini", f"{OUT} --train_users=99999999999", "train_users is 99999999999; give 1 to"),
    ("mini", f"{FEW} --image_size=4", "image_size is 4; give 8 to"),
    ("mini", f"{FEW} --image_size=1000000", "image_size is 1000000; give 8 to"),
    ("mini", f"{FEW} --seed=-1", "seed is -1"),
    ("mini", f"{FEW} --difficulty=nan", "difficulty is nan"),
    ("mini", f"{FEW} --size_factor=-1", "size_factor is -1"),
    ("mini", f"{FEW} --size_factor=inf", "size_factor is inf"),
    ("mini", f"{FEW} --num_fine_labels=3", "num_fine_labels is 3"),
    ("mini", f"{FEW} --coarse_labels=99", "coarse_labels is 99"),
    ("mini", f"{FEW} --max_user_images=0", "max_user_images is 0"),
    ("mini", f"{FEW} --storage=png", "--storage: invalid choice: 'png'"),
    ("mini", f"{FEW} --colour=red", "unrecognized arguments: --colour=red"),
    ("mini", f"{FEW} --output_file=folder", "--output_file folder is a folder"),
    ("mini", f"{FEW} --output_file=text/out", "--output_file text/out: text is a file"),
    ("mini", f"{FEW} --output_file=/proc/out", "--output_file /proc/out cannot be written"),
    ("mini", f"{FEW} --output_file=", "--output_file is empty"),
    ("flair", "", "required: --output_file"),
    ("flair", f"{OUT} --source=nowhere", "--source nowhere is not a folder: give hf, apple or a folder"),
    ("flair", f"{OUT} --source=text", "--source text is not a folder: give hf, apple or a folder"),
    ("flair", f"{OUT} --source=folder", "--source folder has neither *.parquet files nor"),
    ("flair", f"{OUT} --source=", "--source is empty"),
    ("flair", f"{OUT} --source=notparquet", "cannot be read as parquet"),
    ("flair", f"{FLAIR} --storage=png", "--storage: invalid choice: 'png'"),
    (
        "flair",
        f"{FLAIR} --image_size=owm",
        "argument --image_size: it is 'owm': give a side in pixels, or the word own",
    ),
    ("flair", f"{FLAIR} --image_size=0", "--image_size must be at least 1"),
    ("flair", f"{FLAIR} --image_size=1000000 --storage=raw", "GB for out.hdf5 are needed"),
    ("flair", f"{FLAIR} --image_size=64", "--image_size needs --storage raw: add --storage raw, or leave"),
    ("flair", f"{FLAIR} --image_size=own", "--image_size needs --storage raw"),
    ("flair", f"{FLAIR} --workers=-1", "--workers must be at least 1"),
    ("flair", f"{FLAIR} --workers=two", "--workers: invalid int value: 'two'"),
    ("flair", f"{FLAIR} --label_mapping=nowhere", "--label_mapping nowhere cannot be read"),
    ("flair", f"{FLAIR} --label_mapping=folder", "--label_mapping folder is a folder"),
    ("flair", f"{FLAIR} --label_mapping=text", "--label_mapping text is not valid JSON"),
    ("flair", f"{FLAIR} --label_mapping=wrong.json", "labels must be a list of names or an object"),
    ("flair", f"{FLAIR} --label_mapping=cut.hdf5", "--label_mapping cut.hdf5 is not valid JSON"),
    ("flair", f"{FLAIR} --jpeg_quality=0", "--jpeg_quality is 0"),
    ("flair", f"{FLAIR} --background=red", "--background: invalid choice: 'red'"),
    ("flair", f"{FLAIR} --verify=some", "--verify: invalid choice: 'some'"),
    ("flair", f"{FLAIR} --revision=abc", "--revision can be used only with --source hf: leave it out"),
    ("flair", f"{FLAIR} --download_folder=down", "--download_folder can be used only with --source hf or"),
    ("flair", f"{OUT} --source=hf --download_folder=text", "--download_folder text: text is a file"),
    ("flair", f"{FLAIR} extra", "unrecognized arguments: extra"),
    ("flair", "--output_file=folder --source=flair", "--output_file folder is a folder"),
    ("flair", "--output_file=good.hdf5 --source=flair", "good.hdf5 already exists; add --overwrite to"),
    ("flair", "--output_file=text/out --source=flair", "--output_file text/out: text is a file"),
    ("flair", "--output_file=/proc/out --source=flair", "--output_file /proc/out cannot be written"),
    ("flair", f"--output_file={'a' * 250} --source=flair", "the file name has more than 200 bytes; give a"),
    ("voc", f"{OUT} --source=text", "--source text is neither an existing folder nor an address"),
    ("voc", f"{OUT} --source=folder", "folder does not say which images are for training: add"),
    ("voc", f"{OUT} --source=folder --subset=2010", "--subset: invalid choice: '2010'"),
    ("voc", f"{OUT} --source=folder --first_pixel=2", "--first_pixel: invalid choice: 2"),
    ("voc", f"{OUT} --source=folder --users_csv=folder", "--users_csv folder is a folder; give a file"),
    ("voc", f"{OUT} --source=folder --users_csv=cut.hdf5", "cut.hdf5 is not UTF-8 text"),
    ("coco", f"{OUT} --source=folder", "folder has none of the files annotations/instances_train*.json"),
    ("coco", f"{OUT} --source=folder --annotation=pixels", "--annotation: invalid choice: 'pixels'"),
    ("coco", f"{OUT} --source=folder --bad_boxes=keep", "--bad_boxes: invalid choice: 'keep'"),
    ("street", OUT, "required: --source"),
    ("street", f"{OUT} --source=http://127.0.0.1:9/", "is an address, but this data set cannot be"),
    ("yolo", f"{OUT} --source=folder", "folder has none of data.yaml, data.yml, classes.txt"),
    ("cifar10", "", "required: --output_file"),
    ("cifar10", f"{OUT} --source=nowhere", "--source nowhere is neither an existing folder nor an address"),
    (
        "cifar10",
        f"{OUT} --source=folder",
        "--source folder has neither *.parquet files nor cifar-10-binary.tar.gz",
    ),
    ("cifar10", f"{OUT} --source=flair", "it has no column 'img'"),
    ("cifar100", CIFAR, "it has no column 'fine_label'"),
    ("cifar10", f"{CIFAR} --seed=-1", "--seed is -1"),
    (
        "cifar10",
        f"{CIFAR} --partition=dirichlet-total=1 --seed={10**40}",
        "give a number from 0 to 9223372036",
    ),
    ("cifar10", f"{CIFAR} --seed=x", "--seed: invalid int value: 'x'"),
    ("cifar10", f"{CIFAR} --clients=0", "--clients is 0; give at least 1"),
    ("cifar10", f"{CIFAR} --images_per_client=-5", "--images_per_client is -5"),
    ("cifar10", f"{CIFAR} --dirichlet_total=-1", "--dirichlet_total is '-1'; give numbers of at least 0"),
    ("cifar10", f"{CIFAR} --dirichlet_total=inf", "--dirichlet_total is 'inf'"),
    ("cifar10", f"{CIFAR} --dirichlet_per_class=1,x", "--dirichlet_per_class is '1,x'"),
    ("cifar10", f"{CIFAR} --dirichlet_total=,", "--dirichlet_total is ',', which has only commas: leave it"),
    (
        "cifar10",
        f"{CIFAR} --partition=power=2",
        "--partition is 'power=2': give one or more of classes=NUMBER, ",
    ),
    (
        "cifar10",
        f"{CIFAR} --partition=dirichlet-total",
        "give numbers of at least 0, separated by commas, such as dir",
    ),
    ("cifar10", f"{CIFAR} --partition=dirichlet-total=", "separated by commas, such as dirichlet-total=1"),
    ("cifar10", f"{CIFAR} --partition=dirichlet-total=1=2", "is 'dirichlet-total=1=2'; give numbers"),
    (
        "cifar10",
        f"{CIFAR} --partition=dirichlet-total=-1",
        "is 'dirichlet-total=-1'; give numbers of at least 0",
    ),
    (
        "cifar10",
        f"{CIFAR} --partition=dirichlet-total=nan",
        "is 'dirichlet-total=nan'; give numbers of at least",
    ),
    (
        "cifar10",
        f"{CIFAR} --partition=dirichlet-total=inf",
        "is 'dirichlet-total=inf'; give numbers of at most 1e",
    ),
    ("cifar10", f"{CIFAR} --partition=dirichlet-total=1e101", "give numbers of at most 1e+100"),
    (
        "cifar10",
        f"{CIFAR} --partition=dirichlet-total=1,dirichlet=2",
        "give one or more of classes=NUMBER",
    ),
    ("cifar10", f"{CIFAR} --partition=0.3", "--partition is '0.3': give one or more of"),
    ("cifar10", f"{CIFAR} --partition=,", "--partition is ',', which has only commas: leave it out"),
    ("cifar10", f"{CIFAR} --partition=", "--partition is empty"),
    ("cifar10", f"{CIFAR} --partition=dirichlet-total=1 --clients=9999999", "are not enough for 9999999"),
    ("cifar10", f"{CIFAR} --seed=3", "--seed has an effect only when you ask for partitions to be drawn"),
    ("cifar10", f"{CIFAR} --clients=3", "--clients has an effect only when you ask for partitions to be"),
    ("cifar10", f"{CIFAR} --images_per_client=3", "--images_per_client has an effect only when you ask for"),
    ("cifar10", f"{CIFAR} --splits=nowhere", "--splits nowhere does not exist: give official, none, a"),
    ("cifar10", f"{CIFAR} --splits=folder", "--splits folder has no federated_train*.csv: give the folder"),
    ("cifar10", f"{CIFAR} --splits=text", "text is damaged"),
    ("cifar10", f"{CIFAR} --splits=", "--splits is empty"),
    ("cifar10", f"{CIFAR} --splits=http://here/", "files from http addresses cannot be trusted; give an"),
    ("cifar10", f"{CIFAR} --splits_sha256=abc", "--splits_sha256 is not a SHA-256 checksum: give 64"),
    ("cifar10", f"{CIFAR} --splits_sha256={'0' * 64}", "--splits_sha256 is the checksum of a download"),
    ("cifar10", f"{CIFAR} --output_file=text/out", "--output_file text/out: text is a file"),
    ("cifar10", f"{CIFAR} --download_folder=text", "--download_folder text: text is a file"),
    ("inaturalist", "", "required: --output_file"),
    ("inaturalist", f"{OUT} --source=nowhere", "--source nowhere is neither an existing folder nor an"),
    ("inaturalist", f"{OUT} --source=folder --splits=folder", "folder has 0 training CSV files"),
    ("inaturalist", f"{OUT} --source=folder --splits=text", "text is damaged"),
    ("inaturalist", f"{OUT} --source=folder --splits=nowhere", "--splits nowhere does not exist: give a"),
    ("inaturalist", f"{OUT} --source=folder --coordinates=nowhere", "--coordinates nowhere cannot be read"),
    ("inaturalist", f"{OUT} --source=folder --coordinates=folder", "--coordinates folder is a folder"),
    ("inaturalist", f"{OUT} --source=folder --coordinates=text", "text has no column 'image_id'"),
    ("inaturalist", f"{OUT} --source=folder --coordinates=places.csv --n_max=0", "--n_max is '0'"),
    (
        "inaturalist",
        f"{OUT} --source=folder --download_folder=text",
        "--download_folder text: text is a file",
    ),
    ("landmarks", f"{OUT} --source=folder --n_max=10", "--n_max can be used only with --coordinates: leave"),
    ("landmarks", f"{OUT} --subset=9k", "--subset: invalid choice: '9k'"),
    ("landmarks", f"{OUT} --source=folder --image_size=-2", "--image_size must be at least 1"),
    ("landmarks", "--output_file=folder", "--output_file folder is a folder"),
    ("landmarks", f"{OUT} --on_bad_image=forget", "--on_bad_image: invalid choice: 'forget'"),
]
"""Command, its arguments, and what the line says."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a sound file of each kind, and some that are not."""
    folder = tmp_path_factory.mktemp("calls")
    good = write(folder / "good.hdf5", "raw").read_bytes()
    (folder / "cut.hdf5").write_bytes(good[: len(good) // 2])
    (folder / "text").write_text("neither this nor that\n")
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    (folder / "wrong.json").write_text('{"labels": 3}')
    (folder / "places.csv").write_text("image_id,latitude,longitude\na,0,0\n")
    (folder / "notparquet").mkdir()
    (folder / "notparquet" / "train.parquet").write_text("PAR1")
    write_parquet(folder / "flair", records(12))
    write_cifar(CIFAR10, folder / "cifar")
    return folder


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The network may not be asked; the process that tries files out has its own tests."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was asked before the call was refused")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(probe, "probe", lambda path: None)
    monkeypatch.chdir(place)


@pytest.mark.parametrize(("command", "words", "said"), BAD)
def test_a_bad_call_is_one_line_and_leaves_nothing(
    place: Path, command: str, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check_refused(MAIN[command], words, said, place, capsys) == ""


def test_the_corrected_calls_work(place: Path) -> None:
    corrected = [
        ("mini", f"{FEW} --max_user_images=2"),
        ("flair", f"{FLAIR} --overwrite"),
        ("cifar10", f"{CIFAR} --overwrite"),
        ("hdf5", "out.hdf5"),
        ("partitions", "good.hdf5"),
    ]
    for command, words in corrected:
        assert run(MAIN[command], words.split()) == 0
    (place / "out.hdf5").unlink()


def test_flair_is_not_downloaded_into_the_folder_of_another_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output_file=new.hdf5", "--source=apple", f"--download_folder={tmp_path}"]
    with only_downloader(tmp_path):
        assert run(download_preprocess.main, words) == 2
    assert f"error: another process is downloading into {tmp_path}: " in capsys.readouterr().err
