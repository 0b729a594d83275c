"""Images with several labels, dealt to the clients of a drawn partition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.core.clients import dealt_sets
from benchmarks.core.single_users import trained_users
from benchmarks.flair.config import parse
from benchmarks.flair.train import Flair, main
from dataset.cli import run
from dataset.convert.__main__ import main as convert
from dataset.partitions.__main__ import main as partitions
from dataset.store.hdf5 import DataFile
from tests.benchmarks.run_files import results
from tests.benchmarks.sparing import sparingly
from tests.dataset.drawn import draw

TINY = (
    "--scale=mini", "--model.arch=lenet", "--data.image_size=20", "--model.input_size=20",
    "--federated.num_rounds=1", "--runtime.progress=false",
)  # fmt: skip
FL = ("--config=fl-r-17",)
LINEAR = "--data.partition=quantity-linear-clients-4-seed-0"


@pytest.fixture(scope="module")
def chest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As ChestMNIST: no clients, several labels an image, or none."""
    folder = tmp_path_factory.mktemp("chest")
    labels = np.array([[n % 2, n % 5 == 0, n % 3 == 0] for n in range(1, 41)], np.uint8)
    images = np.stack([draw(number) for number in range(1, 41)])
    arrays: dict[str, Any] = {f"{split}_{kind}": value for split in ("train", "val", "test")
              for kind, value in (("images", images), ("labels", labels))}  # fmt: skip
    np.savez(folder / "chest.npz", **arrays)
    file = folder / "chest.hdf5"
    assert (
        run(convert, ["npz", f"--source={folder / 'chest.npz'}", f"--output_file={file}", "--workers=1"]) == 0
    )
    return file


def test_a_drawn_partition_deals_every_image_once(chest: Path) -> None:
    with DataFile(chest) as file:
        dealt = dealt_sets(file, "quantity-linear-clients-4-seed-0", "labels")
        assert sorted(dealt.rows.tolist()) == list(range(40)), "those with two labels, and with none, too"
        assert np.diff(dealt.offsets).tolist() == [4, 8, 12, 16]
        again = dealt_sets(file, "iid-clients-5-seed-1", "labels")
        assert np.diff(again.offsets).tolist() == [8] * 5
        flair = Flair(parse([*TINY, *FL, LINEAR]), file)
        owners = flair.partition()
        assert owners is not None
        assert np.array_equal(owners.rows, dealt.rows)
        assert flair.protected().partition == "quantity-linear-clients-4-seed-0"


@pytest.mark.parametrize("config", ["fl-r-17", "pfl-r-17"])
def test_its_clients_are_those_that_train(config: str, chest: Path, tmp_path: Path) -> None:
    """They are the population of a private run, whose file has one user, and so no cohort of four."""
    words = [*TINY, f"--config={config}", LINEAR, f"--data_path={chest}", f"--run_dir={tmp_path / 'run'}"]
    with sparingly(draw=False):
        assert run(main, [*words, "--federated.cohort_size=4"]) == 0
    assert results(tmp_path / "run")["rounds"] == 1
    if config == "pfl-r-17":
        statement = json.loads((tmp_path / "run" / "privacy.json").read_text())
        assert "one client of the partition quantity-linear-clients-4-seed-0" in statement["unit"]
        assert "Training had 4 clients" in statement["paragraph"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--data.partition=iid"], "and one user has all: give iid-clients-10-seed-0"),
        (
            ["--data.partition=lda-1-clients-4-seed-0"],
            "of a kind that does not need labels: iid, ",
        ),
        (
            ["--data.partition=nobody"],
            "data.partition is 'nobody': give user, iid, or a name such as iid-clients-10",
        ),
        (["--data.partition=iid-clients-90-seed-0"], "90"),
    ],
)
def test_what_cannot_deal_them_is_refused(
    words: list[str], why: str, chest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(main, [*TINY, *FL, *words, f"--data_path={chest}", f"--run_dir={tmp_path / 'run'}"]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert why in last
    assert not (tmp_path / "run").exists()


def test_training_one_client_says_so(chest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*TINY, *FL, f"--data_path={chest}", f"--run_dir={tmp_path / 'run'}", "--federated.cohort_size=1"]
    with sparingly(draw=False):
        assert run(main, words) == 0
    assert "one user owns all training images, so only one client is trained" in capsys.readouterr().err


@pytest.fixture(scope="module")
def patients(chest: Path) -> Path:
    """The same file with the partitions ``users`` and ``iid``, whose owners those of val and test are not."""
    folder, file = chest.parent, chest
    with DataFile(chest) as data:
        ids = data.split("train").image_ids
    for name in ("iid", "users"):
        rows = [f"{image},patient-{number % 4}" for number, image in enumerate(ids)]
        (folder / f"{name}.csv").write_text("\n".join(["image_id,user_id", *rows]))
        words = [str(file), "--csv", str(folder / f"{name}.csv")]
        file = folder / f"patients-{name}.hdf5"
        assert run(partitions, [*words, f"--output_file={file}"]) == 0
    return file


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["--config=pfl-r-17", "--data.partition=users"],
            "which images of val and test belong to its 4 users, for example pat",
        ),
        (["--config=fl-r-17", "--data.partition=iid"], "the file holds another partition of that name"),
    ],
)
def test_what_a_partition_of_the_file_does_not_say_is_refused(
    words: list[str], why: str, patients: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"--data_path={patients}", f"--run_dir={tmp_path / 'run'}", "--federated.cohort_size=2"]
    assert run(main, [*TINY, *words, *more]) == 2
    assert why in capsys.readouterr().err.splitlines()[-1]


def test_a_partition_of_the_file_trains(patients: Path, tmp_path: Path) -> None:
    words = [*TINY, *FL, "--data.partition=users", f"--data_path={patients}", f"--run_dir={tmp_path / 'run'}"]
    with sparingly(draw=False):
        assert run(main, [*words, "--federated.cohort_size=2"]) == 0
    with DataFile(patients) as file:
        flair = Flair(parse([*TINY, *FL, "--data.partition=users"]), file)
        whose = {"all", *(f"patient-{number}" for number in range(4))}
        assert set(trained_users(flair, "test")) >= whose
        drawn = trained_users(Flair(parse([*TINY, *FL, LINEAR]), file), "test")
        assert {name for name in drawn if not name.startswith(("val-", "test-"))} == {"all"}
    with DataFile(patients.with_name("chest.hdf5")) as file:  # as to predict on: nothing is dealt there
        assert Flair(parse([*TINY, *FL, "--data.partition=users"]), file).split("test").num_images == 40
