"""Every format becomes one file in which each image has its client, its class, its split and its pixels."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataset.cli import run
from dataset.convert import hf, leaf, tff
from dataset.fetch import json_stream, source
from dataset.flair import download_preprocess as flair
from dataset.store.hdf5 import DataFile
from dataset.store.validate import validate
from tests.dataset.convert.made_sources import (
    CLASSES,
    client_of,
    convert,
    encoded,
    label_of,
    leaf_user,
    pixels_of,
    plain,
    shown,
    write_csv,
    write_folder,
    write_image,
    write_leaf,
    write_listed,
    write_tff,
)
from tests.dataset.drawn import draw, records, write_parquet

NUMBERS = range(1, 28)
DEAL = "--split_by=images --val_share=0.2 --test_share=0.2"


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that parts have several, and begin within a user."""
    monkeypatch.setattr(source, "BATCH", 4)


def check(path: Path, numbers: Any = NUMBERS) -> dict[int, str]:
    """Every image is there, its client's and of its class; returns the splits."""
    validate(path)
    found = shown(path)
    assert set(found) == set(numbers)
    for number, (_, user, label) in found.items():
        assert (plain(user), label) == (client_of(number), label_of(number))
    return {number: split for number, (split, _, _) in found.items()}


def test_a_folder_by_client_and_class(tmp_path: Path) -> None:
    """PNG, WebP and JPEG; client 007 stays text; hidden files are no images."""
    root = write_folder(tmp_path / "own", NUMBERS)
    (root / ".DS_Store").write_text("x")
    (root / "bob" / "cat" / "Thumbs.db").write_text("x")
    (root / "README.txt").write_text("mine")
    splits = check(convert(f"folder --images {root} {DEAL}", tmp_path / "f.hdf5"))
    assert set(splits.values()) == {"train", "val", "test"}


def test_a_folder_by_split_client_and_class(tmp_path: Path) -> None:
    root = tmp_path / "own"
    write_folder(root, NUMBERS[:20], "train")
    write_folder(root, NUMBERS[20:], "validation")
    splits = check(convert(f"folder --images {root}", tmp_path / "f.hdf5"))
    assert splits == {n: "train" if n < 21 else "val" for n in NUMBERS}


def test_a_csv_with_splits_fine_labels_and_a_byte_order_mark(tmp_path: Path) -> None:
    rows = []
    for number in NUMBERS:
        write_image(tmp_path / "images" / "sub" / f"{number}.png", number)
        row = {"label": label_of(number), "path": f"sub/{number}.png", "client": client_of(number)}
        rows.append(
            {**row, "fine_label": f"{label_of(number)}, small", "split": "train" if number % 4 else "test"}
        )
    table = write_csv(tmp_path / "labels.csv", rows, encoding="utf-8-sig")
    words = f"folder --images {tmp_path / 'images'} --labels {table}"
    splits = check(convert(words, tmp_path / "f.hdf5"))
    assert splits == {n: "train" if n % 4 else "test" for n in NUMBERS}
    with DataFile(tmp_path / "f.hdf5") as file:
        assert list(file.label_mapping("fine_grained_labels")) == [f"{name}, small" for name in CLASSES]
        assert set(file.split("test").user_ids) == {f"test-{client_of(n)}" for n in NUMBERS if n % 4 == 0}


def test_several_labels_of_an_image_become_label_sets(tmp_path: Path) -> None:
    for number in range(6):
        write_image(tmp_path / "images" / f"{number}.jpg", number)
    cells = ["b; a", "a", "", "c", "a;c", "b"]
    rows = [{"path": f"{n}.jpg", "client": f"u{n}", "labels": cell} for n, cell in enumerate(cells)]
    table = write_csv(tmp_path / "labels.csv", rows)
    convert(f"folder --images {tmp_path / 'images'} --labels {table}", tmp_path / "f.hdf5")
    found = {number: label for number, (_, _, label) in shown(tmp_path / "f.hdf5").items()}
    assert found == {0: "a+b", 1: "a", 2: "", 3: "c", 4: "a+c", 5: "b"}


def test_columns_of_other_names_and_columns_that_are_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_listed(tmp_path, NUMBERS, splt="train")
    text = (tmp_path / "labels.csv").read_text().replace("path,client,label", "file,site,diagnosis", 1)
    (tmp_path / "labels.csv").write_text(text)
    columns = "--path_column=file --client_column=site --label_column=diagnosis"
    words = f"folder --images {tmp_path}/images --labels {tmp_path}/labels.csv {columns} {DEAL}"
    check(convert(words, tmp_path / "f.hdf5"))
    assert "these columns are not read: splt" in capsys.readouterr().err


def test_numbers_as_class_names_stand_in_the_order_of_their_values(tmp_path: Path) -> None:
    for number in range(12):
        write_image(tmp_path / "images" / f"{number}.jpg", number)
    rows = [{"path": f"{n}.jpg", "client": f"u{n % 4}", "label": n} for n in range(12)]
    table = write_csv(tmp_path / "labels.csv", rows)
    convert(f"folder --images {tmp_path / 'images'} --labels {table} {DEAL}", tmp_path / "f.hdf5")
    with DataFile(tmp_path / "f.hdf5") as file:
        assert list(file.label_mapping("labels")) == [str(number) for number in range(12)]


def test_classes_of_a_file_keep_their_order_and_those_without_images(tmp_path: Path) -> None:
    write_listed(tmp_path, NUMBERS)
    (tmp_path / "classes.txt").write_text("yak\neel\ndog\ncat\n")
    words = (
        f"folder --images {tmp_path}/images --labels {tmp_path}/labels.csv --classes {tmp_path}/classes.txt"
    )
    check(convert(f"{words} {DEAL}", tmp_path / "f.hdf5"))
    with DataFile(tmp_path / "f.hdf5") as file:
        assert list(file.label_mapping("labels")) == ["yak", "eel", "dog", "cat"]


@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_raw_storage_keeps_the_very_pixels_of_images_without_loss(tmp_path: Path, form: str) -> None:
    for number in NUMBERS:
        path = tmp_path / "own" / client_of(number) / label_of(number) / str(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number, form))
    words = f"folder --images {tmp_path / 'own'} --storage=raw --image_size=own {DEAL}"
    for number, pixels in pixels_of(convert(words, tmp_path / "f.hdf5")).items():
        assert np.array_equal(pixels, draw(number))


def test_jpegs_are_kept_byte_for_byte(tmp_path: Path) -> None:
    rows = []
    for number in NUMBERS:
        write_image(tmp_path / "images" / f"{number}.jpg", number)
        rows.append({"path": f"{number}.jpg", "client": client_of(number), "label": label_of(number)})
    table = write_csv(tmp_path / "labels.csv", rows)
    convert(f"folder --images {tmp_path / 'images'} --labels {table} {DEAL}", tmp_path / "f.hdf5")
    with DataFile(tmp_path / "f.hdf5") as file:
        for name in file.splits:
            ids = list(file.split(name).image_ids)
            stored = file.reader.stored(name, np.arange(len(ids)))
            assert [bytes(image) for image in stored] == [(tmp_path / "images" / i).read_bytes() for i in ids]


def write_hf(path: Path, numbers: Any, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    features = {"label": {"names": list(CLASSES), "_type": "ClassLabel"}, "image": {"_type": "Image"}}
    table = pa.table(
        {
            "image": [{"bytes": encoded(n, "PNG"), "path": f"{n}.png"} for n in numbers],
            "label": [n % 3 for n in numbers],
            "writer": [client_of(n) for n in numbers],
            **columns,
        }
    )
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=5)


def test_parquet_of_hugging_face_has_splits_by_name_and_class_names(tmp_path: Path) -> None:
    write_hf(tmp_path / "own" / "data" / "train-00000-of-00002.parquet", NUMBERS[:9])
    write_hf(tmp_path / "own" / "data" / "train-00001-of-00002.parquet", NUMBERS[9:18])
    write_hf(tmp_path / "own" / "data" / "test-00000-of-00001.parquet", NUMBERS[18:])
    splits = check(convert(f"hf --source {tmp_path / 'own'} --client_column writer", tmp_path / "f.hdf5"))
    assert splits == {n: "train" if n <= 18 else "test" for n in NUMBERS}


def test_apples_schema_gives_the_same_content_as_flairs_own_reader(tmp_path: Path) -> None:
    folder = write_parquet(tmp_path / "flair", records(60))
    columns = "--client_column=user_id --label_column=labels --fine_column=fine_grained_labels"
    words = f"hf --source {folder} {columns} --split_column=partition --id_column=image_id"
    convert(words, tmp_path / "a.hdf5")
    assert run(flair.main, [f"--source={folder}", f"--output_file={tmp_path / 'b.hdf5'}", "--workers=1"]) == 0
    with DataFile(tmp_path / "a.hdf5") as a, DataFile(tmp_path / "b.hdf5") as b:
        assert a.content_sha256() == b.content_sha256()


def test_what_save_to_disk_writes(tmp_path: Path) -> None:
    """A folder for each split, with Arrow streams that state.json lists in their order."""
    for split, numbers in (("train", NUMBERS[:18]), ("test", NUMBERS[18:])):
        folder = tmp_path / "saved" / split
        files = []
        for shard in range(2):
            write_hf(tmp_path / "t.parquet", numbers[shard * 9 : shard * 9 + 9])
            files.append(f"data-{shard:05d}-of-00002.arrow")
            folder.mkdir(parents=True, exist_ok=True)
            table = pq.read_table(tmp_path / "t.parquet")
            if len(table):
                with (
                    pa.OSFile(str(folder / files[-1]), "wb") as sink,
                    pa.ipc.new_stream(sink, table.schema) as stream,
                ):
                    stream.write_table(table, max_chunksize=6)
            else:
                files.pop()
        (folder / "state.json").write_text(
            json.dumps({"_data_files": [{"filename": name} for name in files]})
        )
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    splits = check(convert(f"hf --source {tmp_path / 'saved'} --client_column writer", tmp_path / "f.hdf5"))
    assert splits == {n: "train" if n <= 18 else "test" for n in NUMBERS}
    convert(f"hf --source {tmp_path / 'saved' / 'train'} --client_column writer {DEAL}", tmp_path / "g.hdf5")
    assert set(shown(tmp_path / "g.hdf5")) == set(NUMBERS[:18])


def by_client(numbers: Any) -> dict[str, list[int]]:
    return {
        client: [n for n in numbers if client_of(n) == client] for client in {client_of(n) for n in numbers}
    }


def labelled(path: Path, numbers: Any = NUMBERS) -> dict[int, tuple[str, str, int]]:
    """Split, user and class number, checked against the numbers; 62 of 62 classes are not needed for it."""
    found = shown(path)
    assert set(found) == set(numbers)
    for number, (_, user, label) in found.items():
        assert (plain(user), int(label)) == (client_of(number), number % 3)
    return {number: (split, user, int(label)) for number, (split, user, label) in found.items()}


@pytest.mark.parametrize("block", [50, 1 << 20])
def test_leafs_pixels_by_sample(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same users in train and test; whom LEAF's split leaves behind without samples is no user."""
    monkeypatch.setattr(json_stream, "_BLOCK", block)
    train, test = by_client(NUMBERS[:18]), by_client(NUMBERS[18:])
    users = {user: leaf_user(found) for user, found in train.items()}
    path = write_leaf(
        tmp_path / "leaf" / "train" / "all_data_0_train_9.json", users, hierarchies=["a", "b", "c"]
    )
    content = json.loads(path.read_text())
    content["user_data"]["left-behind"] = {"x": [], "y": []}
    path.write_text(json.dumps(content, indent=1))
    tests = {user: leaf_user(found) for user, found in test.items()}
    write_leaf(tmp_path / "leaf" / "test" / "all_data_0_test_9.json", tests)
    output = convert(f"leaf --source {tmp_path / 'leaf'}", tmp_path / "f.hdf5")
    validate(output)
    for number, (split, user, _) in labelled(output).items():
        assert (split, user) == (
            ("train", client_of(number)) if number <= 18 else ("test", f"test-{client_of(number)}")
        )
    for number, pixels in pixels_of(output).items():
        assert np.array_equal(pixels, draw(number))
    with DataFile(output) as file:
        assert (file.storage, file.image_size) == ("raw", 32)


def test_leaf_by_user_keeps_names_and_may_deal_again(tmp_path: Path) -> None:
    found = by_client(NUMBERS)
    write_leaf(tmp_path / "leaf" / "train" / "a.json", {u: leaf_user(found[u]) for u in ("007", "bob")})
    write_leaf(tmp_path / "leaf" / "test" / "a.json", {"Zoë": leaf_user(found["Zoë"])})
    kept = labelled(convert(f"leaf --source {tmp_path / 'leaf'}", tmp_path / "f.hdf5"))
    assert {user for _, user, _ in kept.values()} == {"007", "bob", "Zoë"}
    dealt = labelled(convert(f"leaf --source {tmp_path / 'leaf'} --splits=deal {DEAL}", tmp_path / "g.hdf5"))
    assert {client_of(n) for n, (split, _, _) in dealt.items() if split == "train"} == set(found)


def test_leafs_file_names_are_images_of_a_folder(tmp_path: Path) -> None:
    for number in NUMBERS:
        write_image(tmp_path / "img" / f"{number:06d}.jpg", number)
    data: dict[str, dict[str, list[object]]] = {
        user: {"x": [f"{n:06d}.jpg" for n in found], "y": [n % 3 for n in found]}
        for user, found in by_client(NUMBERS).items()
    }
    write_leaf(tmp_path / "leaf" / "all_data_0.json", data)
    words = f"leaf --source {tmp_path / 'leaf'} --images {tmp_path / 'img'} {DEAL}"
    labelled(convert(words, tmp_path / "f.hdf5"))


def test_emnist_and_cifar100_of_tensorflow_federated(tmp_path: Path) -> None:
    write_tff(tmp_path / "emnist" / "fed_emnist_train.h5", by_client(NUMBERS[:18]))
    write_tff(tmp_path / "emnist" / "fed_emnist_test.h5", by_client(NUMBERS[18:]))
    output = convert(f"tff --source {tmp_path / 'emnist'}", tmp_path / "f.hdf5")
    found = labelled(output)
    assert {n for n, (split, _, _) in found.items() if split == "test"} == set(NUMBERS[18:])
    for number, pixels in pixels_of(output).items():
        assert np.array_equal(pixels, draw(number))
    path = write_tff(tmp_path / "cifar.h5", by_client(NUMBERS), "image", coarse=True)
    labelled(convert(f"tff --source {path} {DEAL}", tmp_path / "g.hdf5"))
    with DataFile(tmp_path / "g.hdf5") as file:
        assert file.annotation_names == ("labels", "coarse_labels")
        assert len(file.label_mapping("coarse_labels")) == 2


def test_flambys_centres_are_clients_and_its_columns_name_the_classes(tmp_path: Path) -> None:
    rows = []
    for number in range(24):
        write_image(tmp_path / "img" / f"ISIC_{number:07d}.jpg", number)
        fold = "test" if number % 5 == 0 else "train"
        names = dict.fromkeys(("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC", "UNK"), 0.0)
        row = {"image": f"ISIC_{number:07d}", **names, "target": number % 8, "center": number % 3}
        rows.append({**row, "fold": fold, "fold2": f"{fold}_{number % 3}"})
    table = write_csv(tmp_path / "train_test_folds.csv", rows)
    convert(f"flamby --images {tmp_path / 'img'} --labels {table}", tmp_path / "f.hdf5")
    classes = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    for number, found in shown(tmp_path / "f.hdf5").items():
        split = "test" if number % 5 == 0 else "train"
        assert found == (split, f"{'test-' * (split == 'test')}{number % 3}", classes[number % 8])


def test_fedscales_tables_have_images_in_folders_of_their_split(tmp_path: Path) -> None:
    (tmp_path / "client_data_mapping").mkdir()
    for split, numbers in (("train", NUMBERS[:18]), ("test", NUMBERS[18:])):
        rows = []
        for number in numbers:
            write_image(
                tmp_path / split / f"{number}.png" if split == "train" else tmp_path / f"{number}.png", number
            )
            row = {"client_id": client_of(number), "sample_path": f"{number}.png"}
            rows.append({**row, "label_name": label_of(number), "label_id": number % 3})
        write_csv(tmp_path / "client_data_mapping" / f"{split}.csv", rows)
    words = f"fedscale --images {tmp_path} --labels {tmp_path / 'client_data_mapping'}"
    assert check(convert(words, tmp_path / "f.hdf5")) == {n: "train" if n <= 18 else "test" for n in NUMBERS}


def test_what_was_stopped_goes_on(tmp_path: Path) -> None:
    """SIGTERM after a moment, until the command ends by itself; the result is that of an undisturbed one."""
    root = write_folder(tmp_path / "own", NUMBERS)
    words = ["folder", "--images", str(root), *DEAL.split(), "--workers=1"]
    convert(" ".join(words), tmp_path / "whole.hdf5")
    script = (
        "import os, signal, sys; from dataset.journal import Journal; real = Journal.put\n"
        "def put(self, name, content):\n"
        "    real(self, name, content); os.kill(os.getpid(), signal.SIGTERM)\n"
        "Journal.put = put\n"
        "from dataset.convert.__main__ import main; from dataset.cli import run; sys.exit(run(main))"
    )
    output = tmp_path / "f.hdf5"
    codes = []
    for _ in range(12):
        command = [sys.executable, "-c", script, *words, f"--output_file={output}"]
        codes.append(subprocess.run(command, capture_output=True, check=False).returncode)
        if codes[-1] == 0:
            break
        assert not output.exists()
    assert codes[0] == 75
    assert codes[-1] == 0
    with DataFile(output) as a, DataFile(tmp_path / "whole.hdf5") as b:
        assert a.content_sha256() == b.content_sha256()


@pytest.mark.parametrize("form", ["leaf", "tff", "hf"])
def test_a_part_is_read_from_any_image_on(tmp_path: Path, form: str) -> None:
    """As a preprocessing that was stopped goes on."""
    if form == "leaf":
        users = {user: leaf_user(found) for user, found in by_client(NUMBERS).items()}
        found = leaf.read(write_leaf(tmp_path / "a.json", users), None, None)
    elif form == "tff":
        found = tff.read(write_tff(tmp_path / "a.h5", by_client(NUMBERS)), None)
    else:
        write_hf(tmp_path / "a.parquet", NUMBERS)
        whole = pq.read_table(tmp_path / "a.parquet")
        with (
            pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
            pa.ipc.new_stream(sink, whole.schema) as stream,
        ):
            stream.write_table(whole, max_chunksize=6)
        found = hf.read(tmp_path / "a.arrow", hf.Columns("writer"), None)
    (part,) = found.parts
    images = [np.asarray(image).tobytes() for image in part.images(0)]
    assert len(images) == len(part.table) == 27
    for start in range(28):
        assert [np.asarray(image).tobytes() for image in part.images(start)] == images[start:]
