"""Users' own models are scored on their users' images in val or test, and predict those."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.predict.__main__ import main
from benchmarks.visual_classification.train import main as classify
from dataset.cli import run
from dataset.store.hdf5 import DataFile
from dataset.store.index import in_another_split
from tests.benchmarks.core.test_personal_runs import OPTION
from tests.benchmarks.predict.test_personal import FEATURES
from tests.benchmarks.predict.test_predict import COMMON, rows_of
from tests.benchmarks.run_files import error_line, last_checkpoint, results
from tests.benchmarks.sparing import sparingly
from tests.dataset.convert.made_sources import convert, write_folder

Trained = Callable[..., Path]
CARVED = ("--data.scored=val", "--data.val_share=0.3", "--data.partition=lda-1-clients-3-seed-0")
FEDPER = ("--federated.algorithm=fedper", "--data.scored=val", "--data.val_share=0")


def by_images(folder: Path, shares: str) -> Path:
    """Photos of four users, each of whom has some in every split."""
    split = f"--split_by=images {shares} --storage=raw --image_size=20"
    return convert(
        f"folder --images {write_folder(folder / 'in', range(60))} {split}", folder / "photos.hdf5"
    )


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_images(tmp_path_factory.mktemp("photos"), "--val_share=0.2 --test_share=0.2")


@pytest.fixture(scope="module")
def without_val(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return by_images(tmp_path_factory.mktemp("photos"), "--val_share=0 --test_share=0.3")


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    def train(data: Path, *words: str, code: int = 0) -> Path:
        fixed = ("--config=cifar10-fedavg", "--runtime.keep_checkpoints=true", *COMMON, *words)
        with sparingly(draw=False):
            assert run(classify, (*fixed, f"--data_path={data}", f"--run_dir={tmp_path / 'run'}")) == code
        return tmp_path / "run"

    return train


@pytest.mark.parametrize("split", ["val", "test"])
@pytest.mark.parametrize(
    "words",
    [
        FEDPER,
        ("--federated.algorithm=ditto", *FEDPER[1:], "--model.trained=head", *FEATURES),
        ("--federated.algorithm=moon", *FEDPER[1:]),
        ("--federated.algorithm=ifca", *FEDPER[1:], "--model.init=xavier"),
    ],
    ids=["fedper", "features", "moon", "ifca"],
)
def test_users_are_scored_where_they_have_images_and_train_on_all(
    words: tuple[str, ...], split: str, photos: Path, trained: Trained, tmp_path: Path
) -> None:
    directory, output = trained(photos, *words, f"{OPTION}scored_on={split}"), tmp_path / "p.csv"
    listed = [*csv.DictReader((directory / "clients.csv").read_text().splitlines())]
    with DataFile(photos) as file:
        train, other = file.split("train"), file.split(split)
        trained_on = dict(zip(train.user_ids, np.diff(train.user_offsets).tolist()))
        images = dict(zip(other.user_ids, np.diff(other.user_offsets).tolist()))
    assert {row["split"] for row in listed} == {split}
    assert {row["user"]: int(row["training_images"]) for row in listed} == trained_on
    assert {in_another_split(row["user"], split): int(row["images"]) for row in listed} == images
    right = {}
    for user in (row["user"] for row in listed if (row["group"], row["model"]) == ("seen", "personal")):
        assert run(main, [str(directory), f"--user={user}", f"--output={output}", "--overwrite"]) == 0
        found = rows_of(output)
        assert {row["user"] for row in found} == {in_another_split(user, split)}
        right[user] = [row["predicted"] == row["truth"] for row in found]
    assert len(right) == 3
    seen = results(directory)["clients"]["seen"]
    assert (seen["split"], seen["images"]) == (split, sum(map(len, right.values())))
    of_users = [100 * np.mean(each) for each in right.values()]
    assert seen["personal"]["users"]["accuracy"]["mean"] == pytest.approx(np.mean(of_users), abs=1e-3)
    pooled = 100 * np.mean([each for user in right.values() for each in user])
    assert seen["personal"]["pooled"]["accuracy"] == pytest.approx(pooled, abs=1e-3)


def test_a_user_has_one_name_whichever_model_is_scored(photos: Path, trained: Trained) -> None:
    """FedAvg's users stand in the rows of those with models of their own; in the file they are test-NAME."""
    directory = trained(photos)
    listed = [*csv.DictReader((directory / "clients.csv").read_text().splitlines())]
    with DataFile(photos) as file:
        train = file.split("train")
        trained_on = dict(zip(train.user_ids, np.diff(train.user_offsets).tolist()))
    assert {(row["group"], row["split"], row["model"]) for row in listed} == {("seen", "test", "server")}
    assert {row["user"]: int(row["training_images"]) for row in listed} == trained_on


def test_clients_of_a_drawn_partition_are_scored_on_a_val_of_their_own(
    without_val: Path, trained: Trained
) -> None:
    directory = trained(without_val, *FEDPER[:1], *CARVED, f"{OPTION}scored_on=val")
    listed = [*csv.DictReader((directory / "clients.csv").read_text().splitlines())]
    assert {row["user"] for row in listed} == {"0", "1", "2"}
    with DataFile(without_val) as file:
        images = file.split("train").num_images
    own = [row for row in listed if row["model"] == "server"]
    assert sum(int(row["images"]) + int(row["training_images"]) for row in own) == images
    assert int(last_checkpoint(directory)["seen"].sum()) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*FEDPER[:1], *CARVED, f"{OPTION}scored_on=test"),
            "scored_on is test, but no training user has images there",
        ),
        (
            (*FEDPER[:1], f"{OPTION}scored_on=val"),
            "scored_on is val, but this run has no such split: set it to",
        ),
        (
            (*FEDPER, f"{OPTION}scored_on=test", f"{OPTION}held_out=0.1"),
            "held_out has no effect if federated.options.scored_on is test: leave it out, or set",
        ),
        (
            (*FEDPER, f"{OPTION}scored_on=test", f"{OPTION}split_seed=1"),
            "split_seed has no effect if federated.options.scored_on is test: leave it out, or set",
        ),
        (
            ("--federated.algorithm=moon", f"{OPTION}scored_on=test", "--evaluation.average=ema"),
            "evaluation.average is ema, but moon scores the server's own model on users' images",
        ),
    ],
)
def test_what_is_refused(
    words: tuple[str, ...],
    message: str,
    photos: Path,
    without_val: Path,
    trained: Trained,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory = trained(without_val if "--data.val_share=0.3" in words else photos, *words, code=2)
    assert message in error_line(capsys)
    assert not directory.exists()


@pytest.mark.parametrize("share, split", [("0", "test"), ("0.3", "val")])
def test_a_servers_model_is_scored_on_users_test_images_before_those_that_chose_it(
    share: str, split: str, photos: Path, without_val: Path, trained: Trained
) -> None:
    """But a val of `data.val_share` has images of each client's own."""
    words = ("--data.scored=val", f"--data.val_share={share}", "--evaluation.best_by=C-accuracy")
    directory = trained(photos if share == "0" else without_val, *words)
    listed = [*csv.DictReader((directory / "clients.csv").read_text().splitlines())]
    assert {(row["group"], row["split"]) for row in listed} == {("seen", split)}
    assert results(directory)["clients"]["seen"]["split"] == split
    assert float(listed[0]["macro-F1"]) <= 100
