"""``python -m dataset.partitions``: what would be drawn, a CSV's users, and both in a copy of the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.cli import run
from dataset.partitions import __main__ as command
from dataset.partitions.__main__ import main
from dataset.partitions.of_file import drawn_of
from dataset.store.hdf5 import DataFile
from dataset.store.validate import main as describe
from dataset.store.validate import validate
from tests.dataset.store.test_hdf5 import partitioned, write

CSV = "image_id,user_id\n{0},berlin\n{1},NA\n{2},aarhus\n{3},berlin\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Seven training images with two partitions."""
    return write(tmp_path / "f.hdf5", "raw", splits=partitioned())


@pytest.fixture
def csv(path: Path, tmp_path: Path) -> Path:
    """Cities of four of the images."""
    with DataFile(path) as file:
        ids = list(file.split("train").image_ids)
    out = tmp_path / "cities.csv"
    out.write_text(CSV.format(ids[5], ids[0], ids[3], ids[2]))
    return out


def test_what_would_be_drawn_is_shown_beside_what_the_file_holds(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = [
        "--partition",
        "iid,classes-1-clients-2-seed-5",
        "--clients=3",
        "--seed=4",
        f"--output_dir={out}",
    ]
    assert run(main, [str(path), *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    names = [line.split()[1] for line in printed[1:7]]
    assert names[:2] == ["crossed", "geo-100"]
    assert {*names[2:4]} == {"iid-clients-3-seed-4", "classes-1-clients-2-seed-5"}
    content = {one["name"]: one for one in json.loads((out / "statistics.json").read_text())}
    assert content["iid-clients-3-seed-4"]["clients"] == 3
    assert content["classes-1-clients-2-seed-5"]["classes_per_client"]["max"] == 1
    assert (out / "clients.png").stat().st_size > 10_000
    with DataFile(path) as file:
        assert set(file.split("train").partitions) == {"crossed", "geo-100"}, "the file is as it was"


def test_images_of_no_client_are_counted(path: Path, csv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those that a CSV does not list, and those that equal shards leave over."""
    assert run(main, [str(path), f"--csv={csv}", "--partition=shards=2,iid", "--clients=3"]) == 0
    said = capsys.readouterr().out
    assert "train by cities: 4 of 7 images belong to no client" in said
    assert "train by shards-2-clients-3-seed-0: 1 of 7 images belong to no client" in said
    assert "iid-clients-3-seed-0: " not in said


def test_a_copy_holds_the_new_partitions_and_all_that_was_there(
    path: Path, csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "g.hdf5"
    words = ["--partition=shards=1", "--clients=2", f"--csv={csv}", f"--output_file={copy}"]
    before = path.read_bytes()
    assert run(main, [str(path), *words]) == 0
    assert path.read_bytes() == before
    validate(copy)
    with DataFile(path) as old, DataFile(copy) as new:
        was, now = old.split("train"), new.split("train")
        assert set(now.partitions) == {*was.partitions, "cities", "shards-1-clients-2-seed-0"}
        for name, partition in was.partitions.items():
            np.testing.assert_array_equal(now.partitions[name].rows, partition.rows)
        cities = now.partitions["cities"]
        assert list(cities.user_ids) == ["aarhus", "berlin"]
        assert [rows.tolist() for rows in np.split(cities.rows, cities.offsets[1:-1])] == [[3], [2, 5]]
        rows = np.arange(was.num_images)
        np.testing.assert_array_equal(new.read_images("train", rows, 8), old.read_images("train", rows, 8))
        assert new.fingerprint != old.fingerprint
        recipe = {"kind": "shards", "number": 1.0, "seed": 0}
        assert new.provenance == {**old.provenance, "drawn": {"shards-1-clients-2-seed-0": recipe}}
    assert run(describe, [str(copy)]) == 0
    assert "cities" in capsys.readouterr().out


def test_a_file_can_take_its_partitions_itself_and_take_them_again(path: Path, csv: Path) -> None:
    words = [str(path), f"--csv={csv}", f"--output_file={path}"]
    assert run(main, words) == 2, "it exists"
    assert run(main, [*words, "--overwrite"]) == 0
    with DataFile(path) as file:
        first = file.fingerprint
    csv.write_text(csv.read_text().replace("berlin", "bern"))
    assert run(main, [*words, "--overwrite"]) == 0
    validate(path)
    with DataFile(path) as file:
        assert file.fingerprint != first
        assert list(file.split("train").partitions["cities"].user_ids) == ["aarhus", "bern"]


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[str]], list[int]]:
    """Run another command after the first call of a function of this one; the list gets its exit code."""

    def arm(name: str, words: list[str]) -> list[int]:
        real, codes = getattr(command, name), list[int]()

        def calls(*args: Any) -> Any:
            result = real(*args)
            monkeypatch.setattr(command, name, real)
            codes.append(run(main, words))
            return result

        monkeypatch.setattr(command, name, calls)
        return codes

    return arm


def test_of_two_commands_that_add_to_one_file_the_second_is_refused(
    path: Path, tmp_path: Path, meanwhile: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each would write what it has read and its own partition, so that of the other would be lost."""
    before = {*tmp_path.iterdir()}
    words = [str(path), f"--output_file={path}", "--overwrite", "--clients=2"]
    second = [*words, "--partition=shards=1"]
    codes = meanwhile("measure", second)
    assert run(main, [*words, "--partition=iid"]) == 0
    assert codes == [2]
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert f"another process is writing {path}: wait until it ends, or choose another" in line
    assert run(main, second) == 0
    with DataFile(path) as file:
        new = {"iid-clients-2-seed-0", "shards-1-clients-2-seed-0"}
        assert {*file.split("train").partitions} == {"crossed", "geo-100", *new}
        assert {*file.provenance["drawn"]} == new
    assert {*tmp_path.iterdir()} == before


def test_a_file_that_is_replaced_while_it_is_read_is_not_copied(
    path: Path, tmp_path: Path, meanwhile: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rows of a partition would be those of other images."""
    copy = tmp_path / "g.hdf5"
    codes = meanwhile(
        "measure", [str(path), "--partition=shards=1", "--clients=2", f"--output_file={path}", "--overwrite"]
    )
    assert run(main, [str(path), "--partition=iid", "--clients=2", f"--output_file={copy}"]) == 2
    assert codes == [0]
    assert f"{path} was replaced while it was read: run the same command again" in capsys.readouterr().err
    assert {*tmp_path.iterdir()} == {path}


def test_a_copy_that_another_command_has_made_meanwhile_stays(
    path: Path, tmp_path: Path, meanwhile: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "g.hdf5"
    words = [str(path), "--clients=2", f"--output_file={copy}"]
    codes = meanwhile("output_file", [*words, "--partition=shards=1"])
    assert run(main, [*words, "--partition=iid"]) == 2
    assert codes == [0]
    assert f"{copy} already exists; add --overwrite to replace it" in capsys.readouterr().err
    with DataFile(copy) as file:
        assert "shards-1-clients-2-seed-0" in file.split("train").partitions


def test_a_partition_is_of_images_whoever_took_them(path: Path) -> None:
    """The same images in the order of the file, so the partition of the file and of a copy of it agree."""
    from dataset.partitions.drawn import read_name

    recipe = read_name("iid-clients-3-seed-4")
    assert recipe is not None
    with DataFile(path) as file:
        dealt = drawn_of(file, recipe)
        assert np.array_equal(np.sort(dealt.rows), np.arange(7))


@pytest.mark.parametrize(
    "words, message",
    [
        (["--output_file=x.hdf5"], "--output_file is for a file with new partitions: add --partition or"),
        (["--clients=3"], "--clients applies only to a --partition that does not have the value in"),
        (["--partition=iid", "--clients=0"], "--clients is 0; give at least 1"),
        (["--partition=iid", "--seed=-1"], "--seed is -1; give a number from 0 to"),
        (["--partition=iid", "--clients=8"], "7 images are not enough for 8 clients: use fewer clients"),
        (["--partition=round=3"], "give one or more of classes=NUMBER"),
        (["--csv=none.csv"], "--csv none.csv cannot be read"),
        (
            ["--partition=iid", "--clients=2", "--output_file={folder}"],
            "is a folder; give the name of a file",
        ),
    ],
)
def test_mistakes_end_in_one_line(
    words: list[str], message: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(main, [str(path), *(word.format(folder=tmp_path) for word in words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    "text, message",
    [
        ("image_id\nx\n", "has no column 'user_id'"),
        ("image_id,user_id\nnowhere,a\n", "line 2: 'nowhere' is not a training image of {path}"),
        ("image_id,user_id\n{id},\n", "line 2 has an empty user_id; write NA if the image has no user"),
        ("image_id,user_id\n{id},a\n{id},b\n", "a second time (line 2)"),
        ("image_id,user_id\n{id},a \n", "line 2 has white space around the user_id 'a '"),
        ("image_id,user_id\n{id},NA\n", "gives no image to any user"),
        ("\xff", "is not UTF-8 text"),
    ],
)
def test_a_csv_that_is_wrong_is_refused_with_its_line(
    text: str, message: str, path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DataFile(path) as file:
        image = file.split("train").image_ids[0]
    csv, copy = tmp_path / "c.csv", tmp_path / "g.hdf5"
    csv.write_bytes(text.replace("{id}", image).encode("latin-1"))
    assert run(main, [str(path), f"--csv={csv}", f"--output_file={copy}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message.format(path=path) in line
    assert not copy.exists()


def test_a_name_that_no_partition_can_have_is_refused(
    path: Path, csv: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = csv.rename(tmp_path / "my cities.csv")
    assert run(main, [str(path), f"--csv={odd}", f"--output_file={tmp_path / 'g.hdf5'}"]) == 2
    assert "a partition cannot be named 'my cities':" in capsys.readouterr().err
