"""Data files that a private run refuses, and files whose users are in several splits."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from benchmarks.compare.privacy import in_short, privacy_of
from benchmarks.compare.reading import compare
from benchmarks.core.privacy_statement import USERS, central_paragraph, local_paragraph
from benchmarks.flair.report import collect, markdown
from benchmarks.visual_classification.train import main
from dataset.cli import run
from dataset.flair.mini import write_mini
from dataset.partitions.__main__ import main as write_partition
from dataset.store.hdf5 import DataFile
from dataset.store.index import owner
from pfl_ext import checkpoint
from pfl_ext.privacy.accounting import PrivacyConfig
from pfl_ext.privacy.local import LocalPrivacyConfig
from tests.benchmarks.conftest import TINY, killed_at, train_into
from tests.benchmarks.made_runs import make_run
from tests.benchmarks.run_files import error_line, results
from tests.benchmarks.sparing import sparingly
from tests.dataset.convert.made_sources import CLASSES, convert, write_folder

BY_IMAGES = "--split_by=images --val_share=0.2 --test_share=0.2"
BY_USERS = "--split_by=users --val_share=0.3 --test_share=0.3 --storage=raw --image_size=20"
PRIVATE = ("--config=pfl-r-17", "--privacy.epsilon=50", "--privacy.delta=0.01")
PUBLIC = ("--privacy.release=public", "--privacy.noise_cohort_size=none", "--privacy.noise_population=none")
TWO_USERS = ("--federated.cohort_size=2", "--federated.num_rounds=2")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of images by client and class."""
    return write_folder(tmp_path_factory.mktemp("photos"), range(27))


@pytest.fixture
def by_images(photos: Path, tmp_path: Path) -> Path:
    return convert(
        f"folder --images {photos} {BY_IMAGES} --storage=raw --image_size=20", tmp_path / "by_images.hdf5"
    )


@pytest.mark.parametrize("words", [PRIVATE, ("--local_privacy.epsilon=4", "--federated.weighting=users")])
def test_users_of_two_splits_are_not_protected(
    words: tuple[str, ...], by_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_into(tmp_path / "run", by_images, *TWO_USERS, *words, code=2)
    assert "users of val are also in train, " in error_line(capsys)
    assert not (tmp_path / "run").exists()


def test_weights_that_learnt_from_the_same_images_are_refused(
    mini_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where another run lies between."""
    write_mini(other := tmp_path / "other.hdf5", replace(TINY, train_users=9))
    begin = ("--model.pretrained=true", "--federated.num_rounds=1", "--model.keep_head=true")
    one_round = ("--federated.num_rounds=1", "--federated.cohort_size=2")
    first = train_into(tmp_path / "first", mini_file, *one_round) / "model.safetensors"
    between = train_into(tmp_path / "between", other, *begin, f"--weights={first}") / "model.safetensors"
    said = results(tmp_path / "between")
    assert said["weights"]["learnt_from"] == [results(tmp_path / "first")["data_sha256"]]
    assert checkpoint.load(between)[1]["learnt_from"] == sorted(
        {said["data_sha256"], *said["weights"]["learnt_from"]}
    )
    private = (*PRIVATE, *PUBLIC[1:], "--federated.cohort_size=2", *begin[:2])
    train_into(tmp_path / "private", mini_file, *private, f"--weights={between}", code=2)
    assert "between/model.safetensors was trained on images of " in error_line(capsys)
    assert not (tmp_path / "private").exists()
    train_into(tmp_path / "private", other, *private, f"--weights={first}")
    public = (*private, PUBLIC[0], "--privacy.noise_seed=entropy")
    released = train_into(tmp_path / "public", other, *public, f"--weights={first}") / "model.safetensors"
    assert checkpoint.load(released)[1]["learnt_from"] == said["weights"]["learnt_from"]


def test_clients_of_a_drawn_partition_are_other_owners(tmp_path: Path, photos: Path) -> None:
    """Their names are numbers, as users' names may be."""
    file = numbered(photos, tmp_path)
    more = ("--config=cifar10-fedavg", "--scale=mini", "--model.arch=lenet", "--data.image_size=20")
    private = (
        "--local_privacy.epsilon=4",
        "--federated.weighting=users",
        "--data.partition=iid-clients-4-seed-0",
    )
    where = (f"--data_path={file}", f"--run_dir={tmp_path / 'run'}", "--model.input_size=20")
    with sparingly(draw=False):
        assert run(main, (*more, *TWO_USERS, *private, *where)) == 0


def numbered(photos: Path, folder: Path, how: str = BY_USERS) -> Path:
    """A file whose users are called 0 to 5, each in one split."""
    places = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.*"))
    lines = [f"{place},{number % 6},{CLASSES[number % 3]}" for number, place in enumerate(places)]
    (folder / "labels.csv").write_text("\n".join(["path,client,label", *lines]))
    words = f"folder --images {photos} --labels {folder / 'labels.csv'} {how}"
    return convert(words, folder / "numbers.hdf5")


def test_they_are_strangers_to_users_of_the_file_with_the_same_names(tmp_path: Path, photos: Path) -> None:
    file = numbered(photos, tmp_path)
    words = (
        *("--config=cifar10-fedavg", "--scale=mini", "--model.arch=lenet", "--data.image_size=20"),
        *("--data.partition=iid-clients-6-seed-0", "--data.scored=test", "--model.input_size=20"),
        *(*TWO_USERS, f"--data_path={file}", f"--run_dir={tmp_path / 'run'}"),
    )
    with sparingly(draw=False):
        assert run(main, words) == 0
    clients = results(tmp_path / "run")["clients"]
    with DataFile(file) as data:
        assert {kind: part["users"] for kind, part in clients.items()} == {
            "new": data.split("test").num_users
        }


def test_users_of_a_partition_have_their_own_images(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A partition called users that gives each user of the file another one's images protects nobody."""
    file = numbered(photos, tmp_path)
    with DataFile(file) as data:
        train = data.split("train")
        ids = [train.user_ids[user] for user in train.user_index]
        following = dict(zip(train.user_ids, [*train.user_ids[1:], train.user_ids[0]]))
        images = list(train.image_ids)
    for name, owners in (("users-own", ids), ("users-next", [following[user] for user in ids])):
        rows = [f"{image},{user}" for image, user in zip(images, owners)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["image_id,user_id", *rows]))
        held = f"{file} --csv {tmp_path / f'{name}.csv'} --output_file {tmp_path / f'{name}.hdf5'}"
        assert run(write_partition, held.split()) == 0
    words = ("--config=cifar10-fedavg", "--scale=mini", "--model.arch=lenet", "--data.image_size=20")
    more = ("--local_privacy.epsilon=4", "--federated.weighting=users", "--model.input_size=20")
    for name, code in (("users-own", 0), ("users-next", 2)):
        data_words = (f"--data_path={tmp_path / f'{name}.hdf5'}", f"--data.partition={name}")
        where = (*data_words, f"--run_dir={tmp_path / name}")
        with sparingly(draw=False):
            assert run(main, (*words, *TWO_USERS, *more, *where)) == code
    assert "data.partition gives an image of user " in capsys.readouterr().err.splitlines()[-1]


def test_val_chooses_a_private_model_if_its_users_do_not_train(
    photos: Path, by_images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A val of training images is refused, and so is one of training users."""
    words = ("--config=cifar10-fedavg", "--scale=mini", "--model.arch=lenet", "--data.image_size=20")
    more = ("--local_privacy.epsilon=4", "--federated.weighting=users", "--model.input_size=20")
    by_val = ("--data.scored=val", "--evaluation.best_by=accuracy")
    file = numbered(photos, tmp_path)
    for name, path, share, said in (
        ("chosen", file, 0, ""),
        ("carved", file, 0.1, "so val would be training users' images, and its scores are exact"),
        ("both", by_images, 0, "users of val are also in train, "),
    ):
        where = (f"--data_path={path}", f"--run_dir={tmp_path / name}", f"--data.val_share={share}")
        with sparingly(draw=False):
            assert run(main, (*words, *TWO_USERS, *more, *by_val, *where)) == (2 if said else 0)
        assert said in capsys.readouterr().err
    assert "accuracy" in results(tmp_path / "chosen")["val"]


@pytest.mark.parametrize("partition", ["none", "iid-clients-6-seed-0"])
def test_they_count_as_seen_where_users_are_scored_by_themselves(
    partition: str, by_images: Path, tmp_path: Path
) -> None:
    """Also where their images were dealt to clients."""
    words = ("--config=cifar10-fedavg", "--scale=mini", "--model.arch=lenet", "--data.image_size=20")
    run_words = (
        *words,
        *TWO_USERS,
        "--model.input_size=20",
        f"--data.partition={partition}",
        f"--data_path={by_images}",
        f"--run_dir={tmp_path}",
    )
    with sparingly(draw=False):
        assert run(main, run_words) == 0
    found = results(tmp_path)["clients"]
    assert list(found) == ["seen"]
    rows = csv.DictReader((tmp_path / "clients.csv").read_text().splitlines())
    trained = {row["user"]: int(row["training_images"]) for row in rows}
    with DataFile(by_images) as file:
        train = file.split("train")
        sizes = dict(zip(train.user_ids, np.diff(train.user_offsets).tolist()))
        assert found["seen"]["users"] == len(trained) == file.split("test").num_users
        assert trained == {user: sizes[user] for user in trained}


def test_a_user_of_two_splits_is_known_by_name() -> None:
    trained = {"bob", "val-ann", "test-test-x"}
    for user in ("val-bob", "test-bob", "bob"):
        assert owner(user, trained) == "bob"
    for user in ("val-ann", "test-eve", "val-test-x"):
        assert owner(user, trained) == user


def test_classes_that_were_found_are_not_made_public(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = convert(f"folder --images {photos} {BY_USERS}", tmp_path / "found.hdf5")
    (tmp_path / "classes.txt").write_text("\n".join(CLASSES))
    classes = f"--classes={tmp_path / 'classes.txt'}"
    given = convert(f"folder --images {photos} {BY_USERS} {classes}", tmp_path / "given.hdf5")
    for path, names in ((found, ["labels"]), (given, [])):
        with DataFile(path) as file:
            assert file.provenance["found_classes"] == names
    capsys.readouterr()
    train_into(tmp_path / "run", found, *PRIVATE, *PUBLIC, "--federated.cohort_size=1", code=2)
    assert "would publish the classes of labels, which were found in the images" in error_line(capsys)


def test_a_file_that_was_changed_in_place_is_refused(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = convert(f"folder --images {photos} {BY_USERS}", tmp_path / "changed.hdf5")
    with h5py.File(changed, "r+") as file:
        data = file["train/annotations/labels/classes"]
        data[...] = np.roll(data[()], 1)
    capsys.readouterr()
    train_into(tmp_path / "run", changed, *PRIVATE, "--federated.cohort_size=1", code=2)
    assert "train/annotations/labels/classes does not match its checksum" in error_line(capsys)


@pytest.mark.parametrize("storage", ["raw", "jpeg"])
def test_images_that_were_changed_in_place_are_not_trained_on(
    storage: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A private run that was killed would put the noise of its rounds onto other images."""
    words = BY_USERS.replace("--storage=raw --image_size=20", f"--storage={storage}")
    changed = numbered(photos, tmp_path, words)
    private = (*PRIVATE, *TWO_USERS, *PUBLIC[1:], "--runtime.checkpoint_every=9")
    with killed_at(1):
        train_into(tmp_path / "run", changed, *private, code=130)
    with h5py.File(changed, "r+") as file:
        pixels = file["train/images"][()]
        pixels[..., -1] ^= 1  # of an image as a JPEG, its last byte
        file["train/images"][...] = pixels
    capsys.readouterr()
    train_into(tmp_path / "run", changed, *private, code=2)
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: image ")
    assert "it does not match its checksum; check the file with python -m dataset.store" in said
    if storage == "raw":
        train_into(tmp_path / "plain", changed, "--federated.cohort_size=1", "--federated.num_rounds=1")


def test_one_label_of_a_file_with_one_class_an_image(photos: Path, tmp_path: Path) -> None:
    file = convert(f"folder --images {photos} {BY_USERS}", tmp_path / "f.hdf5")
    label = f"--data.binary_label={CLASSES[0]}"
    found = results(train_into(tmp_path / "run", file, label, "--federated.cohort_size=1"))
    assert list(found["prevalence"]) == [CLASSES[0]]
    assert 0 < found["prevalence"][CLASSES[0]] < 1


@pytest.mark.parametrize(
    ("seeded", "mark", "paragraphs"),
    [
        ((), "", ("each seed by itself: secret",)),
        ((0, 1, 2), "NO PROTECTION, noise from the seed", ("each seed by itself: seeded",)),
        (
            (2,),
            "NO PROTECTION in 1 of 3 runs, noise from the seed",
            ("each seed of 0, 1 by itself: secret", "each seed of 2 by itself: seeded"),
        ),
    ],
)
def test_a_table_says_which_runs_of_a_row_protect_nobody(
    seeded: tuple[int, ...], mark: str, paragraphs: tuple[str, ...], tmp_path: Path
) -> None:
    """In the benchmark's report, in what it says of the guarantees, and twice on the page of `compare`."""
    for seed in range(3):
        path = make_run(tmp_path / str(seed), "pfl-r-17", seed=seed) / "privacy.json"
        word = "seeded" if seed in seeded else "secret"
        found = {**json.loads(path.read_text()), "paragraph": word}
        path.write_text(json.dumps({**found, "seeded_for_research_only": seed in seeded}))
    report, (group,) = markdown(collect([tmp_path])), compare([tmp_path]).groups
    kind = privacy_of(group)
    assert kind is not None
    assert (f"{mark}; " if mark else "") + "epsilon 2 at delta" in report
    assert [line.rpartition("**, ")[2] for line in report.splitlines() if line.startswith("* **")] == [
        *paragraphs
    ]
    assert kind[0] == "central" + (f", {mark}" if mark else "")
    assert in_short(group) == kind[1] + (f"; {mark}" if mark else "")


def test_the_paragraph_of_a_seeded_run_begins_with_that() -> None:
    made = PrivacyConfig(epsilon=2.0).calibrate(9, 9, 1)
    assert central_paragraph(made, USERS, True).startswith(
        "This run protects nobody: its noise was drawn from the run"
    )
    assert "protects nobody" not in central_paragraph(made, USERS, False)
    local = LocalPrivacyConfig(epsilon=4.0, delta=1e-3)
    assert local_paragraph(local, USERS, 3, 2, 5.0, True).startswith("This run protects nobody")
    assert "protects nobody" not in local_paragraph(local, USERS, 3, 2, 5.0, False)
