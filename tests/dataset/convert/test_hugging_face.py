"""Files of one data set that differ: each is read by its own class names, and by its own split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from tests.dataset.convert.made_sources import convert, encoded, leaf_user, shown, write_leaf

HF = "hf --source {0} --client_column client"


def write(path: Path, numbers: Any, labels: Any, names: list[str] | None = None) -> None:
    """Images, each of a client of its own; ``names`` make the labels a ``ClassLabel``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": encoded(n, "PNG"), "path": None} for n in numbers]
    table = pa.table({"image": images, "label": labels, "client": [f"c{n}" for n in numbers]})
    if names is not None:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("given", ["", "dog cat", "eel dog cat", "Katze Hund"])
def test_class_numbers_are_those_of_their_own_file(tmp_path: Path, given: str, several: bool) -> None:
    own = tmp_path / "own"
    first, second = [0, 1], [1, 0]  # cat, dog
    if several:
        first, second = [[k] for k in first], [[k] for k in second]  # type: ignore[misc]
    write(own / "train-0.parquet", [0, 1], first, ["cat", "dog"])
    write(own / "test-0.parquet", [2, 3], second, ["dog", "cat"] if "Hund" not in given else ["cat", "dog"])
    words = HF.format(own)
    if given:
        (tmp_path / "names.txt").write_text(given.replace(" ", "\n"))
        words += f" --classes {tmp_path / 'names.txt'}"
    found = {number: label for number, (_, _, label) in shown(convert(words, tmp_path / "f.hdf5")).items()}
    german = {0: "Katze", 1: "Hund", 2: "Hund", 3: "Katze"}
    assert found == (german if "Hund" in given else {0: "cat", 1: "dog", 2: "cat", 3: "dog"})


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        (["cat", "dog"], "test-0.parquet has class names: use the same form in all files, or give the"),
        (
            [[0], [1]],
            "test-0.parquet has lists of class numbers without names: use the same form",
        ),
    ],
)
def test_files_of_two_forms_are_refused(
    tmp_path: Path, labels: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "train-0.parquet", [0, 1], [0, 1])
    write(tmp_path / "test-0.parquet", [2, 3], labels)
    convert(HF.format(tmp_path), tmp_path / "f.hdf5", 2)
    line = capsys.readouterr().err.splitlines()[-1]
    assert said in line
    assert "train-0.parquet has class numbers without names in the column 'label', " in line


def test_files_without_names_have_the_given_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own, names = tmp_path / "own", tmp_path / "names.txt"
    write(own / "train-0.parquet", [0, 1], [1, 0], ["cat", "dog"])
    write(own / "test-0.parquet", [2, 3], [0, 1])
    convert(HF.format(own), tmp_path / "f.hdf5", 2)
    assert "use the same form in all files, or give the class names with --classes" in capsys.readouterr().err
    for given, labels in (("dog cat", "dog cat dog cat"), ("Hund Katze", "Katze Hund Hund Katze")):
        names.write_text(given.replace(" ", "\n"))
        out = convert(f"{HF.format(own)} --classes {names} --overwrite", tmp_path / "f.hdf5")
        assert [label for _, (_, _, label) in sorted(shown(out).items())] == labels.split()
    names.write_text("dog\ncat")
    write(own / "test-0.parquet", [2, 3], [0, 1], ["dog", "eel"])
    convert(f"{HF.format(own)} --classes {names}", tmp_path / "g.hdf5", 2)
    said = "test-0.parquet has class names in the column 'label' that are missing in"
    assert said in capsys.readouterr().err


def test_class_names_are_one_however_they_are_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    write(tmp_path / "own" / "train-0.parquet", [0, 1], [0, 1], [decomposed, "dog"])
    write(tmp_path / "own" / "test-0.parquet", [2, 3], [0, 1], ["dog", composed])
    found = shown(convert(HF.format(tmp_path / "own"), tmp_path / "f.hdf5"))
    assert [found[n][2] for n in range(4)] == [composed, "dog", "dog", composed]
    write(tmp_path / "own" / "test-0.parquet", [2, 3], [0, 1], [decomposed, composed])
    convert(HF.format(tmp_path / "own"), tmp_path / "g.hdf5", 2)
    assert f"two classes have the same name '{composed}'" in capsys.readouterr().err


def test_a_list_of_the_class_of_each_object_may_repeat_one(tmp_path: Path) -> None:
    write(tmp_path / "own.parquet", range(6), [[3, 3, 1], [0], [2, 1], [1], [2], [3]])
    out = convert(f"{HF.format(tmp_path / 'own.parquet')} --splits deal", tmp_path / "f.hdf5")
    validate(out)
    assert shown(out)[0][2] == "1+3"


def test_a_vector_of_ones_is_no_list_of_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "own.parquet", [0, 1, 2], [[0, 1, 0], [1, 0, 0], [0, 0, 1]])
    convert(HF.format(tmp_path / "own.parquet"), tmp_path / "f.hdf5", 2)
    assert (
        "row 0 has the same number twice in the column 'label', [0, 1, 0]: list each class of"
        in (capsys.readouterr().err.splitlines()[-1])
    )


@pytest.mark.parametrize("name", ["dev_set", "test_run"])
def test_words_of_splits_in_names_that_are_none_need_splits_dealt(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in range(2):
        users = {f"c{n}": leaf_user([n]) for n in range(4 * part, 4 * part + 4)}
        write_leaf(tmp_path / "own" / f"{name}_{part}.json", users)
    convert(f"leaf --source {tmp_path / 'own'}", tmp_path / "f.hdf5", 2)
    assert (
        "there is no image for training: name a split of the source train, or split all images again"
    ) in (capsys.readouterr().err.splitlines()[-1])
    convert(f"leaf --source {tmp_path / 'own'} --splits deal", tmp_path / "f.hdf5")


NAMES = [
    ("mnist_train", "mnist_test"),
    ("train_0", "test_0"),
    ("Train/0", "TEST/0"),
    ("data/default-train", "data/default-dev"),
    ("a-train1", "a-valid1"),
    ("cars-test-drive/train", "cars-test-drive/test"),
    ("train-all_data_test_9", None),
    ("Train/0", "default/0"),
    ("test/train/0", "test/0"),
]


@pytest.mark.parametrize("form", ["hf", "leaf"])
@pytest.mark.parametrize(("train", "other"), NAMES)
def test_splits_by_the_names_of_files(
    tmp_path: Path, form: str, train: str, other: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    for name, numbers in ((train, [0, 1]), (other or "train/b", [2, 3])):
        if form == "hf":
            write(own / f"{name}.parquet", numbers, [0, 1])
        else:
            write_leaf(
                own / f"{name.removeprefix('cars-test-drive/').replace('/', '-')}.json",
                {f"c{n}": leaf_user([n]) for n in numbers},
            )
    words = HF.format(own) if form == "hf" else f"leaf --source {own}"
    refused = other is None or "default/" in other or "/train/" in train
    convert(words, tmp_path / "f.hdf5", 2 if refused else 0)
    said = capsys.readouterr().err
    if refused:
        assert "rename or move it" in said
        return
    split = "test" if other and "test" in other.lower() else "val"
    assert {n: found[0] for n, found in shown(tmp_path / "f.hdf5").items()} == {
        0: "train",
        1: "train",
        2: split,
        3: split,
    }
    assert f"; {split} is " in said or f": {split} is " in said
    with DataFile(tmp_path / "f.hdf5") as file:
        assert file.provenance["splits"] == "the source's"
    convert(f"{words} --splits deal --overwrite", tmp_path / "f.hdf5")
    assert "splits by file names:" not in capsys.readouterr().err
